"""What a draft distribution is taught, against the formulas written out."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

import models.losses
from models.drafter import FeatureBatch, Loss, asked
from models.ends import Ends
from models.losses import TERMS, WHOLE, Guess, Head, Objective, Teacher, paces
from models.questions import Questions
from models.vocabulary import OUTSIDE, DraftVocabulary
from reference import loss_of_chains, loss_of_guess, marked_batch

IDS = torch.tensor([1, 2, 5, 8])  # of ten tokens
EVERY = [*TERMS, WHOLE]


def logits(rows: int, vocabulary: int, seed: int) -> Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(draft: Tensor, ids: Tensor | None) -> Tensor:
    """Probabilities [R, 10] of draft logits: nothing for tokens outside."""
    probs = draft.softmax(-1)
    return probs if ids is None else torch.zeros(len(draft), 10, dtype=draft.dtype).index_copy(1, ids, probs)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("name", TERMS)
def test_a_loss_is_what_its_formula_says(name, ids):
    draft, target = logits(6, 10 if ids is None else 4, 0), logits(6, 10, 1)
    labels = [3, OUTSIDE, 0, 2, OUTSIDE, 1]
    found = TERMS[name](Guess(draft, torch.tensor(labels), Teacher.saying(target, ids)))
    tokens = list(range(10)) if ids is None else ids.tolist()
    for row, label in enumerate(labels):
        label = None if label == OUTSIDE else tokens[label]
        wanted = loss_of_guess(name, target[row].softmax(-1), spread(draft, ids)[row], label)
        assert found[row].item() == pytest.approx(wanted.item(), rel=1e-9)
    assert found.min() >= 0


@pytest.mark.parametrize("name", TERMS)
def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn(name):
    target = logits(6, 10, 1)
    draft = (target + 3.0).requires_grad_()
    guess = Guess(draft, target.argmax(-1), Teacher.saying(target, None))
    if name == "ce":
        return  # it wants the token that was said, not the distribution
    TERMS[name](guess).sum().backward()
    assert TERMS[name](guess).abs().max() < 1e-9
    nudged = Guess(target + 0.01 * logits(6, 10, 2), target.argmax(-1), guess.teacher)
    assert TERMS[name](nudged).min() > 0


def slopes_by_differences(of: Callable[[Tensor], Tensor], draft: Tensor) -> Tensor:
    """The slope of `of` at `draft` along every logit, by central differences."""
    step, slopes = 1e-6, torch.zeros_like(draft)
    for place in itertools.product(*map(range, draft.shape)):
        nudge = torch.zeros_like(draft)
        nudge[place] = step
        slopes[place] = (of(draft + nudge) - of(draft - nudge)) / (2 * step)
    return slopes


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_finite_differences(name, ids):
    """Of chains of two guesses each; the weight of lk_hybrid is held, as it is not differentiated."""
    draft, target = logits(6, 10 if ids is None else 4, 0).requires_grad_(), logits(6, 10, 1)
    teacher, labels = Teacher.saying(target, ids), torch.tensor([3, OUTSIDE, 0, 2, OUTSIDE, 1])
    chain, depth = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    held = (-3 * Guess(draft.detach(), labels, teacher).acceptance).exp()

    def value(given: Tensor) -> Tensor:
        guess = Guess(given, labels, teacher)
        if name == "lk_hybrid":
            return ((held * guess.kl() + (1 - held) * guess.tv()) * 0.5**depth).sum()
        return Objective(name, 0.5).total([guess], chain, depth, 3, 2)

    Objective(name, 0.5).total([Guess(draft, labels, teacher)], chain, depth, 3, 2).backward()
    wanted = slopes_by_differences(value, draft.detach())
    torch.testing.assert_close(draft.grad, wanted, rtol=1e-6, atol=1e-8)
    assert wanted.abs().max() > 0.01


@pytest.mark.parametrize("ids", [None, IDS])
def test_acceptance_is_what_both_distributions_share(ids):
    draft, target = logits(6, 10 if ids is None else 4, 0), logits(6, 10, 1)
    found = Guess(draft, torch.zeros(6, dtype=torch.long), Teacher.saying(target, ids)).acceptance
    wanted = torch.minimum(target.softmax(-1), spread(draft, ids)).sum(-1)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("ids", [None, IDS])
def test_a_teacher_keeps_the_targets_probabilities_and_says_how_much_is_out_of_reach(ids):
    target = logits(6, 10, 1)
    through = torch.eye(10, dtype=torch.float64)
    taught = Teacher.of(Ends(through, through, None, LlamaConfig()), target, ids)
    inside = target.softmax(-1) if ids is None else target.softmax(-1)[:, ids]
    torch.testing.assert_close(taught.probs, inside)
    torch.testing.assert_close(taught.reach, inside.sum(-1))
    torch.testing.assert_close(taught.known, (inside * (inside / inside.sum(-1, keepdim=True)).log()).sum(-1))


@pytest.mark.parametrize("name", TERMS)
def test_losses_are_computed_in_fp32(name):
    low, target = logits(1, 1000, 0).bfloat16(), Teacher.saying(logits(1, 1000, 1).float(), None)
    found, wanted = (TERMS[name](Guess(given, torch.tensor([7]), target)) for given in (low, low.float()))
    assert found.dtype == torch.float32
    assert found.item() == wanted.item()


def test_dpace_weights_are_specforges():
    """A step of DFlash, blocks of seven guesses behind an anchor, under D-PACE: the reference's loss per row."""
    golden = load_file(Path(__file__).parent / "golden" / "dflash_dpace_step.safetensors")
    ids, mask = golden["input_ids"], golden["loss_mask"]
    said = (golden["expected.hidden"] @ golden["target.lm_head.weight"].T).view(2, 17, 8, -1)
    total = torch.zeros(())
    for row, block in golden["expected.anchor_valid"].nonzero().tolist():
        at = int(golden["expected.anchors"][row, block])
        spoken = [place for place in range(at + 1, min(at + 8, 24)) if mask[row, place]]
        guess = Guess(said[row, block, 1 : len(spoken) + 1], ids[row, spoken], None)
        objective = Objective("ce", "dpace")
        total += objective.total([guess], torch.zeros(len(spoken), dtype=torch.long), torch.arange(len(spoken)), 1, 7)
    torch.testing.assert_close(total / len(ids), golden["expected.loss"][0], atol=1e-4, rtol=1e-5)


