"""What a draft distribution is taught against the target's. Sums over rows; R rows, V draft vocabulary."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.checkpoint import checkpoint

from models.drafter import FeatureBatch, Loss, asked
from models.ends import Ends
from models.vocabulary import OUTSIDE, DraftVocabulary

CHUNK = 4096  # rows whose logits over the target's whole vocabulary exist at the same time


class Teacher(NamedTuple):
    """What the target would have said in R places, seen through a draft vocabulary."""

    log_probs: Tensor  # [R, V] within the draft vocabulary
    reach: Tensor  # [R] probability of the draft vocabulary as a whole: more cannot be accepted
    inside: Tensor  # [R] whether the target's first choice is in the draft vocabulary

    @classmethod
    @torch.no_grad()
    def of(cls, ends: Ends, hidden: Tensor, draft_ids: Tensor | None) -> "Teacher":
        """The teacher at final hidden states `hidden` [R, D]; `draft_ids` [V] are the target's ids, None all of them."""
        parts = [cls._part(ends, chunk, draft_ids) for chunk in hidden.to(ends.head.dtype).split(CHUNK)]
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))

    @classmethod
    def _part(cls, ends: Ends, hidden: Tensor, draft_ids: Tensor | None) -> "Teacher":
        whole = ends.logits(hidden).float()
        drafted = whole if draft_ids is None else whole[:, draft_ids]
        reach = (drafted.logsumexp(-1) - whole.logsumexp(-1)).exp()
        return cls(drafted.log_softmax(-1), reach, drafted.amax(-1) == whole.amax(-1))

    def at(self, rows: Tensor) -> "Teacher":
        """The teacher in the places `rows`, by number or mask."""
        return Teacher(self.log_probs[rows], self.reach[rows], self.inside[rows])


def summed(grade: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The sum of `grade` over `rows` [R, ...] in parts of CHUNK.

    Where there are several, each is computed again in the backward pass: their logits never exist at the same time.
    """
    parts = list(zip(*(values.split(CHUNK) for values in rows), strict=True))
    if len(parts) == 1:
        return grade(*parts[0])
    return torch.stack([checkpoint(grade, *part, use_reentrant=False) for part in parts]).sum(0)


def hard_loss(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the token that was said: logits [R, V], labels [R], OUTSIDE where the vocabulary lacks it."""
    return cross_entropy(draft_logits.float(), labels, ignore_index=OUTSIDE, reduction="sum")


def soft_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(target || draft), both over the draft vocabulary: logits [R, V] each (Hinton et al. 2015, at temperature 1)."""
    draft = draft_logits.float().log_softmax(-1)
    return kl_div(draft, target_logits.float().log_softmax(-1), reduction="sum", log_target=True)


@torch.no_grad()
def first_depth(
    batch: FeatureBatch, ends: Ends, vocabulary: DraftVocabulary, logits_at: Callable[[Tensor, Tensor], Tensor]
) -> Loss:
    """What the first guess of a drafter without weights of its own is worth on `batch`; the loss itself is 0.

    `logits_at` gives what it says [R, V] after token `at` [R] of `row` [R].
    """
    (where,) = asked(batch.loss_mask, batch.document, 1)
    row, at = where.nonzero(as_tuple=True)

    def grade(row: Tensor, at: Tensor) -> Tensor:
        draft_logits, label = logits_at(row, at), vocabulary.to_draft(batch.input_ids[row, at + 1])
        teacher = Teacher.of(ends, batch.last_hidden[row, at], vocabulary.ids)
        return torch.stack([(draft_logits.argmax(-1) == label).sum().float(), overlap(draft_logits, teacher)])

    hits, shared = summed(grade, row, at + 1)
    seen = where.sum().float()
    return Loss(torch.zeros_like(seen), seen, seen[None], hits[None], shared[None])


def overlap(draft_logits: Tensor, teacher: Teacher) -> Tensor:
    """Sum over rows of sum_v min(target, draft): what sampled drafts would have accepted (Leviathan et al. 2023, 3.4).

    The target's probabilities stay those of its whole vocabulary: what is outside the draft vocabulary is out of reach.
    """
    target_probs = teacher.log_probs.exp() * teacher.reach[:, None]
    return torch.minimum(target_probs, draft_logits.float().softmax(-1)).sum()
