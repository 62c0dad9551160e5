"""python scripts/export.py conf=NAME layout=LAYOUT out=FOLDER: write a trained drafter as another program reads it."""

from conf import command

main = command("train.upload:share")

if __name__ == "__main__":
    main()
