"""The draft vocabulary: the part of the target's tokens that a drafter speaks."""

import torch
from torch import Tensor, nn

from models import native

OUTSIDE = -100  # a token outside the draft vocabulary: it teaches nothing and counts as a miss


class DraftVocabulary(nn.Module):
    """`size` of the target's `whole` tokens, or all of them where size is None.

    Saved as EAGLE-3 and its servers read it: d2t [size] holds offsets, target id = draft id + d2t[draft id], ascending;
    t2d [whole] marks the tokens that are in it.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, size: int | None, whole: int):
        super().__init__()
        if size is not None and not 0 < size <= whole:
            raise ValueError(f"a draft vocabulary of {size} is no part of the target's {whole} tokens; change it")
        self.whole, self.reduced = whole, size is not None
        if size is not None:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(whole) < size)

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
            self.t2d.zero_()[chosen] = True

    def check(self) -> None:
        """Raise ValueError where d2t and t2d, as they were loaded, name no part of the target's vocabulary."""
        if (ids := self.ids) is None:
            return
        marked, inside = int(self.t2d.sum()), bool(((ids >= 0) & (ids < self.whole)).all())
        why = None
        if not (inside and bool(self.t2d[ids].all())) and self._marks(self.d2t):
            why = "d2t holds the target's token ids instead of offsets, token id - draft id"
        elif not inside:
            why = f"d2t leads out of range: {int(ids.min())} to {int(ids.max())} of {self.whole} tokens"
        elif bool((ids[1:] <= ids[:-1]).any()):
            why = "d2t is not sorted: the target's ids must ascend with the draft's"
        elif marked != self.size:
            why = f"t2d marks {marked} tokens and d2t lists {self.size}"
        elif not bool(self.t2d[ids].all()):
            why = f"t2d does not mark token {int(ids[~self.t2d[ids]][0])}, which d2t lists"
        if why:
            raise ValueError(f"{why}; download or train the drafter again")

    def _marks(self, tokens: Tensor) -> bool:
        """Whether t2d marks all of `tokens`, in ascending order."""
        ascending = bool((tokens[1:] > tokens[:-1]).all()) and int(tokens[0]) >= 0 and int(tokens[-1]) < self.whole
        return ascending and bool(self.t2d[tokens].all())

    def rows(self, head: Tensor) -> Tensor:
        """The rows of the target's head [all tokens, ...] that belong to this vocabulary."""
        return head if (ids := self.ids) is None else head[ids.to(head.device)]

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, OUTSIDE where there is none."""
        if (ids := self.ids) is None:
            return tokens
        place = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
        return torch.where(ids[place] == tokens, place, OUTSIDE)

    def spread(self, probs: Tensor) -> Tensor:
        """Probabilities [..., all tokens] of draft probabilities [..., V]: what is outside has none."""
        if (ids := self.ids) is None:
            return probs
        whole = probs.new_zeros(*probs.shape[:-1], self.whole)
        whole[..., ids] = probs
        return whole

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The log-probabilities [..., count] and the target's ids of the likeliest tokens, the likeliest first, by `logits`
        [..., V]; all of them where there are fewer."""
        count = min(count, logits.shape[-1])
        if native.serves(logits):
            return native.likeliest(logits, count, self.d2t if self.reduced else None)
        log_probs, picks = logits.log_softmax(-1, dtype=torch.float32).topk(count)
        return log_probs, self.to_target(picks)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return tokens + self.d2t[tokens] if self.reduced else tokens
