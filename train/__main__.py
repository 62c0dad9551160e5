"""python -m train conf=NAME: train a drafter."""

from conf import command

main = command("train.job:train")

if __name__ == "__main__":
    main()
