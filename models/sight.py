"""Attention of a few asked positions to all that stands before them, in blocks: no [Q, T] of scores outlives its block.

B rows, Q queries, T positions, H heads, G key-value heads, C head width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.transfer import sent

BLOCK = 128  # queries at a time


class Block(NamedTuple):
    """Neighbouring queries, and which keys up to the last that any of them sees are hidden from each."""

    queries: slice
    stop: int
    hidden: Tensor  # [B, 1, 1, queries, stop]


class Sight:
    """Who sees whom: a query at `at` [B, Q] sees the positions up to its own in its document, of `document` [B, T].

    With a `window` it sees that many, its own the last. Both are in main memory, where it is known how far a block
    reads; who sees whom is worked out on `device`.
    """

    def __init__(self, at: Tensor, document: Tensor, window: int | None = None, device: torch.device | None = None):
        self.blocks, device = [], device or at.device
        stops = [int(part.amax()) + 1 for part in at.split(BLOCK, 1)]
        at, document = sent(at, device), sent(document, device)
        position, mine = torch.arange(document.shape[1], device=device), document.gather(1, at)
        for number, stop in enumerate(stops):
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            later = position[:stop] > at[:, part, None]
            hidden = later | (document[:, None, :stop] != mine[:, part, None])
            if window is not None:
                hidden |= position[:stop] <= at[:, part, None] - window
            self.blocks.append(Block(part, stop, hidden[:, None, None]))


class Looking(torch.autograd.Function):
    """Softmax attention of queries [B, H, Q, C] over keys and values [B, G, T, C] as `sight` allows.

    Beside what they find [B, H, Q, C] it returns the logarithm of their weights' sum [B, H, Q], so that more keys can
    be merged in; both are differentiated. The backward pass makes the weights again from that sum.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        found, mass = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=scored(queries.dtype))
        for block in sight.blocks:
            score = scores(queries, keys, block)
            most = score.amax(-1, keepdim=True)
            weights = score.sub_(most).exp_()
            total = weights.sum(-1, keepdim=True)
            mixed = (weights.to(values.dtype).flatten(2, 3) @ values[:, :, : block.stop]).view(*weights.shape[:4], -1)
            found[:, :, block.queries] = (mixed / total).flatten(1, 2)
            mass[:, :, block.queries] = (most + total.log()).flatten(1, 2)[..., 0]
        ctx.save_for_backward(queries, keys, values, found, mass)
        ctx.sight = sight
        return found, mass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_found: Tensor, of_mass: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, found, mass = ctx.saved_tensors
        groups, scale = keys.shape[1], queries.shape[-1] ** -0.5
        slopes = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        lift = of_mass - (of_found * found).sum(-1)
        for block in ctx.sight.blocks:
            part, stop = block.queries, block.stop
            weights = scores(queries, keys, block).sub_(grouped(mass[:, :, part], groups)[..., None]).exp_()
            asked, heard = (grouped(one[:, :, part], groups).flatten(2, 3) for one in (queries, of_found))
            slopes[2][:, :, :stop] += weights.to(values.dtype).flatten(2, 3).transpose(-1, -2) @ heard
            slope = (heard @ values[:, :, :stop].transpose(-1, -2)).view_as(weights)
            slope = (slope + grouped(lift[:, :, part], groups)[..., None]).mul_(weights).mul_(scale)
            slope = slope.to(keys.dtype).flatten(2, 3)
            slopes[0][:, :, part] = (slope @ keys[:, :, :stop]).unflatten(2, weights.shape[2:4]).flatten(1, 2)
            slopes[1][:, :, :stop] += slope.transpose(-1, -2) @ asked
        return *slopes, None


def scored(dtype: torch.dtype) -> torch.dtype:
    """In what scores are weighed: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def grouped(values: Tensor, groups: int) -> Tensor:
    """[B, G, H/G, ...] of [B, H, ...]: heads that share keys stand together."""
    return values.unflatten(1, (groups, -1))


def scores(queries: Tensor, keys: Tensor, block: Block) -> Tensor:
    """[B, G, H/G, queries, stop] the scores of one block; hidden keys score least."""
    asked = grouped(queries[:, :, block.queries], keys.shape[1]) * queries.shape[-1] ** -0.5
    product = asked.flatten(2, 3) @ keys[:, :, : block.stop].transpose(-1, -2)
    score = product.to(scored(product.dtype)).unflatten(2, asked.shape[2:4])
    return score.masked_fill_(block.hidden, torch.finfo(score.dtype).min)
