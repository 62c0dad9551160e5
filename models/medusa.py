"""Medusa heads (Cai et al. 2024): head k reads the final hidden state at t and foretells token t + 1 + k.

B rows, T positions, D width, V vocabulary, K heads, R supervised positions or ranks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss
from models.ends import Ends
from models.losses import hard_loss, overlap, soft_loss
from models.tree import TokenTree, chain, parents_of
from models.vocabulary import DraftVocabulary

CHUNK = 4096  # positions whose logits exist at the same time


class Lesson(NamedTuple):
    """What one head is asked on one batch."""

    hidden: Tensor  # [R, D] the states it reads
    token: Tensor  # [R] what the target said there
    teacher: Tensor  # [R, D] the states from which the target said it


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
        """Start own output matrices from the target's; forget the shared one's copy, whose rows may have changed."""
        self._shared: Tensor | None = None
        for own in self.lm_heads:
            assert isinstance(own, nn.Linear)
            own.weight.data.copy_(self.vocabulary.rows(self.ends.head))

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits [..., V] of `head` from its own states [..., D]."""
        if len(self.lm_heads):
            return self.ends.finish(self.lm_heads[head](hidden))
        if self._shared is None:
            with torch.inference_mode(False):  # one made while decoding could not teach
                self._shared = self.vocabulary.rows(self.ends.head).detach()  # not a parameter, or it would be saved
        return self.ends.finish(nn.functional.linear(hidden.to(self._shared.dtype), self._shared))

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[K] positions at which each head is asked."""
        return torch.stack([asked.sum() for asked in self._asked(loss_mask, document)])

    def _asked(self, loss_mask: Tensor, document: Tensor) -> Iterator[Tensor]:
        """For each head, [B, T] where it is asked: the target says all of tokens t + 1 to t + 1 + k in one turn."""
        run = _ahead(loss_mask, 1)
        for k in range(1, len(self.blocks) + 1):
            run = run & _ahead(loss_mask, k + 1) & (_ahead(document, k + 1) == document)
            yield run

    def lessons(self, batch: FeatureBatch) -> Iterator[Lesson]:
        """What each head is asked on `batch`."""
        for k, asked in enumerate(self._asked(batch.loss_mask, batch.document), start=1):
            row, at = asked.nonzero(as_tuple=True)
            hidden, teacher = batch.last_hidden[row, at], batch.last_hidden[row, at + k]
            yield Lesson(hidden.to(next(self.parameters()).dtype), batch.input_ids[row, at + k + 1], teacher)

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Each head against what the target said, or would have said, one token further than the head before it."""
        total = batch.last_hidden.new_zeros((), dtype=torch.float32)
        table: list[Tensor] = []
        for k, lesson in enumerate(self.lessons(batch)):
            sums = [total.new_zeros(()), total.new_zeros(()), total.new_zeros(())]
            for part in zip(*(values.split(CHUNK) for values in lesson), strict=True):
                graded = (
                    checkpoint(self._grade, k, *part, use_reentrant=False)
                    if len(lesson.token) > CHUNK
                    else self._grade(k, *part)
                )
                sums = [have + new for have, new in zip(sums, graded, strict=True)]
            total = total + self.decay ** (k + 1) * sums[0]
            table.append(torch.stack([total.new_tensor(float(len(lesson.token))), sums[1].detach(), sums[2].detach()]))
        seen, hits, shared = torch.stack(table, dim=1)
        return Loss(total, seen[0], seen, hits, shared)

    def _grade(self, head: int, hidden: Tensor, token: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, hits and overlap of one head, summed over positions; the overlap is measured only in evaluation."""
        draft_logits = self.head_logits(head, self.blocks[head](hidden))
        label = self.vocabulary.to_draft(token)
        if self.teacher == "target":
            loss = soft_loss(draft_logits, self.ends.logits(teacher.to(self.ends.head.dtype), self.draft_ids))
        else:
            loss = hard_loss(draft_logits, label)
        hits = (draft_logits.argmax(-1) == label).sum().float()
        if self.training:
            return loss, hits, torch.zeros_like(hits)
        return loss, hits, overlap(draft_logits, self.ends.logits(teacher.to(self.ends.head.dtype)), self.draft_ids)

    @torch.no_grad()
    def ranks(self, batch: FeatureBatch, width: int) -> Tensor:
        """[R, K] the rank at which each head had what the target said, -1 beyond its `width` first picks."""
        asked = list(self._asked(batch.loss_mask, batch.document))
        table = torch.full((*batch.input_ids.shape, len(asked)), -1, device=batch.input_ids.device)
        for k, (where, lesson) in enumerate(zip(asked, self.lessons(batch), strict=True)):
            picks = self.head_logits(k, self.blocks[k](lesson.hidden)).topk(min(width, self.vocabulary.size)).indices
            right = picks == self.vocabulary.to_draft(lesson.token)[:, None]
            table[..., k][where] = torch.where(right.any(-1), right.int().argmax(-1), -1)
        return table[asked[0]]

    @torch.inference_mode()
    def propose(self, committed: Committed, state: Any, budget: Budget) -> TokenTree:
        """A static tree filled with the heads' top picks; siblings under different parents share tokens."""
        paths = budget.paths or tuple(chain(len(self.blocks)))
        depth, ranks = max(map(len, paths)), max(map(max, paths)) + 1
        if depth > len(self.blocks):
            raise ValueError(
                f"the tree is {depth} deep and this drafter has {len(self.blocks)} heads; choose a shallower tree"
            )
        states = torch.stack([self.blocks[k](committed.last_hidden) for k in range(depth)], dim=1)
        if len(self.lm_heads):
            logits = torch.stack([self.head_logits(k, states[:, k]) for k in range(depth)], dim=1)
        else:  # one matrix for all heads: read it once
            logits = self.head_logits(0, states)
        picks = self.vocabulary.to_target(logits.topk(ranks).indices)
        guessed = picks[:, [len(path) - 1 for path in paths], [path[-1] for path in paths]]
        tokens = torch.cat([committed.bonus[:, None], guessed], dim=1)
        parents = torch.tensor(parents_of(paths), device=tokens.device).expand_as(tokens)
        return TokenTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))


def _ahead(values: Tensor, steps: int) -> Tensor:
    """`values` [B, T] read `steps` positions later; beyond the end there is nothing."""
    blank = values.new_zeros((), dtype=values.dtype) if values.dtype == torch.bool else values.new_tensor(-1)
    return torch.cat([values[:, steps:], blank.expand(len(values), min(steps, values.shape[1]))], dim=1)
