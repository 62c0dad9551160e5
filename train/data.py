"""Rows of conversations in, examples out.

A row is {"id", "messages": [{"role", "content"}, ...], "tools"}; an assistant message may carry the token `ids` that the
target wrote, which are then used as they are and never tokenised again, and `reasoning_content`. A row may instead be
{"text"}, all of which the target is taken to say, or {"input_ids", "loss_mask"}.
`python -m train.data conf=NAME show=3` shows what a drafter would learn from.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from conf import command
from models.files import write_whole
from train.chat import Example, Row, example


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows beside `path` and rename, the same bytes for the same rows. Raises ValueError where the disk refuses."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
    try:
        write_whole(path, gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); make room, or choose another place") from None


def load_examples(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], longest: int, reasoning: bool = True
) -> list[Example]:
    """Every conversation of `rows`, cut to `longest` tokens; those whose answer is cut away entirely are left out."""
    found = []
    for row in rows:
        whole = example(tokenizer, row, ends, reasoning)
        cut = Example(whole.input_ids[:longest], whole.loss_mask[:longest])
        if any(cut.loss_mask):
            found.append(cut)
    if not found:
        raise ValueError(
            f"the data hold no conversation with an answer within data.longest={longest} tokens; raise it or give other data"
        )
    return found


def spoken(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """[P] the tokens before those that the target said, and [P] those."""
    pairs = [
        (before, token)
        for example in examples
        for before, token, said in zip([0, *example.input_ids], example.input_ids, example.loss_mask, strict=False)
        if said
    ]
    before, token = torch.tensor(pairs).unbind(1)
    return before, token


if __name__ == "__main__":
    command("train.show:show")()
