"""The drafter that is kept is the one that accepted most, and what a run is stopped for."""

import math

import pytest
import torch
from safetensors.torch import load_file

from conf.schema import Optim, Schedule
from decode.engine import generate
from decode.opening import open_target
from models.drafter import Budget
from models.medusa import Medusa
from models.shelf import read_card
from models.tree import chain
from runs import composed
from train import checkpoint, job
from train.alarm import FEWEST, RISE, SUSTAINED, Tidings, Watch
from train.chat import Example
from train.judge import Judge, Verdict, interval, prompts_of, taus
from train.log import Journal
from train.optim import rate

WORDS = [
    "target.dtype=fp32",
    "optim.precision=fp32",
    "optim.steps=6",
    "optim.warmup=1",
    "log.evaluate_every=1",
    "log.save_every=1",
    "log.keep=9",
    "drafter.heads=2",
]


def scripted(monkeypatch: pytest.MonkeyPatch, story: list[float]) -> None:
    """Let the verdicts be these."""
    verdicts = iter(story)
    tell = lambda self, trainee, step: Verdict(step, next(verdicts), 1.0, 9.0, [0.5, 0.5], [0.5, 0.5], [9, 9], None)  # noqa: E731
    monkeypatch.setattr(Judge, "__call__", tell)
    monkeypatch.setattr(checkpoint, "forget", lambda out: None)


def test_the_weights_that_accepted_most_are_saved(tmp_path, monkeypatch):
    scripted(monkeypatch, [1.1, 1.5, 1.3, 1.5, 1.2, 1.0])
    job.train(composed(f"out={tmp_path}", *WORDS))
    saved = load_file(tmp_path / "model.safetensors")
    second, last = (
        load_file(folder / "state.safetensors")
        for folder in (checkpoint.every(tmp_path)[1], checkpoint.every(tmp_path)[-1])
    )
    assert all(torch.equal(value, second[f"model.drafter.{name}"].bfloat16()) for name, value in saved.items())
    assert not all(torch.equal(value, last[f"model.drafter.{name}"].bfloat16()) for name, value in saved.items())
    best = read_card(tmp_path).training["best"]
    assert (best["step"], best["tau"], best["low"], best["high"]) == (2, 1.5, 1.0, 9.0)


def test_a_run_ends_early_once_tau_falls_and_only_if_asked(tmp_path, monkeypatch):
    scripted(monkeypatch, [1.1, 1.5, 1.3, 1.4, 1.9, 1.9])
    job.train(composed(f"out={tmp_path / 'early'}", *WORDS, "optim.patience=2"))
    assert checkpoint.step_of(checkpoint.found(tmp_path / "early")) == 4
    assert read_card(tmp_path / "early").training["best"]["step"] == 2
    scripted(monkeypatch, [1.1, 1.5, 1.3, 1.4, 1.9, 1.8])
    job.train(composed(f"out={tmp_path / 'late'}", *WORDS))
    assert read_card(tmp_path / "late").training["best"]["step"] == 5


def test_the_tau_that_rates_imply_is_that_of_walking_down_the_chain():
    generator = torch.Generator().manual_seed(0)
    seen = torch.randint(20, 40, (50, 3), generator=generator).double()
    hits = (seen * torch.rand(50, 3, generator=generator)).floor()
    sums = torch.stack([seen, hits, hits], dim=1)
    tau, arrived = 1.0, 1.0
    for depth in range(3):
        arrived *= sum(hits[:, depth].tolist()) / sum(seen[:, depth].tolist())
        tau += arrived
    assert float(taus(sums.sum(0))) == pytest.approx(tau)
    low, high = interval(sums)
    assert low < tau < high
    wider = interval(sums[:10])
    assert wider[1] - wider[0] > high - low
    assert interval(torch.stack([sums[0]] * 9))[0] == interval(torch.stack([sums[0]] * 9))[1]


