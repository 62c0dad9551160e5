"""What is shown of the data before anything trains."""

import re

import pytest

from models.source import byte_tokenizer
from runs import composed
from train.chat import Example
from train.show import SIZES, coloured, coverage, histogram, show


def test_the_command_shows_counts_lengths_coverage_and_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    show(composed("show=2"))
    shown = capsys.readouterr().out
    for word in ("conversations", "answers", "tokens up to", "draft vocabulary", "user:", "assistant:"):
        assert word in shown, word
    assert len(re.findall(r"of them teach", shown)) == 2
    show(composed("show=0"))
    assert "of them teach" not in capsys.readouterr().out


def cells(table: object, column: int) -> list[str]:
    return list(table.columns[column].cells)


def test_lengths_fall_under_the_next_power_of_two() -> None:
    table = histogram([1, 32, 33, 64, 65, 500])
    assert cells(table, 0) == ["32", "64", "128", "256", "512"]
    assert cells(table, 1) == ["2", "2", "1", "0", "1"]
    assert len(cells(table, 2)[0]) == 2 * len(cells(table, 2)[2])


def test_coverage_is_of_what_the_target_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.show.SIZES", (1, 2))
    said = [7, 7, 7, 8, 8, 9]
    table = coverage([Example([5, 5, 5, *said], [False] * 3 + [True] * 6)])
    assert [column.header for column in table.columns] == ["draft vocabulary", "1", "2", "3"]
    assert [cells(table, at)[0] for at in (1, 2, 3)] == ["50.0%", "83.3%", "100.0%"]
    assert list(SIZES) == sorted(SIZES)


def test_what_teaches_is_green_and_the_rest_dim() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("abcdef").input_ids
    text = coloured(tokenizer, Example(ids, [False, True, True, False, False, True]))
    assert text.plain == "abcdef"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans if span.start < span.end] == [
        ("a", "dim"), ("bc", "green"), ("de", "dim"), ("f", "green"),
    ]  # fmt: skip
