"""Long contexts: prompts of the length asked for, remedies where there is something to mend, and a warning."""

import json
from pathlib import Path

import pytest
import torch

from decode.arms import Arm, beyond
from decode.figures import Figure
from decode.measure import measure as measure_benchmarks
from decode.opening import open_target
from models.drafter import Budget
from models.shelf import Card, read_card
from runs import changed, composed
from train import job, long_context

TINY = ("drafter=eagle3", "drafter.steps=2", "optim.steps=3", "optim.warmup=1", "decode.bench=[tiny]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    job.train(composed(*TINY, f"out={folder}"))
    return folder


def test_every_length_is_measured_as_it_is_and_with_each_remedy(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = read_card(trained).training["longest"]
    assert 20 < learned < 200
    run = composed(*TINY, f"out={trained}", "decode.tokens=8", "decode.prompts=2", f"decode.contexts=[{learned},600]")
    found = long_context.measure(run)
    ways = [(one.context, one.remedy) for one in found]
    assert ways == [
        (learned, "as it is"), (600, "as it is"), (600, f"window={learned}"), (600, f"stretch={600 / learned:.3g}")
    ]  # fmt: skip
    assert found[0].tokens <= learned - 8
    assert all(500 < one.tokens <= 592 for one in found[1:])
    assert all(1 <= one.tau.low <= one.tau.value <= one.tau.high <= 5 for one in found)
    assert [one.over.value for one in found[:2]] == [1.0, 1.0]
    assert json.loads((trained / "long_context.json").read_text())[2]["remedy"] == f"window={learned}"
    shown = capsys.readouterr().out
    assert f"2 prompts; tiny learned from up to {learned} tokens" in shown
    assert f"window={learned}" in shown


def test_a_drafter_beside_is_measured_over_the_first_on_the_same_prompts(trained: Path) -> None:
    words = ["decode.tokens=8", "decode.prompts=2", "decode.contexts=[80]", f"decode.beside=[{trained}]"]
    first, second = long_context.measure(composed(*TINY, f"out={trained}", *words))
    assert (first.drafter, second.drafter) == ("tiny", trained.name)
    assert second.tau == first.tau
    assert second.over == Figure(1.0, 1.0, 1.0)


def test_a_long_prompt_ends_with_the_question_and_holds_as_many_turns_as_fit() -> None:
    tokenizer = open_target(composed().target).tokenizer
    turns = [[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c" * 9}]]
    lengths = [len(long_context.long_prompt(tokenizer, turns, "why?", longest)) for longest in (60, 200, 201, 1000)]
    assert [length <= longest for length, longest in zip(lengths, (60, 200, 201, 1000), strict=True)] == [True] * 4
    assert lengths[3] > 960
    text = tokenizer.decode(long_context.long_prompt(tokenizer, turns, "why?", 200))
    assert text.count("c" * 9) == 6  # 28 tokens each, and 20 for the question
    assert text.index("why?") > text.rindex("c" * 9)


def test_more_than_the_target_reads_is_refused(trained: Path) -> None:
    with pytest.raises(ValueError, match=r"decode.contexts=\[4096\]: tiny reads 2048 tokens"):
        long_context.measure(composed(*TINY, f"out={trained}", "decode.contexts=[4096]"))


def test_decoding_beyond_what_a_drafter_learned_from_is_said(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = read_card(trained)
    learned = card.training["longest"]

    def said(tokens: int, **knobs: float) -> str | None:
        told = Card(card.family, card.knobs | knobs, card.target, card.taps, training=card.training)
        return beyond(Arm("mine", trained, told, Budget()), tokens)

    assert said(learned) is None
    assert f"up to {learned + 1} tokens, and it learned from none longer than {learned}" in (said(learned + 1) or "")
    assert said(900, window=learned) is None
    assert said(900, window=learned + 1)
    assert said(2 * learned, stretch=2.0) is None
    assert beyond(Arm("heads", trained, Card("x", {}, {}, [], training=card.training), Budget()), 900) is None
    run = composed(*TINY, f"out={trained}", "decode.prompts=1", f"decode.tokens={learned}")
    torch.manual_seed(0)
    measure_benchmarks(changed(run, "decode.out", str(trained / "measured")))
    assert "warning: tiny: texts of up to" in " ".join(capsys.readouterr().out.split())
