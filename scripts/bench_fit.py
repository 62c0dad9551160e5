"""How many tokens a second the whole training loop reads: python scripts/bench_fit.py [override ...]

Of eagle3_smol from cached features, which are extracted first where they are not there; prompt and answer tokens count
alike. `data.features=online` lets the target read them on the way. What stops the clock: evaluation and saving. An idle
machine is wanted; the product's speed stands beside, to compare machines by.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_step import yardstick

from conf import command
from train import job

WORDS = ["conf=eagle3_smol", "optim.steps=100", "optim.warmup=10", "log.evaluate_every=1000", "log.save_every=1000"]
aside = [0.0]  # seconds that are not the loop's


def apart(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, whose seconds are kept out."""

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*given)
        finally:
            aside[0] += time.perf_counter() - began

    return timed


def measured(fit: Callable[..., Any]) -> Callable[..., Any]:
    """The loop, with its tokens a second told at the end."""

    def told(trainee: Any, source: Any, judge: Any, run: Any, engine: Any, keeper: Any) -> Any:
        keeper.save = apart(keeper.save)
        began = time.perf_counter()
        progress = fit(trainee, source, apart(judge), run, engine, keeper)
        seconds = time.perf_counter() - began - aside[0]
        steps = range(run.optim.steps * run.optim.accumulate)
        tokens = sum(source.lengths[at] for number in steps for at in source.piece(number))
        speed = yardstick(torch.float32) / 1e9
        print(
            f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s on {torch.get_num_threads()} threads, "
            f"whose product of 512 rows reaches {speed:.1f} GFLOP a CPU second"
        )
        return progress

    return told


if __name__ == "__main__":
    job.fit = measured(job.fit)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*WORDS, f"out={folder}", "overwrite=true", *sys.argv[1:]]
        command("train.job:train")()
