"""How far the loss curve of bf16 autocast is from fp32's: python scripts/compare_precision.py [override ...]

The same run of eagle3_smol, from the same weights, on the same batches in the same order: in fp32, in fp32 from weights
that are a hundredth away, which shows how far chance alone sets two runs apart, and in bf16; and what bf16 makes of the
first run's weights at every step. Prints the losses over every ten steps, and how far they are from the first's.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import torch

from conf import command
from models.drafter import FeatureBatch, Loss
from train.log import Journal
from train.trainee import Trainee

WORDS = ["conf=eagle3_smol", "optim.steps=200", "log.evaluate_every=1000", "log.save_every=1000", "log.prompts=0"]
WINDOW = 10  # steps
TOLD, READ = "loss of a step:", "in bf16:"
AWAY = "away"  # the run starts from weights a hundredth away
ARMS = {
    "fp32 from a hundredth away": ["optim.precision=fp32", AWAY],
    "bf16": ["optim.precision=bf16"],
}


def losses(words: Sequence[str]) -> tuple[list[float], list[float]]:
    """Every step's loss of the run that `words` mean, which another process makes, and what bf16 makes of its weights.

    A mistake of the run's ends this one too.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [*WORDS, *words, f"out={folder}", "overwrite=true"]
        told = subprocess.run([sys.executable, __file__, TOLD, *words], stdout=subprocess.PIPE, text=True)
    if told.returncode:
        sys.exit(told.returncode)
    lines = told.stdout.splitlines()
    own, read = ([float(line.removeprefix(kind)) for line in lines if line.startswith(kind)] for kind in (TOLD, READ))
    return own, read


def train(words: list[str]) -> None:
    """The run itself, which tells every loss to the last digit."""
    show, make, forward = Journal.step, Trainee.__init__, Trainee.forward

    def tell(journal: Journal, done: int, loss: float, *rest: Any) -> None:
        print(f"\n{TOLD}{loss!r}")
        show(journal, done, loss, *rest)

    def away(trainee: Trainee, *how: Any, **more: Any) -> None:
        make(trainee, *how, **more)
        generator = torch.Generator().manual_seed(0)
        for weight in trainee.parameters():
            weight.data *= 1 + 0.01 * torch.randn(weight.shape, generator=generator)

    def both(trainee: Trainee, batch: FeatureBatch) -> Loss:
        if trainee.training and not trainee.bf16:
            trainee.bf16 = True
            with torch.no_grad():
                read = forward(trainee, batch)
            trainee.bf16 = False
            print(f"\n{READ}{float(read.total / read.counted)!r}")
        return forward(trainee, batch)

    Journal.step = tell  # type: ignore[method-assign]
    if AWAY in words:
        Trainee.__init__ = away  # type: ignore[method-assign]
    else:
        Trainee.forward = both  # type: ignore[method-assign]
    sys.argv[1:] = [word for word in words if word != AWAY]
    command("train.job:train")()


def windows(curve: Sequence[float]) -> Iterator[float]:
    """The mean of every ten steps."""
    for start in range(0, len(curve), WINDOW):
        yield mean(curve[start : start + WINDOW])


def main() -> None:
    fp32, read = losses(["optim.precision=fp32", *sys.argv[1:]])
    curves = {"bf16 of the same weights": read} | {name: losses([*arm, *sys.argv[1:]])[0] for name, arm in ARMS.items()}
    exact = list(windows(fp32))
    apart = {
        name: [one / true - 1 for one, true in zip(windows(curve), exact, strict=True)]
        for name, curve in curves.items()
    }
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
