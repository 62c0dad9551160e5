"""Medusa heads (Cai et al. 2024): head k reads the final hidden state at t and foretells token t + 1 + k.

B rows, T positions, D width, V vocabulary, K heads, R supervised positions or ranks.
"""

from dataclasses import replace
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss, asked, counted
from models.ends import Ends, FrozenHead
from models.growth import Ask, grow
from models.losses import Head, Objective
from models.questions import Questions
from models.sampling import Voice
from models.transfer import sent
from models.tree import TokenTree, rank_of
from models.vocabulary import DraftVocabulary


class Residual(nn.Module):
    """x + SiLU(Wx + b), the identity at the start."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class Medusa(Drafter):
    """K heads of residual blocks on the target's final hidden state.

    `head` own: each head has an output matrix, trained from the target's; shared: the target's, frozen and not saved.
    `vocabulary` n: heads speak only the n tokens the target uses most. What they are taught is `loss`, and how depths
    weigh is `decay`, as models.losses.Objective reads them.
    """

    moves_target = True

    def __init__(
        self,
        ends: Ends,
        heads: int = 4,
        layers: int = 1,
        head: str = "own",
        vocabulary: int | None = None,
        loss: str | dict[str, float] = "ce",
        decay: float | str = 0.8,
    ):
        super().__init__()
        if head not in ("own", "shared"):
            raise ValueError(f"head={head}: it is own or shared")
        if min(heads, layers) < 1:
            raise ValueError(f"heads={heads} layers={layers}: there is at least one head, of at least one layer")
        self.ends, self.objective = ends, Objective(loss, decay)
        self.vocabulary = DraftVocabulary(vocabulary, ends.vocabulary)
        self.frozen = FrozenHead(ends, self.vocabulary)  # what reads the states of heads without a matrix of their own
        self.blocks = nn.ModuleList(self.block(head, layers) for head in range(heads))
        self.lm_heads = nn.ModuleList()
        if head == "own":
            self.lm_heads.extend(nn.Linear(ends.width, self.vocabulary.size, bias=False) for _ in range(heads))
        self._from_target()

    def block(self, head: int, layers: int) -> nn.Module:
        """What makes the states of `head`, counted from 0, of what it reads."""
        return nn.Sequential(*(Residual(self.ends.width) for _ in range(layers)))

    def read(self, batch: FeatureBatch) -> Tensor:
        """[B, T, D] what every head reads at a position."""
        return batch.last_hidden.to(next(self.parameters()).dtype)

    def states(self, head: int, batch: FeatureBatch, read: Tensor, row: Tensor, at: Tensor) -> Tensor:
        """[R, D] the states of `head` at `row`, `at` [R], where it foretells token at + 2 + head."""
        return self.blocks[head](read[row, at])

    @classmethod
    def reach(cls, knobs: dict[str, Any]) -> int:
        """As many tokens as it has heads."""
        return int(knobs.get("heads", signature(cls).parameters["heads"].default))

    @property
    def draft_ids(self) -> Tensor | None:
        """[V] the target's ids of the draft vocabulary, or None where it is the target's own."""
        return self.vocabulary.ids

    def learn_vocabulary(self, counts: Tensor) -> None:
        """Draft only the tokens that the target said most."""
        self.vocabulary.learn(counts)
        self._from_target()

    def _from_target(self) -> None:
        """Start own output matrices from the target's; forget the target's rows, which may have changed."""
        self.frozen.forget()
        for own in self.lm_heads:
            assert isinstance(own, nn.Linear)
            own.weight.data.copy_(self.vocabulary.rows(self.ends.head))

    def ready(self, compiled: bool = False) -> None:
        super().ready(compiled)
        if not len(self.lm_heads):
            self.frozen.pack()

    def heads(self) -> Head | list[Head]:
        """What reads the states: a matrix for each depth, or the target's for all."""
        if len(self.lm_heads):
            return [Head(cast(Tensor, own.weight), finish=self.ends.finish) for own in self.lm_heads]
        return Head(*self.frozen.rows, self.ends.finish)

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits [..., V] of `head` from its own states [..., D]."""
        if len(self.lm_heads):
            return self.ends.finish(self.lm_heads[head](hidden))
        return self.frozen(hidden)

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[K] positions at which each head is asked."""
        return counted(loss_mask, document, len(self.blocks))

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Each head against what the target said, or would have said, one token further than the head before it."""
        questions, read = Questions.of(batch, len(self.blocks)), self.read(batch)
        places = questions.on(read.device).places
        states = [self.states(head, batch, read, row, at) for head, (row, at) in enumerate(places)]
        return self.objective.loss(
            batch, questions, states, self.heads(), self.ends, self.vocabulary, measure=not self.training
        )

    @torch.no_grad()
    def ranks(self, batch: FeatureBatch, width: int) -> Tensor:
        """[R, K] the rank at which each head had what the target said, -1 beyond its `width` first picks."""
        where = list(asked(batch.loss_mask, batch.document, len(self.blocks)))
        table = torch.full((*batch.input_ids.shape, len(where)), -1, device=batch.input_ids.device)
        read = self.read(batch)
        for k, here in enumerate(where, start=1):
            row, at = (sent(part, table.device) for part in here.nonzero(as_tuple=True))
            label = self.vocabulary.to_draft(batch.input_ids[row, at + k + 1])
            logits = self.head_logits(k - 1, self.states(k - 1, batch, read, row, at))
            table[row, at, k - 1] = rank_of(label, logits, width)
        return table[sent(where[0], table.device)]

    @torch.inference_mode()
    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """A static or a dynamic tree, no deeper than there are heads."""
        depth = budget.levels if budget.paths else min(budget.depth, len(self.blocks))
        if depth > len(self.blocks):
            raise ValueError(
                f"the tree is {depth} deep and this drafter has {len(self.blocks)} heads; choose a shallower tree"
            )
        ask = self.asking(committed, state, depth)
        return grow(committed.bonus, ask, self.vocabulary, replace(budget, depth=depth), voice)

    def asking(self, committed: Committed, state: Any, depth: int) -> Ask:
        """What follows the nodes of each of `depth` levels: what a head says is the same below every node."""
        levels = iter(self._guesses(committed.last_hidden, depth).unbind(1))
        return lambda tokens, places: next(levels)[:, None]

    def _guesses(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits [B, depth, V] of the first `depth` heads on final states [B, D]."""
        states = [block(hidden) for block in self.blocks[:depth]]
        if len(self.lm_heads):
            return torch.stack([self.head_logits(k, state) for k, state in enumerate(states)], dim=1)
        return self.head_logits(0, torch.stack(states, dim=1))  # one matrix for all heads: read it once
