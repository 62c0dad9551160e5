"""The whole loop, statistically: prefill, proposal, tree pass, rule, cache and bonus write what the target would say.

Thousands of texts of a tiny random target with a vocabulary of 16, each with a seed of its own, decoded side by side,
are counted and compared with the exact joint distribution of their first tokens, found by full passes: Pearson's
chi-square, cells that expect fewer than five pooled.

How many texts: `effect` is the non-centrality a text, the sum of (faulty - lawful)^2 / lawful over the cells. A test of
n texts sees a fault of effect e with the power of a non-central chi-square of non-centrality n * e. Every planted fault
has an effect of more than WEAKEST (they are printed at the end of a run), and COUNT texts see one of WEAKEST in more than
999 runs of 1000: `test_so_many_texts_show_a_fault` computes it. A lawful loop fails with probability ALPHA in all, over
all tests of a run; seeds are fixed, so that it does not come up.
"""

import functools

import pytest
import torch
from torch import Tensor

import faults
from chisquare import Verdict, judge, pooled, power
from conftest import Notes, tiny_target
from decode.accept import Typical
from decode.engine import generate
from laws import Law, Text
from models.drafter import Budget, Drafter, Plain
from models.sampling import Sampling
from models.target import Target
from models.tree import Path, chain, ordered_paths
from reference import Tabled, probs_by_hand

pytestmark = pytest.mark.exact

V = 16
ALPHA = 1e-4  # that a lawful loop fails, over all the tests
TESTS = 40  # of one full run, at most
COUNT, MANY = 1500, 10_000  # texts of a test
WEAKEST = 0.1  # the effect that no planted fault is below
PROMPTS: list[list[int]] = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]]
SHAPES: dict[str, list[Path]] = {"chain": chain(2), "tree": ordered_paths([(0,), (1,), (2,), (0, 0), (1, 0)])}
THREE, FOUR = (3, Sampling(1.0, seed=11)), (4, Sampling(1.0, top_k=3, seed=12))
WAYS = {"three tokens": THREE, "four of top 3": FOUR}


@functools.cache
def target() -> Target:
    return tiny_target("llama", vocab_size=V, initializer_range=0.5)


@torch.inference_mode()
def says(texts: list[Text]) -> list[list[float]]:
    """Logits after each of `texts`, all as long, by one full pass without a cache."""
    return target().model(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1].double().tolist()


@functools.cache
def joint(prompt: Text, length: int, sampling: Sampling) -> Law:
    """The exact law of the first `length` tokens after `prompt`."""
    law: Law = {(): 1.0}
    for _ in range(length):
        every = list(law)
        probs = [probs_by_hand(logits, sampling) for logits in says([prompt + text for text in every])]
        law = {
            (*text, token): law[text] * more
            for text, row in zip(every, probs, strict=True)
            for token, more in enumerate(row)
            if more
        }
    return law


@functools.cache
def table() -> Tensor:
    """[V, V] what a drafter believes that follows each token: what follows it right after the prompt, less surely."""
    return torch.tensor(says([(*PROMPTS[0], token) for token in range(V)])).div(3.0).softmax(-1)


def texts(drafter: Drafter, prompts: list[list[int]], length: int, sampling: Sampling) -> list[Text]:
    """What is written after `prompts`, side by side."""
    run = generate(target(), drafter, prompts, length, Budget(nodes=6), sampling, rows=250)
    return [tuple(one.tokens) for one in run.generations]


def verdict(drafter: Drafter, prompt: list[int], length: int, sampling: Sampling, count: int = COUNT) -> Verdict:
    """`count` texts after `prompt` against the target's law."""
    law = joint(tuple(prompt), length, sampling)
    return judge(texts(drafter, [prompt] * count, length, sampling), law)


def lawful(found: Verdict) -> bool:
    """What the real loop must pass, and every planted fault must not."""
    return found.chance > ALPHA / TESTS


def told(found: Verdict) -> str:
    return f"chi-square {found.statistic:.0f} at {found.freedom} degrees, p = {found.chance:.2g}, effect {found.effect:.3f} a text"


def check(notes: Notes, name: str, found: Verdict) -> None:
    notes.lines.append(f"loop, {name}: {found.count} texts, {told(found)}")
    assert lawful(found)


