"""python scripts/upload.py FOLDER hub=OWNER/NAME: put an export on the Hub."""

from conf import named

main = named("train.upload:upload")

if __name__ == "__main__":
    main()