def test_each_evaluation_decodes_for_real_if_asked(tmp_path, monkeypatch):
    """Counted again from the weights of the checkpoint, in the target's precision."""
    monkeypatch.setattr(checkpoint, "forget", lambda out: None)
    monkeypatch.setattr(job, "put", lambda weights, trainee: None)
    held: list[list[Example]] = []
    kept = job.trial_of
    monkeypatch.setattr(job, "trial_of", lambda *args: held.append(args[3]) or kept(*args))
    job.train(
        composed(f"out={tmp_path}", *WORDS[:-1], "drafter.heads=2", "optim.steps=2", "log.prompts=2", "log.tokens=8")
    )
    target = open_target(composed(*WORDS[:2]).target)
    drafter = Medusa(target.ends, heads=2)
    state = load_file(checkpoint.found(tmp_path) / "state.safetensors")
    drafter.load_state_dict(
        {name.removeprefix("model.drafter."): value for name, value in state.items() if name.startswith("model.")}
    )
    prompts = [example.input_ids[: example.loss_mask.index(True)] for example in held[0][:2]]
    texts = generate(target, drafter.eval(), prompts, 8, Budget(tuple(chain(2)), 3)).generations
    tau = 1 + sum(sum(text.accepted) for text in texts) / sum(len(text.steps) for text in texts)
    assert read_card(tmp_path).training["best"]["decoded"] == pytest.approx(tau, abs=1e-4)


def test_prompts_are_what_stands_before_the_first_answer():
    held = [Example([1, 2, 3, 4], [False, False, True, False]), Example([5], [True]), Example([6, 7], [False, True])]
    assert prompts_of(held, 9) == [[1, 2], [6]]
    assert prompts_of(held, 1) == [[1, 2]]


def test_a_gradient_that_rises_and_stays_ends_the_run():
    watch = Watch()
    for step in range(FEWEST):
        watch.see(step, 1.0, 2.0)
    for step in range(SUSTAINED - 1):
        watch.see(step, 1.0, 2.1 * RISE)
    watch.see(99, 1.0, 2.0)  # it was a single bump
    for step in range(SUSTAINED - 1):
        watch.see(step, 1.0, 2.1 * RISE)
    with pytest.raises(
        ValueError,
        match=rf"the gradient's norm has been over 100 times its median of 2 for {SUSTAINED} steps, 210 at step 7; lower",
    ):
        watch.see(7, 1.0, 2.1 * RISE)


def test_a_step_is_heard_once_the_next_is_under_way_or_when_it_must_be():
    journal = Journal(composed(), loud=False, done=0, best=None)
    tidings, sound = Tidings(journal), torch.tensor([1.0, 0.0, 2.0])
    heard = []
    for step in (1, 2):
        tidings.send(step, sound, 9, 0.0, 0.0)
        heard.append(journal.done)
    tidings.send(3, torch.tensor([1.0, 1.0, 2.0]), 9, 0.0, 0.0)
    assert (heard, tidings.stop) == ([0, 1], False)
    tidings.hear()
    tidings.hear()
    assert (journal.done, journal.tokens, tidings.stop) == (3, 27, True)
    tidings.send(4, torch.tensor([math.nan, 0.0, 2.0]), 9, 0.0, 0.0)
    with pytest.raises(ValueError, match="the loss is nan at step 4"):
        tidings.send(5, sound, 9, 0.0, 0.0)


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [(math.nan, 1.0, "the loss is nan"), (1.0, math.inf, "the gradient's norm is inf"), (1.0, math.nan, "norm is nan")],
)
def test_what_is_no_number_ends_the_run(loss, norm, what):
    with pytest.raises(ValueError, match=rf"{what} at step 3; lower optim\.lr"):
        Watch().see(3, loss, norm)


def test_the_rate_may_fall_in_a_line():
    optim = Optim(lr=2.0, steps=14, warmup=4, schedule=Schedule.linear)
    assert [rate(optim, step) for step in range(4, 14)] == pytest.approx([2.0 - 0.2 * step for step in range(10)])


def test_with_features_on_disk_the_body_stays_away(tmp_path, monkeypatch):
    words = [*WORDS, "data.features=cached", f"data.store={tmp_path / 'store'}"]
    job.train(composed(f"out={tmp_path / 'first'}", *words))
    monkeypatch.setattr(job, "open_target", lambda conf: pytest.fail("the body was loaded"))
    job.train(composed(f"out={tmp_path / 'second'}", *words))
    first, second = (tmp_path / out / "model.safetensors" for out in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