@pytest.mark.parametrize("drawn", [False, True], ids=["top picks", "drawn"])
@pytest.mark.parametrize(
    ("shape", "way"), [("chain", "three tokens"), ("tree", "three tokens"), ("tree", "four of top 3")]
)
def test_the_loop_writes_as_the_target_speaks(notes: Notes, shape: str, drawn: bool, way: str) -> None:
    found = verdict(Tabled(table(), SHAPES[shape], drawn), PROMPTS[0], *WAYS[way])
    check(notes, f"{shape}, {'drawn' if drawn else 'top picks'}, {way}", found)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drawn", [False, True], ids=["top picks", "drawn"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_the_loop_writes_as_the_target_speaks_in_many_texts(
    notes: Notes, prompt: int, shape: str, drawn: bool, way: str
) -> None:
    length, sampling = WAYS[way]
    other = Sampling(0.8, sampling.top_k, 0.95, seed=99)
    found = verdict(Tabled(table(), SHAPES[shape], drawn), PROMPTS[prompt], length, other, MANY)
    check(notes, f"prompt {prompt}, {shape}, {'drawn' if drawn else 'top picks'}, {way} at 0.8 and top-p 0.95", found)


def test_prompts_of_every_length_side_by_side_leave_each_law_alone(notes: Notes) -> None:
    length, sampling = THREE
    found = texts(Tabled(table(), SHAPES["tree"], True), PROMPTS * (COUNT // 3), length, sampling)
    for number, prompt in enumerate(PROMPTS):
        each = judge(found[number :: len(PROMPTS)], joint(tuple(prompt), length, sampling))
        check(notes, f"prompt {number} among others, tree, drawn", each)


def test_so_many_texts_show_a_fault(notes: Notes) -> None:
    length, sampling = THREE
    freedom = len(pooled(joint(tuple(PROMPTS[0]), length, sampling), COUNT)) - 1
    seen = power(freedom, ALPHA / TESTS, COUNT * WEAKEST)
    notes.lines.append(f"power: {COUNT} texts see an effect of {WEAKEST} a text with probability {seen:.5f}")
    assert seen > 0.999


def caught(notes: Notes, fault: str, drafter: Drafter, way: tuple[int, Sampling]) -> None:
    """The fault fails the check that the real loop passes, and clearly."""
    found = verdict(drafter, PROMPTS[0], *way)
    notes.lines.append(f"caught in the loop: {fault}, {told(found)}")
    assert not lawful(found)
    assert found.effect > WEAKEST


@pytest.mark.parametrize("fault", faults.RULES)
def test_a_fault_of_the_rule_is_caught(notes: Notes, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.RULES[fault](monkeypatch)
    caught(notes, fault, Tabled(table(), SHAPES["tree"], False), THREE)


@pytest.mark.parametrize(
    ("fault", "shape", "way"), [("row_not_rolled_back", "chain", THREE), ("path_not_moved", "tree", FOUR)]
)
def test_a_fault_of_the_cache_is_caught(
    notes: Notes, fault: str, shape: str, way: tuple[int, Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.CACHES[fault](monkeypatch)
    caught(notes, fault, Tabled(table(), SHAPES[shape], False), way)


@pytest.mark.parametrize("fault", faults.DRAFTERS)
def test_a_fault_of_the_drafter_is_caught(notes: Notes, fault: str) -> None:
    caught(notes, fault, faults.DRAFTERS[fault](table(), SHAPES["tree"], True), THREE)


def greedy_share(written: list[Text]) -> float:
    """How often a token, the first of each text aside, is the target's first choice after what stands before it."""
    prompt = tuple(PROMPTS[0])
    right = [
        max(range(V), key=logits.__getitem__) == text[at]
        for at in range(1, len(written[0]))
        for text, logits in zip(written, says([prompt + text[:at] for text in written]), strict=True)
    ]
    return sum(right) / len(right)


def test_typical_acceptance_writes_what_the_drafter_likes(notes: Notes) -> None:
    """It accepts more, and writes by another law; beside it stands how often a text is where greedy decoding would be."""
    sampling, prompts = Sampling(1.0, seed=5), [PROMPTS[0]] * 250
    drafter, budget = Tabled(table(), SHAPES["tree"], False), Budget(nodes=6)
    plain, lossless, typical = (
        generate(target(), guesser, prompts, 12, budget, sampling, rows=250, typical=rule)
        for guesser, rule in ((Plain(), None), (drafter, None), (drafter, Typical()))
    )
    shares = [greedy_share([tuple(one.tokens) for one in run.generations]) for run in (plain, lossless, typical)]
    taus = [
        1 + sum(sum(one.accepted) for one in run.generations) / sum(len(one.accepted) for one in run.generations)
        for run in (lossless, typical)
    ]
    notes.lines.append(
        f"typical acceptance: tau {taus[1]:.2f} against {taus[0]:.2f} lossless; the target's first choice is written "
        f"{shares[2]:.0%} of times, {shares[1]:.0%} lossless, {shares[0]:.0%} by plain sampling"
    )
    assert taus[1] > taus[0]
    assert abs(shares[1] - shares[0]) < 0.05
    found = judge([tuple(one.tokens[:3]) for one in typical.generations], joint(tuple(PROMPTS[0]), 3, sampling))
    assert not lawful(found)
