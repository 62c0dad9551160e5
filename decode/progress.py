"""Progress bars; in a log, where nothing can be drawn over, a line at intervals: work of an hour is not to look as if it hung."""

import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between a log's lines
Item = TypeVar("Item")


class Bar:
    """How many of `total` are done, what there is to say of them, and the time left; `done` were so before."""

    def __init__(self, what: str, total: int, done: int = 0, console: Console | None = None):
        self.console = console or Console()
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[says]}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), console=self.console)
        self.task = self.progress.add_task("", total=total, completed=done, says="")
        self.began = self.told = time.monotonic()
        self.tokens = 0

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def advance(self, count: int = 1, tokens: int = 0, says: str = "") -> None:
        """`count` more are done; it `says` something, or how fast `tokens` come where they are told."""
        now, self.tokens = time.monotonic(), self.tokens + tokens
        if tokens:
            says = f"{self.tokens / max(now - self.began, 1e-9):,.0f} tokens/s"
        self.progress.update(self.task, advance=count, says=says)
        if not self.console.is_terminal and not self.progress.finished and now - self.told >= EVERY:
            self.told = now
            self.console.print(self.progress.make_tasks_table(self.progress.tasks))


def tracked(
    work: Iterable[Item], what: str, total: int | None = None, console: Console | None = None
) -> Iterator[Item]:
    """The items of `work`, of which there are `total`, or as many as it holds, under a bar."""
    if total is None:
        assert isinstance(work, Collection)
        total = len(work)
    with Bar(what, total, console=console) as bar:
        for item in work:
            yield item
            bar.advance()
