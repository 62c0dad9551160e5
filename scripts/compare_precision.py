"""How far the loss curve of bf16 autocast is from fp32's: python scripts/compare_precision.py [override ...]

The same run of eagle3_smol twice, from the same weights, on the same batches in the same order; prints both losses over
every ten steps, and how far apart they are.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from conf import command
from train.log import Journal

WORDS = ["conf=eagle3_smol", "optim.steps=200", "log.evaluate_every=1000", "log.save_every=1000", "log.prompts=0"]
WINDOW = 10  # steps
TOLD = "loss of a step:"


def losses(precision: str, overrides: Sequence[str]) -> list[float]:
    """Every step's loss of the run in `precision`, which another process makes; a mistake of its ends this one too."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*WORDS, f"optim.precision={precision}", f"out={folder}", "overwrite=true", *overrides]
        told = subprocess.run([sys.executable, __file__, TOLD, *words], stdout=subprocess.PIPE, text=True)
    if told.returncode:
        sys.exit(told.returncode)
    return [float(line.removeprefix(TOLD)) for line in told.stdout.splitlines() if line.startswith(TOLD)]


def train(words: list[str]) -> None:
    """The run itself, which tells every loss to the last digit."""
    show = Journal.step

    def tell(journal: Journal, done: int, loss: float, *rest: Any) -> None:
        print(f"\n{TOLD}{loss!r}")
        show(journal, done, loss, *rest)

    Journal.step = tell  # type: ignore[method-assign]
    sys.argv[1:] = words
    command("train.job:train")()


def windows(curve: Sequence[float]) -> Iterator[float]:
    """The mean of every ten steps."""
    for start in range(0, len(curve), WINDOW):
        yield mean(curve[start : start + WINDOW])


def main() -> None:
    fp32, bf16 = (list(windows(losses(precision, sys.argv[1:]))) for precision in ("fp32", "bf16"))
    for number, (exact, rounded) in enumerate(zip(fp32, bf16, strict=True), start=1):
        print(f"to step {number * WINDOW}: fp32 {exact:.4f}  bf16 {rounded:.4f}  {rounded / exact - 1:+.2%}")
    apart = [abs(rounded / exact - 1) for exact, rounded in zip(fp32, bf16, strict=True)]
    print(f"apart by {mean(apart):.2%} on average, at most {max(apart):.2%}")


if __name__ == "__main__":
    if sys.argv[1:2] == [TOLD]:
        train(sys.argv[2:])
    else:
        main()
