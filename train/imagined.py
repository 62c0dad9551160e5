"""Prompts out of nothing: the target itself writes what a user might ask (Magpie, Xu et al. 2024).

It is given its chat template up to where the user's words begin, and goes on.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decode.engine import Generation, rounds
from decode.progress import tracked
from models.drafter import Budget, Plain
from models.sampling import Sampling
from models.target import Target
from train.chat import Row
from train.clean import cleaned, report
from train.data import write_rows
from train.sources import conversations_of

MARK = "WORDS-OF-THE-USER"  # stands in for them where the template is rendered


def imagined(
    target: Target, count: int, limit: int, sampling: Sampling, seats: int, near: float, kept: Path
) -> list[Row]:
    """Up to `count` conversations that hold one question of at most `limit` tokens, kept in the file `kept` for a run that is resumed.

    A question that does not end, is empty, or is like one before or one of a benchmark is dropped. A target without a
    template goes on from its start token instead, and what it says is a text.
    """
    if not kept.exists():
        opening = opening_of(target.tokenizer)
        turns = rounds(target, Plain(), [opening] * count, limit, Budget(nodes=1), sampling, seats)
        finished = [one for turn in tracked(turns, "imagine", _passes(count, limit, seats)) for one in turn.finished]
        rows, dropped = cleaned(as_rows(target.tokenizer, opening, finished), near)
        Console().print(report(f"{count:,} imagined", len(rows), dropped))
        if not rows:
            raise ValueError(
                f"none of the {count} questions that the target imagined can be used; ask for more, or give prompts"
            )
        write_rows(kept, rows)
    return list(conversations_of(kept))


def _passes(count: int, limit: int, seats: int) -> int:
    """How many passes it takes where no question ends early: the progress bar hurries at the end."""
    return -(-count // seats) * limit


def opening_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of all that stands before the first words of a user, or the start token of a model without a template."""
    if tokenizer.chat_template is None:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                "the target has neither a chat template nor a start token, so it cannot begin by itself; give prompts"
            )
        return [cast(int, tokenizer.bos_token_id)]
    message = {"role": "user", "content": MARK}
    text = cast(str, tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=False))
    before, found, _ = text.partition(MARK)
    if not found or not before:
        raise ValueError(
            "the chat template has nothing before the user's words, so the target cannot imagine them; give prompts"
        )
    return cast(list[int], tokenizer(before, add_special_tokens=False).input_ids)


def as_rows(tokenizer: PreTrainedTokenizerBase, opening: Sequence[int], written: Iterable[Generation]) -> list[Row]:
    """What was written, in the order in which it was asked for: a question each, or a text where there is no template."""
    rows: list[Row] = []
    for one in sorted(written, key=lambda one: one.prompt):
        text = cast(str, tokenizer.decode(one.tokens, skip_special_tokens=True)).strip()
        if tokenizer.chat_template is None:
            rows.append({"id": f"imagined-{one.prompt}", "text": text})
        elif one.ended and text:
            rows.append({"id": f"imagined-{one.prompt}", "messages": [{"role": "user", "content": text}]})
    return rows
