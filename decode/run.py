"""python decode/run.py conf=NAME: measure a drafter, or answer a question with it."""

from conf import command

main = command("decode.talk:decode")

if __name__ == "__main__":
    main()
