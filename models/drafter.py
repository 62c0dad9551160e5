"""What every drafter is: the types it speaks, and how it is saved and loaded.

B rows, T positions, N tree nodes, P path nodes, D width, L taps, K depths, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.layer import Layer
from models.packed import declared, pack
from models.quick import quicken_norms
from models.sampling import Voice
from models.tree import TokenTree


@dataclass
class Reading:
    """What the target made of the tokens it read."""

    features: Tensor  # [B, N, L*D] tapped layers
    hidden: Tensor  # [B, N, D] after the final norm: what the head turns into logits
    logits: Tensor | None  # [B, N, V] or only the rows that were asked for


@dataclass
class FeatureBatch:
    """Conversations as a drafter learns from them; what the mask marks, the target said.

    Mask and document stay in main memory, wherever the rest is: how many questions they make must be known there, and
    a device that is asked for it first has to finish what it is at.
    """

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] true where the target speaks
    document: Tensor  # [B, T] which conversation of the row a token belongs to; -1 is padding
    position: Tensor  # [B, T]
    features: Tensor  # [B, T, L*D]
    last_hidden: Tensor  # [B, T, D] after the final norm


@dataclass(frozen=True)
class Committed:
    """Tokens the target has read since the last proposal, and its own token after them."""

    tokens: Tensor  # [B, P] right-padded: the prompt at first, then each accepted path
    length: Tensor  # [B] how many of them count; 0 where nobody sits in the row
    features: Tensor  # [B, P, L*D]
    hidden: Tensor  # [B, P, D]
    bonus: Tensor  # [B] said by the target but not yet read: the root of the next tree
    fresh: Tensor  # [B] the tokens are a prompt: whatever a drafter remembers of the row is somebody else's

    @property
    def last_hidden(self) -> Tensor:
        """[B, D] the final hidden state that said the bonus token."""
        return self.hidden[torch.arange(len(self.length)), self.length.to(self.hidden.device) - 1]


class Loss(NamedTuple):
    """Sums, not means, so that micro-batches and ranks add up; K depths."""

    total: Tensor  # [] what is minimised once divided by the counted positions
    counted: Tensor  # [] supervised positions at the first depth
    seen: Tensor  # [K] supervised positions
    hits: Tensor  # [K] where the first pick was the target's own
    overlap: Tensor  # [K] sum of min(target, draft) over the vocabulary: what sampling would accept


@dataclass(frozen=True)
class Budget:
    """How much a drafter may propose in one round."""

    paths: tuple[tuple[int, ...], ...] = ()  # a static tree as ranks per depth; empty: the drafter's own way
    nodes: int = 10  # tree size, root included
    depth: int = 4
    branch: int = 4  # in a dynamic tree: nodes that grow at every level, and children of each
    least: float = 0.0  # in a dynamic tree: how likely a path must be, by the drafter's own word, to stand there
    sampled: bool = False  # guesses are drawn as the row speaks, which must not be greedily; False: top picks

    @classmethod
    def chain(cls, depth: int, least: float = 0.0) -> "Budget":
        """A dynamic tree of one branch: it ends where the drafter knows no further, or thinks it too unlikely."""
        return cls((), depth + 1, depth, 1, least)

    @property
    def levels(self) -> int:
        """Depths that are drafted at most."""
        return max(map(len, self.paths)) if self.paths else self.depth


class Drafter(nn.Module):
    """Guesses for the target. A family is one module that overrides what follows."""

    taps: tuple[int, ...] = ()  # () reads the last hidden state only, or nothing
    recomputed: tuple[str, ...] = ()  # methods of which a run short of memory keeps the inputs only; (): of its layers
    needs_training = True  # False: it drafts for any target as it is made, from its knobs alone
    moves_target = (
        False  # True: its loss may be differentiated by what the target made, too, so the two may learn together
    )

    @classmethod
    def reach(cls, knobs: dict[str, Any]) -> int | None:
        """How deep a drafter with these knobs can guess at all; None: as deep as it is asked to."""
        return None

    def learn_vocabulary(self, counts: Tensor) -> None:
        """Choose a draft vocabulary from how often the target said each token, `counts` [V]; most drafters use all."""

    def learn_successors(self, before: Tensor, said: Tensor) -> None:
        """Count which tokens follow which: the target said `said` [P] right after `before` [P]; most drafters do not."""

    def inherit(self, layer: Callable[[int], dict[str, Tensor]]) -> None:
        """Start from the target's own weights: `layer(number)` gives a decoder layer's by name, and the final norm's."""

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[K] supervised positions, known before the forward pass: what the loss is divided by."""
        raise NotImplementedError

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """What this drafter is taught on `batch`."""
        raise NotImplementedError

    def groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        """What is trained, in groups, and by what each group's learning rate is multiplied."""
        return [(1.0, [parameter for parameter in self.parameters() if parameter.requires_grad])]

    def ranks(self, batch: FeatureBatch, width: int) -> Tensor | None:
        """[P, K] what a static tree is chosen from: at which rank each depth had the target's token, -1 beyond `width`.

        For every position that `asked` marks at the first depth, row by row.
        """
        return None

    def meaning(self) -> dict[str, str]:
        """What knobs mean whose names mean other things elsewhere, for the drafter's card."""
        return {}

    def ready(self, compiled: bool = False) -> None:
        """Called once before decoding, where packed weights pay: on a CPU. `compiled`: layers are one operation each."""
        pack(self, declared(self))
        quicken_norms(self)
        for part in self.modules() if compiled else ():
            if isinstance(part, Layer):
                part.unite()

    def begin(self, rows: int, capacity: int) -> Any:
        """The drafter's own memory of `rows` sequences of up to `capacity` tokens, or None."""
        return None

    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """Guess what follows the bonus token of every row; `voice` is for drafters that draw their guesses."""
        raise NotImplementedError


def ahead(values: Tensor, steps: int) -> Tensor:
    """`values` [B, T] read `steps` positions later; beyond the end there is nothing: false, or token 0."""
    blank = values.new_zeros(len(values), min(steps, values.shape[1]))
    return torch.cat([values[:, steps:], blank], dim=1)


def asked(loss_mask: Tensor, document: Tensor, depths: int) -> Iterator[Tensor]:
    """For each depth k = 1, 2, ... [B, T] where a guess at token t + 1 + k teaches.

    Token t + 1 is the bonus token that a round starts from; the target says all of tokens t + 1 to t + 1 + k in one
    turn of one document, so every depth's positions are among those of the depth before.
    """
    run = ahead(loss_mask, 1)
    for k in range(1, depths + 1):
        run = run & ahead(loss_mask, k + 1) & (ahead(document + 1, k + 1) == document + 1)
        yield run


def counted(loss_mask: Tensor, document: Tensor, depths: int) -> Tensor:
    """[K] how many positions `asked` marks at each depth."""
    return torch.stack([where.sum() for where in asked(loss_mask, document, depths)])


class Plain(Drafter):
    """Proposes nothing: the round is plain decoding, in the same loop and on the same clock.

    It has nothing to learn, so where a target learns beside it, the target alone does.
    """

    moves_target = True

    def __init__(self, ends: object = None):
        super().__init__()

    def counts(self, loss_mask: Tensor, document: Tensor) -> Tensor:
        """[0] there is no depth."""
        return torch.zeros(0)

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """Nothing."""
        none, empty = torch.zeros((), device=batch.input_ids.device), torch.zeros(0, device=batch.input_ids.device)
        return Loss(none, none, empty, empty, empty)

    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """Only the root."""
        return TokenTree.roots(committed.bonus)
