"""Where a batch asks a drafter, depth by depth.

B rows, T positions, K depths, R questions of one depth, S of them at the first, Q seats of a padded row, H heads, C head width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.drafter import FeatureBatch, asked
from models.transfer import sent

Places = list[tuple[Tensor, Tensor]]


class Questions(NamedTuple):
    """The questions of depths 1 to K. Those of one position are a chain: the guesses of one round, one after the other.

    Chain c asks at depth k for the token that chain c + k - 1 asks for at depth 1: the target says it from there.
    They are counted in main memory, where masks are, and used `on` the device that has the rest.
    """

    places: Places  # K times row [R] and position [R], in reading order
    chain: list[Tensor]  # K times [R] ascending: chain c is the c-th question of the first depth
    seen: Tensor  # [K] how many there are at each depth
    widest: int  # most questions of the first depth in one row

    @classmethod
    def of(cls, batch: FeatureBatch, depths: int) -> "Questions":
        """All that `batch` can ask, as `asked` marks them."""
        return cls.where(list(asked(batch.loss_mask, batch.document, depths)))

    @classmethod
    def where(cls, marked: Sequence[Tensor]) -> "Questions":
        """The questions at the places [B, T] that are `marked` for each depth, of which the first depth has all."""
        masks = torch.stack(list(marked))
        _, row, at = masks.nonzero(as_tuple=True)
        counts = masks.sum((1, 2))
        *sizes, widest = torch.cat([counts, masks[0].sum(1).amax(keepdim=True)]).tolist()
        number = (masks[0].flatten().cumsum(0) - 1).view_as(masks[0])[row, at]
        places = list(zip(row.split(sizes), at.split(sizes), strict=True))
        return cls(places, list(number.split(sizes)), counts.float(), widest)

    def on(self, device: torch.device) -> "Questions":
        """The same on `device`."""
        places = [(sent(row, device), sent(at, device)) for row, at in self.places]
        return Questions(places, [sent(one, device) for one in self.chain], sent(self.seen, device), self.widest)


class Seats:
    """Where the questions of a batch, which are still in main memory, sit when its rows are padded to Q seats, the most that
    any row needs.
    """

    def __init__(self, batch: FeatureBatch, questions: Questions):
        number, device = torch.zeros_like(batch.document), batch.input_ids.device
        number[questions.places[0]] = 1
        number = number.cumsum(1) - 1
        self.shape = len(batch.document), questions.widest
        row, at = questions.places[0]
        self.asking = number.new_zeros(self.shape).index_put((row, number[row, at]), at)  # [B, Q] in main memory
        self.seats = [(sent(row, device), sent(number[row, at], device)) for row, at in questions.places]

    def padded(self, values: Tensor, step: int) -> Tensor:
        """[B, Q, ...] of `values` [R, ...] of one step; empty seats hold zeros."""
        return values.new_zeros(*self.shape, *values.shape[1:]).index_put(self.seats[step], values)

    def spread(self, heads: Tensor, step: int) -> Tensor:
        """[B, H, Q, C] of heads [1, H, R, C]."""
        return self.padded(heads[0].transpose(0, 1), step).transpose(1, 2)

    def gathered(self, heads: Tensor, step: int) -> Tensor:
        """[R, H * C] of heads [B, H, Q, C]."""
        return heads.transpose(1, 2)[self.seats[step]].flatten(1)
