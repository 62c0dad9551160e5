"""What usually follows: tables of tokens counted from what the target says.

B rows, F growing nodes, P counted pairs, R table rows, W entries of a row, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from models.drafter import Budget, Committed, Drafter, FeatureBatch, Loss, counted
from models.ends import Ends
from models.growth import grow
from models.losses import first_depth
from models.sampling import Voice
from models.tree import TokenTree
from models.vocabulary import DraftVocabulary


class Table(Drafter):
    """For every token the `width` likeliest to follow it (`order` 2, a bigram table), or one row for all (`order` 1).

    After a token that was never seen, the likeliest of all. Counted when training starts, so it wants no steps.
    """

    successors: Tensor
    probs: Tensor

    def __init__(self, ends: Ends, order: int = 2, width: int = 16):
        super().__init__()
        if order not in (1, 2) or not 0 < width <= ends.vocabulary:
            raise ValueError(
                f"order={order} width={width}: order is 1 or 2, width at least 1 and at most the target's {ends.vocabulary} tokens"
            )
        self.ends, self.order, self.width = ends, order, width
        self.vocabulary = DraftVocabulary(None, ends.vocabulary)
        rows = ends.vocabulary if order == 2 else 1
        self.register_buffer("successors", torch.arange(width, dtype=torch.int32).repeat(rows, 1))
        self.register_buffer("probs", torch.full((rows, width), 1.0 / width))

    def learn_successors(self, before: Tensor, said: Tensor) -> None:
        """Count every row, and keep its likeliest tokens; of equals, the one with the smaller id."""
        everyone = torch.bincount(said, minlength=self.ends.vocabulary)
        self._keep(slice(None), everyone)
        if self.order == 2:
            order = before.argsort(stable=True)
            tokens, sizes = before[order].unique_consecutive(return_counts=True)
            for token, following in zip(tokens.tolist(), said[order].split(sizes.tolist()), strict=True):
                self._keep(token, torch.bincount(following, minlength=self.ends.vocabulary))

    def _keep(self, row: int | slice, counts: Tensor) -> None:
        best = counts.argsort(descending=True, stable=True)[: self.width]
        self.successors[row] = best.int()
        self.probs[row] = counts[best] / counts[best].sum()

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[1] positions at which its first guess is asked."""
        return counted(loss_mask, document, 1)

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """What its first guess is worth on `batch`; there is nothing to train."""
        return first_depth(batch, self.ends, self.vocabulary, lambda row, at: self.log_probs(batch.input_ids[row, at]))

    def log_probs(self, tokens: Tensor) -> Tensor:
        """[..., V] of what follows `tokens` [...]."""
        at = tokens if self.order == 2 else torch.zeros_like(tokens)
        blank = torch.full((*tokens.shape, self.ends.vocabulary), -torch.inf, device=tokens.device)
        return blank.scatter_(-1, self.successors[at].long(), self.probs[at].float().log())

    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """A chain, a static or a dynamic tree of what usually follows."""
        return grow(committed.bonus, lambda tokens, _: self.log_probs(tokens), self.vocabulary, budget, voice)
