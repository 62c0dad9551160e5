"""Conversations on disk: JSONL files in, examples out.

A row is {"id", "messages": [{"role", "content"}, ...], "tools"}; an assistant message may carry the token `ids` that the
target wrote, which are then used as they are and never tokenised again, and `reasoning_content`. A row may instead be
{"input_ids", "loss_mask"}.
`python -m train.data conf=NAME show=3` shows what a drafter would learn from.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from conf import command
from train.chat import Example, Row, example


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file, plain or gzipped."""
    if not path.exists():
        raise ValueError(f"there is no data file {path}; check data.path")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                raise ValueError(
                    f"{path} line {number} is no JSON; every line of a .jsonl file is one object"
                ) from None
            if not isinstance(row, dict) or not ("messages" in row or "input_ids" in row):
                raise ValueError(
                    f"{path} line {number} has neither messages nor input_ids; see train/data.py for the form of a row"
                )
            yield row


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows beside `path` and rename, the same bytes for the same rows."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text)
    beside.rename(path)


def load_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], longest: int, reasoning: bool = True
) -> list[Example]:
    """Every conversation of `path`, cut to `longest` tokens; those whose answer is cut away entirely are left out."""
    found = []
    for row in read_rows(path):
        whole = example(tokenizer, row, ends, reasoning)
        cut = Example(whole.input_ids[:longest], whole.loss_mask[:longest])
        if any(cut.loss_mask):
            found.append(cut)
    if not found:
        raise ValueError(
            f"{path} holds no conversation with an answer within data.longest={longest} tokens; raise it or give other data"
        )
    return found


if __name__ == "__main__":
    command("train.show:show")()
