"""What a run shows: a progress line, acceptance at intervals, curves in wandb if asked."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import wandb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conf.schema import Wandb


@contextmanager
def tokens_bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over `total` tokens with their rate and the time left; yields how to advance it."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, disable=quiet) as progress:
        bar, began = progress.add_task("", total=total, rate=""), time.perf_counter()

        def advance(tokens: int) -> None:
            progress.advance(bar, tokens)
            rate = progress.tasks[0].completed / (time.perf_counter() - began)
            progress.update(bar, rate=f"{rate:,.0f} tokens/s")

        yield advance


class Journal:
    """Shown on the first rank only; the others stay silent."""

    def __init__(self, steps: int, loud: bool, curves: Wandb, project: str, config: dict[str, Any], out: str):
        self.console = Console(quiet=not loud)
        columns = (
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console)
        self.bar = self.progress.add_task("", total=steps, state="")
        mode: Any = curves.value if loud else "disabled"
        self.curves = wandb.init(project=project, config=config, dir=out, mode=mode) if mode != "disabled" else None

    def __enter__(self) -> "Journal":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.curves is not None:
            self.curves.finish(exit_code=int(kind is not None))

    def step(self, done: int, loss: float, tokens_per_second: float, rate: float) -> None:
        """After each step."""
        self.progress.update(self.bar, completed=done, state=f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")
        if self.curves is not None:
            self.curves.log({"loss": loss, "tokens_per_second": tokens_per_second, "lr": rate}, step=done)

    def acceptance(self, done: int, greedy: Sequence[float], sampled: Sequence[float]) -> None:
        """After each evaluation: first picks that were the target's, and what sampling would accept, by depth."""
        first = " ".join(f"{value:.3f}" for value in greedy)
        second = " ".join(f"{value:.3f}" for value in sampled)
        self.console.print(f"step {done}: held-out acceptance by depth, greedy {first}, sampled {second}")
        if self.curves is not None:
            self.curves.log(
                {f"greedy/{k}": value for k, value in enumerate(greedy, 1)}
                | {f"sampled/{k}": value for k, value in enumerate(sampled, 1)},
                step=done,
            )
