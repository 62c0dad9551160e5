"""Which rows teach when, and which conversations share a row."""

import random
from bisect import bisect_left, insort
from collections.abc import Sequence


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
