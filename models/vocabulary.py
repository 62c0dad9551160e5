"""The draft vocabulary: the part of the target's tokens that a drafter speaks."""

import torch
from torch import Tensor, nn

OUTSIDE = -100  # a token outside the draft vocabulary: it teaches nothing and counts as a miss


class DraftVocabulary(nn.Module):
    """`size` of the target's `whole` tokens, or all of them where size is None.

    d2t holds offsets, as EAGLE-3 and its servers read them: target id = draft id + d2t[draft id], ascending.
    """

    d2t: Tensor

    def __init__(self, size: int | None, whole: int):
        super().__init__()
        if size is not None and not 0 < size <= whole:
            raise ValueError(f"a draft vocabulary of {size} is no part of the target's {whole} tokens; change it")
        self.whole, self.reduced = whole, size is not None
        if size is not None:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    @property
    def size(self) -> int:
        return len(self.d2t) if self.reduced else self.whole

    @property
    def ids(self) -> Tensor | None:
        """[V] the target's ids in ascending order, or None where it is the whole vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if self.reduced else None

    def learn(self, counts: Tensor) -> None:
        """Take the tokens that the target said most, by `counts` [all tokens] over the training text."""
        if self.reduced:
            chosen = counts.argsort(descending=True, stable=True)[: self.size].sort().values
            self.d2t.copy_(chosen - torch.arange(self.size))

    def rows(self, head: Tensor) -> Tensor:
        """The rows of the target's head [all tokens, D] that belong to this vocabulary."""
        return head if (ids := self.ids) is None else head[ids.to(head.device)]

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, OUTSIDE where there is none."""
        if (ids := self.ids) is None:
            return tokens
        place = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
        return torch.where(ids[place] == tokens, place, OUTSIDE)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return tokens if (ids := self.ids) is None else ids[tokens]
