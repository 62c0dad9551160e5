"""Medusa heads (Cai et al. 2024): head k reads the final hidden state at t and foretells token t + 1 + k.

B rows, T positions, D width, V vocabulary, K heads, R supervised positions or ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss, asked
from models.ends import Ends
from models.growth import grow
from models.losses import Teacher, hard_loss, overlap, soft_loss, summed
from models.packed import PackedLinear
from models.sampling import Voice
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
    `vocabulary` n: heads speak only the n tokens the target uses most. `teacher` data: hard labels, what was said;
    target: the target's distribution. Depth k weighs `decay` ** k.
    """

    def __init__(
        self,
        ends: Ends,
        heads: int = 4,
        layers: int = 1,
        head: str = "own",
        vocabulary: int | None = None,
        teacher: str = "data",
        decay: float = 0.8,
    ):
        super().__init__()
        if head not in ("own", "shared") or teacher not in ("data", "target"):
            raise ValueError(f"head={head} teacher={teacher}: head is own or shared, teacher is data or target")
        self.ends, self.teacher, self.decay = ends, teacher, decay
        self.vocabulary = DraftVocabulary(vocabulary, ends.vocabulary)
        self.blocks = nn.ModuleList(nn.Sequential(*(Residual(ends.width) for _ in range(layers))) for _ in range(heads))
        self.lm_heads = nn.ModuleList()
        if head == "own":
            self.lm_heads.extend(nn.Linear(ends.width, self.vocabulary.size, bias=False) for _ in range(heads))
        self._from_target()

    @property
    def draft_ids(self) -> Tensor | None:
        """[V] the target's ids of the draft vocabulary, or None where it is the target's own."""
        return self.vocabulary.ids

    def learn_vocabulary(self, counts: Tensor) -> None:
        """Draft only the tokens that the target said most."""
        self.vocabulary.learn(counts)
        self._from_target()

    def _from_target(self) -> None:
        """Start own output matrices from the target's; forget the shared product, whose rows may have changed."""
        self._shared: Callable[[Tensor], Tensor] | None = None
        for own in self.lm_heads:
            assert isinstance(own, nn.Linear)
            own.weight.data.copy_(self.vocabulary.rows(self.ends.head))

    def ready(self) -> None:
        super().ready()
        if not len(self.lm_heads):
            packed = PackedLinear(*self._target_rows())
            self._shared = lambda hidden: packed(hidden)  # no submodule, or it would be saved

    def _target_rows(self) -> tuple[Tensor, Tensor | None]:
        """The target's output matrix [V, D] and bias [V], as far as they are drafted."""
        bias = self.ends.bias
        return self.vocabulary.rows(self.ends.head), None if bias is None else self.vocabulary.rows(bias)

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits [..., V] of `head` from its own states [..., D]."""
        if len(self.lm_heads):
            return self.ends.finish(self.lm_heads[head](hidden))
        if self._shared is None:
            with torch.inference_mode(False):  # one made while decoding could not teach
                weight, bias = self._target_rows()
                self._shared = partial(nn.functional.linear, weight=weight.detach(), bias=bias)
        return self.ends.finish(self._shared(hidden.to(self.ends.head.dtype)))

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[K] positions at which each head is asked."""
        return torch.stack([where.sum() for where in asked(loss_mask, document, len(self.blocks))])

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Each head against what the target said, or would have said, one token further than the head before it."""
        where = torch.stack(list(asked(batch.loss_mask, batch.document, len(self.blocks))))
        row, at = where[0].nonzero(as_tuple=True)
        sums = summed(partial(self._grade, batch, where), row, at + 1)
        seen = where.sum((1, 2)).float()
        weights = self.decay ** torch.arange(1, len(seen) + 1, device=seen.device)
        return Loss((weights * sums[0]).sum(), seen[0], seen, *sums[1:].detach())

    def _grade(self, batch: FeatureBatch, where: Tensor, row: Tensor, at: Tensor) -> Tensor:
        """[3, K] loss, hits and overlap of every head where the teacher speaks from the states at `row`, `at` [R].

        Head k read the state k positions earlier, so one teacher serves all heads. The overlap is measured only in
        evaluation.
        """
        speaking = batch.last_hidden[row, at]
        sums = []
        teacher = None if self.training else Teacher.of(self.ends, speaking, self.draft_ids)
        if self.teacher == "target":
            target_logits = self.ends.logits(speaking.to(self.ends.head.dtype), self.draft_ids)
        for k, block in enumerate(self.blocks, start=1):
            mine = (at >= k) & where[k - 1, row, at - k]
            hidden = batch.last_hidden[row[mine], at[mine] - k].to(next(self.parameters()).dtype)
            draft_logits = self.head_logits(k - 1, block(hidden))
            label = self.vocabulary.to_draft(batch.input_ids[row[mine], at[mine] + 1])
            soft = self.teacher == "target"
            loss = soft_loss(draft_logits, target_logits[mine]) if soft else hard_loss(draft_logits, label)
            hits = (draft_logits.argmax(-1) == label).sum()
            shared = torch.zeros_like(loss) if teacher is None else overlap(draft_logits, teacher.at(mine))
            sums.append(torch.stack([loss, hits.float(), shared]))
        return torch.stack(sums, dim=1)

    @torch.no_grad()
    def ranks(self, batch: FeatureBatch, width: int) -> Tensor:
        """[R, K] the rank at which each head had what the target said, -1 beyond its `width` first picks."""
        where = list(asked(batch.loss_mask, batch.document, len(self.blocks)))
        table = torch.full((*batch.input_ids.shape, len(where)), -1, device=batch.input_ids.device)
        for k, (here, block) in enumerate(zip(where, self.blocks, strict=True), start=1):
            row, at = here.nonzero(as_tuple=True)
            hidden = batch.last_hidden[row, at].to(next(self.parameters()).dtype)
            label = self.vocabulary.to_draft(batch.input_ids[row, at + k + 1])
            table[row, at, k - 1] = rank_of(label, self.head_logits(k - 1, block(hidden)), width)
        return table[where[0]]

    @torch.inference_mode()
    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """A tree filled from the heads, each of which says the same below every node of its depth."""
        paths = budget.paths
        depth = max(map(len, paths)) if paths else min(budget.depth, len(self.blocks))
        if depth > len(self.blocks):
            raise ValueError(
                f"the tree is {depth} deep and this drafter has {len(self.blocks)} heads; choose a shallower tree"
            )
        levels = iter(self._guesses(committed.last_hidden, depth).float().log_softmax(-1).unbind(1))
        ask = lambda tokens, places: next(levels)[:, None]  # noqa: E731
        return grow(committed.bonus, ask, self.vocabulary, replace(budget, depth=depth), voice)

    def _guesses(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits [B, depth, V] of the first `depth` heads on final states [B, D]."""
        states = [block(hidden) for block in self.blocks[:depth]]
        if len(self.lm_heads):
            return torch.stack([self.head_logits(k, state) for k, state in enumerate(states)], dim=1)
        return self.head_logits(0, torch.stack(states, dim=1))  # one matrix for all heads: read it once
