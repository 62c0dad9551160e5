"""How tokens are drawn from logits, by the target and by drafters that sample. V vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Draw = Callable[[Tensor], int]  # weights -> an index with probability in proportion: the only randomness there is


@dataclass(frozen=True)
class Sampling:
    """How the target speaks: temperature 0 is greedy; top_k 0 and top_p 1 keep everything."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"temperature={self.temperature} top_k={self.top_k} top_p={self.top_p} is no sampling: temperature and top_k are at least 0, top_p is in (0, 1]"
            )

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution [..., V] that `logits` [..., V] mean: temperature, then top-k, then top-p, then softmax."""
        scaled = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        probs = scaled.softmax(-1)
        if self.top_p < 1:
            ranked, order = probs.sort(descending=True, stable=True)
            outside = ranked.cumsum(-1) - ranked >= self.top_p  # the mass before this token already suffices
            probs = probs.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def draw(self, row: int) -> Draw:
        """Draws of their own for the sequence `row`, whatever is decoded beside it."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + row)

        def draw(weights: Tensor) -> int:
            bounds = weights.double().cumsum(-1).cpu()
            point = torch.rand((), generator=generator, dtype=torch.float64) * bounds[-1]
            return min(int(torch.searchsorted(bounds, point, right=True)), len(bounds) - 1)

        return draw


GREEDY = Sampling()


@dataclass(frozen=True)
class Voice:
    """How every row of a batch speaks, and its own randomness."""

    sampling: Sampling = GREEDY
    draws: Sequence[Draw] = ()  # one a row; greedy rows draw nothing
