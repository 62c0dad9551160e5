"""Regimes: every sweep is measured and foretold, and the crossing stands where the line says."""

import json
import re
from pathlib import Path

import pytest

from decode.arms import arms_of
from decode.choice import CHAIN, DYNAMIC
from decode.cost import Cost
from decode.engine import PHASES, Generation, Round, Step
from decode.engine import Run as Decoded
from decode.figures import seconds_of, tokens_of
from decode.opening import open_tokenizer
from decode.regimes import busy, check, crossing, prompts_of, regimes, sweeps_of
from models.drafter import Budget
from runs import changed, composed

SMALL = (
    "drafter=draft_model", "drafter.layers=1", "decode.depth=2", "decode.nodes=5", "regimes.rows=[1,3]",
    "regimes.contexts=[60,90]", "regimes.nodes=[2,4]", "regimes.prompts=2", "regimes.tokens=5",
)  # fmt: skip


def test_every_sweep_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = regimes(composed(*SMALL, f"decode.out={tmp_path}"))
    at = {name: [spot.at for spot in spots] for name, spots in found.sweeps.items()}
    assert at == {"batch": [1, 3], "context": [60, 90], "guesses of a chain": [1, 2], "nodes of a tree": [2, 4]}
    every = [spot for spots in found.sweeps.values() for spot in spots]
    assert all(1 <= spot.tau <= 3 and spot.speedup.value > 0 and spot.foretold > 0 for spot in every)
    told = json.loads((tmp_path / "regimes.json").read_text())
    assert [spot["tau"] for spot in told["sweeps"]["batch"]] == [spot.tau for spot in found.sweeps["batch"]]
    assert told["settings"]["target"] == "tiny"
    page = (tmp_path / "regimes.html").read_text()
    assert page.count("<figure>") == 5
    assert "Speed-up by batch" in page
    shown = capsys.readouterr().out
    assert "guesses of a chain:" in shown
    assert f"written to {tmp_path}/regimes.html" in shown


def test_prompts_have_the_length_asked_for_and_end_with_a_question() -> None:
    run = composed(*SMALL)
    short, long = prompts_of(run, 60), prompts_of(run, 200)
    assert {len(prompt) for prompt in short} == {60}
    assert {len(prompt) for prompt in long} == {200}
    assert len(short) == len(long) == 3  # as many as the largest batch has rows
    assert len({tuple(prompt) for prompt in long}) > 1
    assert all(prompt[-60:] == tail for prompt, tail in zip(long, short, strict=True))
    said = open_tokenizer(run.target).decode(short[0])
    assert said.endswith(open_tokenizer(run.target).decode(short[1])[-8:])  # the template's call to answer


def test_a_sweep_varies_one_thing() -> None:
    run = composed(*SMALL)
    (arm,) = arms_of(run)
    sweeps = sweeps_of(run, arm)
    assert [(one.rows, one.context) for one in sweeps["batch"].values()] == [(1, 60), (3, 60)]
    assert [(one.rows, one.context) for one in sweeps["context"].values()] == [(1, 60), (1, 90)]
    assert [(one.kind, one.budget) for one in sweeps["guesses of a chain"].values()] == [
        (CHAIN, Budget((), 2, 1, 1)), (CHAIN, Budget((), 3, 2, 1)),
    ]  # fmt: skip
    assert [(one.kind, one.budget.nodes) for one in sweeps["nodes of a tree"].values()] == [(DYNAMIC, 2), (DYNAMIC, 4)]


def test_a_batch_counts_while_all_its_rows_write() -> None:
    step, seconds = Step(0, (), 0, 1), dict.fromkeys(PHASES, 1.0)
    generations = [Generation(row, [7] * (count + 1), False, [step] * count) for row, count in enumerate((3, 5, 0))]
    turns = [Round(seconds, 0.0, 1, generations, []) for _ in range(5)]
    found = busy(Decoded(generations, turns))
    assert [len(one.steps) for one in found.generations] == [3, 3, 0]
    assert (tokens_of(found), seconds_of(found)) == (6, 12.0)


def test_the_crossing_lies_on_the_line() -> None:
    assert crossing([(1, 1.4), (2, 1.2), (4, 0.9)]) == pytest.approx(2 + 2 * 0.2 / 0.3)
    assert crossing([(1, 1.4), (2, 1.0)]) is None
    assert crossing([(3, 0.9), (4, 1.2)]) == 3


def test_the_knee_is_where_arithmetic_takes_as_long_as_the_weights() -> None:
    assert Cost([1, 2, 64, 128], [10.0, 10.0, 20.0, 40.0]).knee() == pytest.approx(10 / (20 / 64))
    assert Cost([1, 2], [10.0, 9.0]).knee() == float("inf")


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("regimes.rows", [], "regimes.rows=[] measures nothing; name numbers of at least 1"),
        ("regimes.nodes", [1], "regimes.nodes=[1] measures nothing; name numbers of at least 2"),
        ("regimes.tokens", 1, "regimes.tokens=1 measures nothing; give at least 2"),
        ("decode.temperature", 0.5, "decode.regimes measures greedy decoding; leave decode.temperature at 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(setting: str, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check(changed(composed(*SMALL), setting, value))


def test_a_context_beyond_the_target_is_refused_before_anything_is_decoded() -> None:
    with pytest.raises(ValueError, match=r"regimes.contexts=\[30, 5000\] with answers and 128 nodes to time take"):
        regimes(changed(composed(*SMALL), "regimes.contexts", [30, 5000]))
