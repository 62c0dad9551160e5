"""What a draft distribution is taught against the target's. Sums over rows; V draft vocabulary."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from models.vocabulary import OUTSIDE


def hard_loss(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the token that was said: logits [R, V], labels [R], OUTSIDE where the vocabulary lacks it."""
    return cross_entropy(draft_logits.float(), labels, ignore_index=OUTSIDE, reduction="sum")


def soft_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(target || draft), both over the draft vocabulary: logits [R, V] each (Hinton et al. 2015, at temperature 1)."""
    draft = draft_logits.float().log_softmax(-1)
    return kl_div(draft, target_logits.float().log_softmax(-1), reduction="sum", log_target=True)


def overlap(draft_logits: Tensor, target_logits: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Sum over rows of sum_v min(target, draft): what sampled drafts would have accepted (Leviathan et al. 2023, 3.4).

    `target_logits` [R, all tokens] stay whole: probability outside the draft vocabulary `draft_ids` is out of reach.
    """
    target_probs = target_logits.float().softmax(-1)
    if draft_ids is not None:
        target_probs = target_probs[:, draft_ids]
    return torch.minimum(target_probs, draft_logits.float().softmax(-1)).sum()
