"""python scripts/doctor.py FOLDER target=...: examine a drafter that is to be served."""

from conf import named

main = named("train.doctor:examine")

if __name__ == "__main__":
    main()
