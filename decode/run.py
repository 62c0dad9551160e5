"""python decode/run.py conf=NAME: measure a drafter."""

from conf import command

main = command("decode.measure:measure")

if __name__ == "__main__":
    main()
