"""What the members of a sweep came to, side by side: Hydra calls this when `python -m train --multirun` has ended.

It imports nothing heavy, as every command has it at hand.
"""

from pathlib import Path
from typing import Any

import yaml
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


class Sweep(Callback):
    """One line for each member that left a drafter, the best first."""

    def __init__(self) -> None:
        self.members: list[tuple[str, Path]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **rest: Any) -> None:
        """Remember a member by what it was told."""
        self.members.append((" ".join(job_return.overrides or []), Path(config.out)))

    def on_multirun_end(self, config: DictConfig, **rest: Any) -> None:
        """Print the table."""
        cards = [(told, out / "drafter.yaml") for told, out in self.members]
        rows = [(told, yaml.safe_load(card.read_text())) for told, card in cards if card.exists()]
        if len(rows) > 1:
            Console().print(table_of(rows))


def table_of(rows: list[tuple[str, dict[str, Any]]]) -> Table:
    """The members by tau on the same held-out text, and how it was reached."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "tau", "95 %", "decoded", "at step", "greedy by depth"):
        table.add_column(name, justify="left" if name in ("run", "greedy by depth") else "right")
    for told, card in sorted(rows, key=lambda row: -row[1]["training"]["best"]["tau"]):
        best, greedy = card["training"]["best"], card["acceptance"]["greedy"]
        decoded = "" if best["decoded"] is None else f"{best['decoded']:.2f}"
        spread, rates = f"{best['low']:.2f}-{best['high']:.2f}", " ".join(f"{rate:.2f}" for rate in greedy)
        table.add_row(told, f"{best['tau']:.2f}", spread, decoded, f"{best['step']}", rates)
    return table
