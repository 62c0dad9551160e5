"""python scripts/extract.py conf=NAME: write what the target makes of the conversations to disk, for data.features=cached."""

from conf import command

main = command("train.job:extract")

if __name__ == "__main__":
    main()
