"""python scripts/convert.py FOLDER target=... out=...: read a drafter that another program wrote."""

from conf import named

main = named("train.convert:convert")

if __name__ == "__main__":
    main()
