"""How far the loss curve of bf16 autocast is from fp32's: python scripts/compare_precision.py [override ...]

The same run of eagle3_smol, from the same weights, on the same batches in the same order: in fp32, in fp32 at a learning
rate a ten-thousandth higher, which shows how far chance alone sets two runs apart, and in bf16. Prints the losses over
every ten steps, and how far they are from the first's.
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
ARMS = {
    "fp32": ["optim.precision=fp32"],
    "fp32, nudged": ["optim.precision=fp32", "optim.lr=1.0001e-3"],
    "bf16": ["optim.precision=bf16"],
}


def losses(words: Sequence[str]) -> list[float]:
    """Every step's loss of the run that `words` mean, which another process makes; a mistake of its ends this one too."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*WORDS, *words, f"out={folder}", "overwrite=true"]
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
    curves = {name: list(windows(losses([*arm, *sys.argv[1:]]))) for name, arm in ARMS.items()}
    exact = curves.pop("fp32")
    apart = {name: [one / true - 1 for one, true in zip(curve, exact, strict=True)] for name, curve in curves.items()}
    for number, true in enumerate(exact):
        others = "  ".join(f"{name} {shares[number]:+.2%}" for name, shares in apart.items())
        print(f"to step {(number + 1) * WINDOW}: fp32 {true:.4f}  {others}")
    for name, shares in apart.items():
        print(f"{name}: {mean(shares):+.2%} on average, at most {max(map(abs, shares)):.2%} apart")


if __name__ == "__main__":
    if sys.argv[1:2] == [TOLD]:
        train(sys.argv[2:])
    else:
        main()
