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
        rows = [json.loads(line) for line in lines]
    if not rows:
        raise ValueError(f"the benchmark {file} is empty")
    bad = next(
        (number for number, row in enumerate(rows, 1) if not row.get("turns") or not row["turns"][0].strip()), None
    )
    if bad is not None:
        raise ValueError(f"{file} line {bad} has no prompt; every row needs turns, a list of user messages")
    return [row["turns"][0] for row in rows]


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
