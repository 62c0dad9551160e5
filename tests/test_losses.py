"""What a draft distribution is taught, against the formulas written out."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import models.losses
from models.ends import Ends
from models.losses import Teacher, hard_loss, overlap, soft_loss
from models.vocabulary import OUTSIDE

IDS = torch.tensor([1, 2, 5, 8])  # of ten tokens


def logits(rows: int, vocabulary: int, seed: int) -> Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def teacher(target: Tensor, ids: Tensor | None) -> Teacher:
    """The teacher whose logits are `target`: its head passes them through."""
    through = torch.eye(target.shape[1])
    return Teacher.of(Ends(through, through, None, LlamaConfig()), target, ids)


def probs(row: Tensor) -> list[float]:
    weights = [math.exp(value) for value in row.tolist()]
    return [weight / sum(weights) for weight in weights]


def test_hard_loss_is_the_surprise_at_what_was_said():
    draft, labels = logits(5, 4, 0), [2, OUTSIDE, 0, 3, OUTSIDE]
    wanted = sum(-math.log(probs(draft[row])[label]) for row, label in enumerate(labels) if label != OUTSIDE)
    assert hard_loss(draft, torch.tensor(labels)).item() == pytest.approx(wanted, rel=1e-5)
    assert hard_loss(draft, torch.full((5,), OUTSIDE)).item() == 0.0
    assert hard_loss(draft[:0], torch.tensor(labels)[:0]).item() == 0.0


def test_soft_loss_is_the_divergence_of_the_draft_from_the_target():
    draft, target = logits(6, 4, 0), logits(6, 4, 1)
    wanted = sum(
        said * math.log(said / guessed)
        for row in range(6)
        for said, guessed in zip(probs(target[row]), probs(draft[row]), strict=True)
    )
    assert soft_loss(draft, target).item() == pytest.approx(wanted, rel=1e-5)
    assert soft_loss(target, target).item() == pytest.approx(0.0, abs=1e-6)
    assert soft_loss(target + 3.0, target).item() == pytest.approx(0.0, abs=1e-5)


def test_the_gradient_of_soft_loss_is_that_of_finite_differences():
    draft, target = logits(3, 4, 0).requires_grad_(), logits(3, 4, 1)
    soft_loss(draft, target).backward()
    step = 1e-2
    for row in range(3):
        for token in range(4):
            nudge = torch.zeros(3, 4)
            nudge[row, token] = step
            with torch.no_grad():
                slope = (soft_loss(draft + nudge, target) - soft_loss(draft - nudge, target)) / (2 * step)
            assert draft.grad[row, token].item() == pytest.approx(slope.item(), abs=2e-3)
    assert draft.grad.abs().max() > 0.1


@pytest.mark.parametrize("ids", [None, IDS])
def test_overlap_is_what_both_distributions_share(ids):
    draft, target = logits(6, 10 if ids is None else 4, 0), logits(6, 10, 1)
    reach = range(10) if ids is None else ids.tolist()
    wanted = sum(
        min(probs(target[row])[token], probs(draft[row])[place])
        for row in range(6)
        for place, token in enumerate(reach)
    )
    assert overlap(draft, teacher(target, ids)).item() == pytest.approx(wanted, rel=1e-5)
    if ids is None:
        assert overlap(target, teacher(target, None)).item() == pytest.approx(6.0, rel=1e-5)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("chunk", [4096, 4])
def test_a_teacher_is_the_targets_distribution_seen_through_the_draft_vocabulary(ids, chunk, monkeypatch):
    monkeypatch.setattr(models.losses, "CHUNK", chunk)
    target = logits(6, 10, 1)
    reach = range(10) if ids is None else ids.tolist()
    taught = teacher(target, ids)
    for row in range(6):
        whole = [probs(target[row])[token] for token in reach]
        assert taught.reach[row].item() == pytest.approx(sum(whole), rel=1e-5)
        assert taught.log_probs[row].exp().tolist() == pytest.approx([one / sum(whole) for one in whole], rel=1e-5)
        assert taught.inside[row].item() == (int(target[row].argmax()) in reach)
    assert ids is None or 0 < taught.inside.sum() < 6


@pytest.mark.parametrize(
    "loss", [lambda logits: hard_loss(logits, torch.tensor([1])), lambda logits: soft_loss(logits, logits * 2)]
)
def test_losses_are_computed_in_fp32(loss):
    low = logits(1, 1000, 0).bfloat16()
    assert loss(low).dtype == torch.float32
    assert loss(low).item() == pytest.approx(loss(low.float()).item(), rel=1e-6)
