"""Benchmark prompts: which questions a drafter is measured on."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

SHIPPED = Path(__file__).parent / "bench"


def bench_file(name: str) -> Path:
    """The file of the benchmark `name`: a shipped one, or a path of the user's to rows with `turns`."""
    shipped = sorted(file.name.split(".")[0] for file in SHIPPED.glob("*.jsonl*"))
    for found in (SHIPPED / f"{name}.jsonl.gz", SHIPPED / f"{name}.jsonl", Path(name)):
        if found.is_file():
            return found
    raise ValueError(
        f"there is no benchmark {name!r}; use {', '.join(shipped)}, or the path of a .jsonl file whose rows have turns"
    )


def questions(name: str) -> list[str]:
    """The first user turn of every row of the benchmark `name`."""
    file = bench_file(name)
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        asked = [_first_turn(file, number, line) for number, line in enumerate(lines, start=1)]
    if not asked:
        raise ValueError(f"the benchmark {file} is empty")
    return asked


def _first_turn(file: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError(f"{file} line {number} is no JSON; every line of a .jsonl file is one object") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ValueError(f"{file} line {number} has no prompt; every row needs turns, a list of user messages")
    return turns[0]


def bench_prompts(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int, longest: int
) -> dict[str, list[list[int]]]:
    """For each benchmark, `count` prompts of up to `longest` tokens, taken evenly over the file of those that fit."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "the target's tokenizer has no chat template, so benchmark questions cannot be asked; choose an instruct model"
        )
    chosen = {}
    for name in names:
        asked = ([{"role": "user", "content": text}] for text in questions(name))
        every = [
            cast(
                list[int],
                tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False),
            )
            for turn in asked
        ]
        fitting = [ids for ids in every if len(ids) <= longest]
        if not fitting:
            raise ValueError(f"no prompt of {name} is within decode.longest={longest} tokens; raise it")
        few = min(count, len(fitting))
        chosen[name] = [fitting[index * len(fitting) // few] for index in range(few)]
    return chosen