def test_dpace_weights_are_the_slopes_of_the_expected_length():
    chance, counted = torch.rand(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    counted[0, 2] = counted[1, 1:] = 0
    smooth = (0.5 * chance + 0.5).log().requires_grad_()
    (smooth.cumsum(1).exp() * counted).sum().backward()
    torch.testing.assert_close(paces(chance, counted), smooth.grad)


DOCUMENTS = ["0" * 9 + "1" * 11 + "-" * 4, "0" * 24, "0" * 17 + "-" * 7]
SPOKEN = ["..xxxx.xxxx.xxxxxxxx....", "xxxxxx.xx..x.xxx...xxxxx", "....xx..xxxxxxxx........"]
V, D, K = 12, 6, 3


class Lesson(NamedTuple):
    """A batch, the states that guess at its questions, the heads that read them, and the target's ends."""

    batch: FeatureBatch
    states: list[Tensor]
    weights: list[Tensor]
    ends: Ends
    vocabulary: DraftVocabulary

    def loss(self, objective: Objective, measure: bool = False) -> Loss:
        heads = [Head(weight, finish=self.ends.finish) for weight in self.weights]
        given = heads[0] if len(heads) == 1 else heads
        questions = Questions.of(self.batch, K)
        return objective.loss(self.batch, questions, self.states, given, self.ends, self.vocabulary, measure)

    def chains(self) -> list[list[tuple[Tensor, Tensor, int | None]]]:
        """For each chain its guesses, one after the other."""
        found: dict[tuple[int, int], list[tuple[Tensor, Tensor, int | None]]] = {}
        tokens = range(V) if self.vocabulary.ids is None else self.vocabulary.ids.tolist()
        for depth, marked in enumerate(asked(self.batch.loss_mask, self.batch.document, K)):
            weight = self.weights[depth % len(self.weights)]
            for number, (row, at) in enumerate(marked.nonzero().tolist()):
                probs = self.ends.finish(weight @ self.states[depth][number]).softmax(-1)
                draft = torch.zeros(V, dtype=probs.dtype).index_copy(0, torch.tensor(list(tokens)), probs)
                target = self.ends.logits(self.batch.last_hidden[row, at + 1 + depth]).softmax(-1)
                label = int(self.batch.input_ids[row, at + 2 + depth])
                found.setdefault((row, at), []).append((target, draft, label if label in tokens else None))
        return list(found.values())

    def learners(self) -> list[Tensor]:
        return [*self.states, *self.weights]


def lesson(heads: int = 1, reduced: bool = True, dtype: torch.dtype = torch.float64) -> Lesson:
    torch.manual_seed(4)
    batch = marked_batch(DOCUMENTS, SPOKEN, V, width=D, taps=0, seed=1)
    batch.last_hidden = batch.last_hidden.to(dtype)
    vocabulary = DraftVocabulary(7 if reduced else None, V)
    vocabulary.learn(torch.arange(V) % 5)
    head, bias = torch.randn(V, D, dtype=dtype), torch.randn(V, dtype=dtype)
    ends = Ends(head, head, bias, LlamaConfig(final_logit_softcapping=3.0, logit_scale=0.8))
    counts = [int(marked.sum()) for marked in asked(batch.loss_mask, batch.document, K)]
    states = [torch.randn(count, D, dtype=dtype, requires_grad=True) for count in counts]
    weights = [torch.randn(vocabulary.size, D, dtype=dtype, requires_grad=True) for _ in range(heads)]
    return Lesson(batch, states, weights, ends, vocabulary)


OBJECTIVES = [
    *((name, 0.8) for name in EVERY),
    ({"ce": 0.1, "tv": 0.9}, 0.7),
    ({"kl": 0.5, "acceptance": 2.0}, 0.8),
    ("ce", "dpace"),
    ({"lk_hybrid": 1.0, "ce": 0.3}, "dpace"),
]


@pytest.mark.parametrize("few", [1000, 4, 1])
@pytest.mark.parametrize(("heads", "reduced"), [(1, True), (K, True), (1, False)])
@pytest.mark.parametrize(("loss", "decay"), OBJECTIVES, ids=str)
def test_chunks_of_any_size_add_up_to_the_loss_and_gradients_of_every_guess_by_itself(
    loss, decay, heads, reduced, few, monkeypatch
):
    monkeypatch.setattr(models.losses, "CACHED", 0)
    monkeypatch.setattr(models.losses, "FEWEST", few)
    given, mix = lesson(heads, reduced), {loss: 1.0} if isinstance(loss, str) else loss
    wanted = loss_of_chains(mix, decay, given.chains(), K)
    slopes = torch.autograd.grad(wanted, given.learners())
    found = given.loss(Objective(loss, decay))
    torch.testing.assert_close(found.total, wanted)
    assert found.counted == found.seen[0] == len(given.states[0])
    torch.testing.assert_close(torch.autograd.grad(2 * found.total, given.learners()), [2 * one for one in slopes])


@pytest.mark.parametrize("few", [1000, 4])
@pytest.mark.parametrize("heads", [1, K])
def test_hits_and_overlap_are_counted_by_depth(heads, few, monkeypatch):
    monkeypatch.setattr(models.losses, "CACHED", 0)
    monkeypatch.setattr(models.losses, "FEWEST", few)
    given = lesson(heads)
    hits, shared = torch.zeros(K), torch.zeros(K, dtype=torch.float64)
    for chain in given.chains():
        for depth, (target, draft, label) in enumerate(chain):
            hits[depth] += int(draft.argmax()) == label
            shared[depth] += torch.minimum(target, draft).sum().item()
    assert hits[:2].min() > 0
    with torch.no_grad():
        found = given.loss(Objective("ce"), measure=True)
    assert found.hits.tolist() == hits.tolist()
    torch.testing.assert_close(found.overlap, shared)
    assert not found.total.requires_grad


def test_only_what_is_to_learn_gets_a_gradient():
    given = lesson()
    given.weights[0].requires_grad_(False)
    given.loss(Objective("kl")).total.backward()
    assert given.weights[0].grad is None
    assert all(state.grad.any() for state in given.states)


def test_hard_labels_ask_the_target_nothing():
    given = lesson()
    given.ends.logits = None  # calling it would fail
    assert given.loss(Objective("ce")).total.isfinite()
    with pytest.raises(TypeError):
        given.loss(Objective("ce"), measure=True)


def test_each_place_is_heard_once_however_small_the_chunks(monkeypatch):
    monkeypatch.setattr(models.losses, "CACHED", 0)
    monkeypatch.setattr(models.losses, "FEWEST", 6)
    given, rows = lesson(), []
    logits = given.ends.logits
    given.ends.logits = lambda hidden, *rest: rows.append(len(hidden)) or logits(hidden, *rest)
    given.loss(Objective("kl"))
    assert len(rows) > 3
    assert max(rows) <= 6
    assert sum(rows) == len(given.states[0])


def test_logits_in_bf16_are_graded_in_fp32():
    given = lesson(dtype=torch.float32)
    plain = given.loss(Objective("kl"))
    with torch.autocast("cpu", torch.bfloat16):
        low = given.loss(Objective("kl"))
    assert low.total.dtype == torch.float32
    assert low.total.item() != plain.total.item()
    assert low.total.item() == pytest.approx(plain.total.item(), rel=0.02)
    low.total.backward()
    assert all(one.grad.dtype == torch.float32 for one in given.learners())


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"loss": "luck"}, r"loss=luck: use one of ce, kl, reverse_kl, tv, lk_alpha, lk_hybrid, acceptance, or a mix"),
        ({"loss": {}}, r"loss=\{\}"),
        ({"loss": {"ce": 0.5, "luck": 1}}, "luck"),
        ({"loss": {"ce": -1}}, "use one of"),
        ({"loss": {"ce": math.nan}}, "use one of"),
        ({"loss": {"ce": "half"}}, "use one of"),
        ({"decay": 0.0}, r"decay=0.0: use a number above 0 and up to 1, or dpace"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"decay": "pace"}, "decay=pace"),
        ({"decay": True}, "decay=True"),
    ],
)
def test_a_loss_that_means_nothing_is_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        Objective(**knobs)
