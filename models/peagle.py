"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers guess several tokens in one pass, deeper ones from a learned feature.

Beside a text's pairs of feature t and token t + 1, its depth 0, stand elements (anchor t, depth d): at position t + d,
with a mask token and a learned feature in the place of what is not known yet. Element (t, d) foretells token t + 2 + d. A
batch is read whole: long rows are not cut into segments, as the paper does where memory ends.
B rows, T positions, E elements, N = T + E, K depths, D width, L taps, V draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from models.drafter import Budget, Committed, FeatureBatch, Loss, ahead, asked, counted
from models.ends import Ends
from models.fused import Fused
from models.growth import grow
from models.layer import PlainLayer
from models.losses import Head, Objective
from models.questions import Questions
from models.sampling import Voice
from models.stack import Memory, last_pairs, read
from models.transfer import sent
from models.tree import TokenTree


class PEagle(Fused):
    """`depths` guesses from one pass of `layers` layers.

    `loss` and `decay` are models.losses.Objective's. Depth d learns at max(`keep` ** d, `least`) of the places where it is asked (COD sampling). `mask_token` is what
    stands for tokens not yet known, None the last of the vocabulary. models/fused.py says what the other knobs are.
    """

    def __init__(
        self,
        ends: Ends,
        taps: Sequence[int] | None = None,
        depths: int = 8,
        vocabulary: int | None = None,
        loss: str | dict[str, float] = "kl",
        decay: float | str = 1.0,
        layers: int = 4,
        keep: float = 0.7,
        least: float = 0.2,
        mask_token: int | None = None,
        residual: str = "before_norm",
        head: str = "rows",
        embedding: str = "frozen",
        window: int | None = None,
        stretch: float = 1.0,
    ):
        super().__init__(
            ends,
            taps,
            vocabulary,
            layers=layers,
            residual=residual,
            head=head,
            embedding=embedding,
            window=window,
            stretch=stretch,
            depth=depths,
        )
        if depths < 1 or not 0 < keep <= 1 or not 0 <= least <= 1:
            raise ValueError(
                f"depths={depths} keep={keep} least={least}: at least 1 depth, and shares of places between 0 and 1"
            )
        self.mask_token = ends.vocabulary - 1 if mask_token is None else mask_token
        if not 0 <= self.mask_token < ends.vocabulary:
            raise ValueError(f"mask_token={mask_token} is no token of the target's {ends.vocabulary}")
        self.depths, self.keep, self.least = depths, keep, least
        self.objective = Objective(loss, decay)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @classmethod
    def reach(cls, knobs: dict[str, Any]) -> int:
        """As many tokens as it guesses in one pass."""
        return int(knobs.get("depths", signature(cls).parameters["depths"].default))

    def meaning(self) -> dict[str, str]:
        """Servers must be told which token the learned feature stands beside."""
        return {"mask_token": f"token {self.mask_token} stands for those not yet known"}

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[K] places at which each depth is asked; while it learns, as many as are drawn."""
        asked_at = counted(loss_mask, document, self.depths)
        if not self.training:
            return asked_at
        return torch.tensor([self._drawn(int(count), d) for d, count in enumerate(asked_at)], device=loss_mask.device)

    def _drawn(self, count: int, depth: int) -> int:
        """How many of `count` places teach at `depth`."""
        return math.ceil(max(self.keep**depth, self.least) * count)

    def drawn(self, where: Sequence[Tensor]) -> list[Tensor]:
        """The places among `where` K times [B, T] at which each depth teaches.

        An element reads those of its anchor at lesser depths, so the deepest depth is drawn first and each other one
        adds to it: every draw holds the deeper ones, and has a size known beforehand. Drawn on the CPU, where masks are and
        whose generator a checkpoint keeps.
        """
        chosen, found = torch.zeros_like(where[-1]), []
        for depth in reversed(range(len(where))):
            more = self._drawn(int(where[depth].sum()), depth) - int(chosen.sum())
            left = (where[depth] & ~chosen).nonzero()
            row, at = left[torch.randperm(len(left))[:more]].unbind(1)
            chosen = chosen.index_put((row, at), torch.ones_like(row, dtype=torch.bool))
            found.append(chosen)
        return found[::-1]

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Every depth against what the target said, or would have said, at the place it foretells."""
        every = list(asked(batch.loss_mask, batch.document, self.depths))
        where = self.drawn(every) if self.training else every
        return self.objective.loss(
            batch,
            Questions.where(where),
            self.states(batch, where),
            Head(self.lm_head.weight),
            self.ends,
            self.vocabulary,
            measure=not self.training,
        )

    def states(self, batch: FeatureBatch, where: Sequence[Tensor]) -> list[Tensor]:
        """For each depth the states [R, D], final norm included, at the places that `where` K times [B, T] marks."""
        anchor, depth, there = elements(batch.input_ids.shape[1], where)
        asked_at = [(there & (depth == d) & marked.gather(1, anchor)).nonzero() for d, marked in enumerate(where)]
        document = batch.document.gather(1, anchor).masked_fill(~there, -2)  # padding is no document's
        device = batch.input_ids.device
        anchor, depth, document = (sent(part, device) for part in (anchor, depth, document))
        position = batch.position.gather(1, anchor) + depth
        tokens = ahead(batch.input_ids, 1).gather(1, anchor).masked_fill(depth > 0, self.mask_token)
        rows = torch.arange(len(anchor), device=anchor.device)[:, None]
        feature = torch.where(
            depth[..., None] > 0, self.fused(self.mask_hidden), self.fused(batch.features)[rows, anchor]
        )
        seen = document[:, None] == document[..., None]
        before = (depth[:, None] == 0) & (anchor[:, None] <= anchor[..., None])
        if self.window is not None:
            before = before & (position[..., None] - position[:, None] < self.window)
        own = (anchor[:, None] == anchor[..., None]) & (depth[:, None] <= depth[..., None])
        normed = self.norm(self._through(tokens, feature, position, seen & (before | own)))
        return [normed[sent(row, device), sent(at, device)] for row, at in (one.unbind(1) for one in asked_at)]

    def _through(self, tokens: Tensor, feature: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """[B, N, D] all states above the stack."""
        state = self.midlayer.through(self.inputs(tokens, feature), position, seen)
        for layer in self.stack[1:]:
            assert isinstance(layer, PlainLayer)
            state = layer.through(layer.inputs(state), position, seen)
        return state

    @torch.inference_mode()
    def propose(self, committed: Committed, state: Memory, budget: Budget, voice: Voice) -> TokenTree:
        """A tree filled from one pass, each of whose depths says the same below every node."""
        depth = budget.levels if budget.paths else min(budget.depth, self.depths)
        if depth > self.depths:
            raise ValueError(
                f"the tree is {depth} deep and this drafter guesses {self.depths} tokens; choose a shallower tree"
            )
        levels = iter(self.guesses(committed, state, depth).unbind(1))
        ask = lambda tokens, places: next(levels)[:, None]  # noqa: E731
        return grow(committed.bonus, ask, self.vocabulary, replace(budget, depth=depth), voice)

    def guesses(self, committed: Committed, memory: Memory, depth: int) -> Tensor:
        """Logits [B, depth, V] of the `depth` tokens after the bonus token: the new pairs, and elements behind them."""
        tokens, last = last_pairs(committed)
        tokens = torch.cat([tokens, tokens[:, :1].repeat(1, depth - 1)], dim=1)
        wanted = last + torch.arange(depth, device=last.device)
        ahead_of = torch.arange(tokens.shape[1], device=last.device) > last
        known = self.known(committed)
        known = torch.cat([known, known[:, :1].repeat(1, depth - 1, 1)], dim=1)
        feature = torch.where(ahead_of[..., None], self.fused(self.mask_hidden), known)
        tokens = tokens.masked_fill(ahead_of, self.mask_token)
        memory.seat(committed)
        return self.says(read(self.stack, memory, self.inputs(tokens, feature), wanted, self.window))


def elements(length: int, where: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, depths and which of them are there, each [B, N]: all `length` pairs, then what `where` marks below them.

    Rows are padded on the right with anchor 0.
    """
    anchors, depths = [], []
    for row in range(len(where[0])):
        marked = [mask[row].nonzero()[:, 0] for mask in where[1:]]
        first = torch.arange(length, device=where[0].device)
        anchors.append(torch.cat([first, *marked]))
        depths.append(torch.cat([torch.full_like(one, d) for d, one in enumerate([first, *marked])]))
    depth = pad_sequence(depths, batch_first=True, padding_value=-1)
    return pad_sequence(anchors, batch_first=True), depth.clamp(min=0), depth >= 0
