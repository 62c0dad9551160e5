"""What losses buy at equal data and steps: python scripts/compare_losses.py FOLDER [override ...]

Trains eagle3_smol and medusa_smol with each loss under two seeds, measures every drafter as a chain, and prints one
table. Overrides are given to training and measuring alike: optim.steps=600 for more than the confs' own steps (of
which four minutes hold about twice as many on one idle core), decode.temperature=1 decode.proposal=sampled for drawn
text, where losses of acceptance should pay most. What is finished in FOLDER is not done again, and a training that was
stopped goes on.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

from decode.gather import gather
from decode.words import Told, figure, pooled
from models.shelf import CARD

CONFS, LOSSES, SEEDS = ("eagle3_smol", "medusa_smol"), ("kl", "lk_hybrid", "acceptance"), (0, 1)
ROOT = Path(__file__).parent.parent


def run(words: Sequence[str]) -> None:
    """One command of Outrider; a mistake of its ends this one too."""
    if code := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        sys.exit(code)


def measured(folder: Path, conf: str, loss: str, seed: int, overrides: Sequence[str]) -> Told:
    """The report of one drafter, which is trained and measured unless that was done."""
    told = [f"conf={conf}", f"drafter.loss={loss}", f"seed={seed}", f"out={folder}", *overrides]
    if not (folder / CARD).exists():
        run(["-m", "train", *told])
    if not (folder / "chain" / "report.json").exists():
        run(["decode/run.py", *told, f"trained={folder}", "decode.tree=chain", f"decode.out={folder}/chain"])
    (report,) = gather([folder / "chain"]).values()
    return report


def rows(home: Path, overrides: Sequence[str]) -> Iterator[list[str]]:
    """For each conf and loss the acceptance length under every seed, with its interval over prompts, and their mean."""
    yield ["conf", "loss", *(f"tau, seed {seed}" for seed in SEEDS), "mean"]
    for conf, loss in product(CONFS, LOSSES):
        reports = [measured(home / f"{conf}-{loss}-{seed}", conf, loss, seed, overrides) for seed in SEEDS]
        taus = [pooled(report)["tau"] for report in reports]
        yield [conf, loss, *map(figure, taus), f"{mean(tau['value'] for tau in taus):.3f}"]


def main() -> None:
    if len(sys.argv) < 2 or "=" in sys.argv[1]:
        sys.exit(
            "give the folder that the drafters stay in, then overrides: compare_losses.py FOLDER [optim.steps=600]"
        )
    table = list(rows(Path(sys.argv[1]).resolve(), sys.argv[2:]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
