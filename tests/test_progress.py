"""What bars say where nothing can be drawn over."""

import io

import pytest
from rich.console import Console

from decode import progress
from decode.progress import Bar, tracked


def test_a_log_gets_a_line_at_intervals_and_the_last_one_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    log = io.StringIO()
    with Bar("regenerate", 5, console=Console(file=log, width=100)) as bar:
        for _ in range(5):
            bar.advance(tokens=40)
    lines = log.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["2/5", "4/5", "5/5"]
    assert all(line.startswith("regenerate") for line in lines)
    assert "2 tokens/s" in lines[0]


def test_a_terminal_gets_no_lines_but_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True)
    assert list(tracked([1, 2, 3], "measuring", console=console)) == [1, 2, 3]
    assert screen.getvalue().count("\n") == 1


def test_a_quiet_console_says_nothing() -> None:
    log = io.StringIO()
    assert list(tracked(range(3), "measuring", console=Console(file=log, quiet=True))) == [0, 1, 2]
    assert log.getvalue() == ""
