"""The raw log of a measurement: what every round did to every row, enough to recompute each figure."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from decode.engine import Run
from decode.figures import Sample


def trace_lines(arm: str, batch: int, sample: Sample, run: Run) -> Iterator[dict[str, Any]]:
    """One line for reading the prompts of a batch, and one for each round and row.

    Rows decoded side by side share the seconds of their round, so (arm, batch, round) is counted once.
    """
    named = {"arm": arm, "bench": sample.bench, "batch": batch}
    first = {sample.start + one.prompt: one.tokens[0] for one in run.generations}
    yield {**named, "prefill": run.prefill, "first": first}
    done: Counter[int] = Counter()
    for number, turn in enumerate(run.turns):
        for who in turn.moved:
            step = who.steps[done[who.prompt]]
            done[who.prompt] += 1
            before = 1 + sum(who.committed[: done[who.prompt] - 1])
            yield {
                **named,
                "prompt": sample.start + who.prompt,
                "round": number,
                "seconds": turn.seconds,
                "width": turn.width,
                "nodes": step.nodes,
                "path": list(step.path),
                "offered": step.offered,
                "committed": step.committed,
                "tokens": who.tokens[before : before + step.committed],
            }


def write_trace(file: Path, arms: dict[str, Sequence[Sample]]) -> None:
    """The rounds of plain decoding and of every arm, as JSON lines."""
    part = file.with_name(f".{file.name}.part")
    with part.open("w", encoding="utf-8") as lines:
        for number, (name, samples) in enumerate(arms.items()):
            for batch, sample in enumerate(samples):
                runs = [(name, sample.drafted)] if number else [("plain", sample.plain), (name, sample.drafted)]
                for arm, run in runs:
                    lines.writelines(f"{json.dumps(line)}\n" for line in trace_lines(arm, batch, sample, run))
    part.rename(file)
