"""python scripts/regenerate.py conf=NAME regenerate.prompts=FILE regenerate.out=FILE: let the target answer prompts."""

from conf import command

main = command("train.regenerate:answer")

if __name__ == "__main__":
    main()
