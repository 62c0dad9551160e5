"""Which rows teach when, and which conversations share a row."""

import hashlib
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any


class Sampler:
    """Rows of `lengths` tokens in micro-batches of `size`: a new order every epoch, which the seed alone decides.

    `taken` counts the micro-batches that the run has used on all its ranks: it is what a checkpoint keeps of the order.
    """

    def __init__(self, lengths: Sequence[int], size: int, seed: int):
        self.lengths, self.size, self.seed = lengths, size, seed
        self.taken = 0
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def piece(self, number: int) -> list[int]:
        """Which rows make the micro-batch `number` of the whole run."""
        per_epoch = len(self.lengths) // min(self.size, len(self.lengths))
        epoch = number // per_epoch
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_batches(self.lengths, self.size, self.seed + epoch))
        return self._epoch[1][number % per_epoch]

    def take(self, count: int) -> range:
        """The numbers of the next `count` micro-batches, which count as used from now on."""
        self.taken += count
        return range(self.taken - count, self.taken)

    def state(self) -> dict[str, Any]:
        """What a run that goes on must know of the order."""
        return {"taken": self.taken, "rows": len(self.lengths), "order": self._digest()}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError where the rows are not those of then."""
        if state["order"] != self._digest():
            raise ValueError(
                f"the data are not those that the unfinished run began with ({state['rows']} rows then, {len(self.lengths)} now, of other lengths or in another order); give them back, choose out=, or overwrite=true"
            )
        self.taken = state["taken"]

    def _digest(self) -> str:
        return hashlib.sha256(repr((list(self.lengths), self.size, self.seed)).encode()).hexdigest()[:16]


def epoch_batches(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Indices of one epoch's batches of `size`: shuffled, yet batches hold rows of similar length."""
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    size = min(size, len(order))
    # the remainder goes before the sorting, or the longest would be left out again and again
    order = order[: len(order) // size * size]
    window = size * 32
    grouped = [
        at
        for start in range(0, len(order), window)
        for at in sorted(order[start : start + window], key=lambda at: lengths[at])
    ]
    batches = [grouped[start : start + size] for start in range(0, len(grouped), size)]
    rng.shuffle(batches)
    return batches


def packed_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Conversations of `lengths` tokens together in rows of up to `room`: the long first, each where it fits best.

    (Best-fit decreasing: about 11/9 of the fewest rows that there could be, at most. Johnson 1973.)
    """
    if longest := [length for length in lengths if length > room]:
        raise ValueError(
            f"a conversation has {max(longest)} tokens and data.packing={room}; raise it, or lower data.longest"
        )
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room and number of every row, ascending
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        place = bisect_left(left, (lengths[at], 0))
        free, row = left.pop(place) if place < len(left) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(at)
        insort(left, (free - lengths[at], row))
    return rows
