"""Conversations in batches, with what the target makes of them: computed when asked for, or read from a store.

B rows, T tokens. A row is one conversation, or several one after the other.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.progress import Bar
from models.drafter import FeatureBatch
from models.target import Target
from train.chat import Example
from train.sampler import epoch_batches, packed_rows

Rows = Sequence[Sequence[Example]]


class Reader(Protocol):
    """Says what the target makes of conversations."""

    waits: bool  # it waits for a disk, so it may read the next batch while this one teaches

    def read(self, rows: Rows) -> FeatureBatch: ...


class Live:
    """The target itself."""

    waits = False

    def __init__(self, target: Target):
        self.target = target

    def read(self, rows: Rows) -> FeatureBatch:
        """One pass of the target over all of `rows`."""
        batch = self.target.documents(*laid_out(rows))
        # out of inference mode, so that autograd may save them
        return FeatureBatch(*(value.clone() for value in vars(batch).values()))


class Source:
    """Examples in batches of `size` rows, in an order that the seed alone decides; `keep` what is read for the next time.

    A row is one conversation, or with `room` as many as have room in so many tokens.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        reader: Reader,
        size: int,
        seed: int,
        keep: bool = False,
        room: int | None = None,
    ):
        tokens = [len(example.input_ids) for example in examples]
        members = [[at] for at in range(len(examples))] if room is None else packed_rows(tokens, room)
        self.rows = [[examples[at] for at in row] for row in members]
        self.lengths = [sum(tokens[at] for at in row) for row in members]  # tokens of each row
        self.reader, self.size, self.seed, self.keep = reader, size, seed, keep
        self.waited = 0.0  # seconds that `features` took
        self._kept: dict[tuple[int, ...], FeatureBatch] = {}
        self._coming: dict[tuple[int, ...], Future[FeatureBatch]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        by_length = sorted(range(len(self.rows)), key=lambda at: self.lengths[at])
        self._groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def piece(self, number: int) -> list[int]:
        """Which rows make the micro-batch `number` of the whole run, a function of the seed alone."""
        per_epoch = len(self.rows) // min(self.size, len(self.rows))
        epoch = number // per_epoch
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_batches(self.lengths, self.size, self.seed + epoch))
        return self._epoch[1][number % per_epoch]

    def everything(self) -> list[list[int]]:
        """Every row once, in batches of similar length."""
        return self._groups

    def masks(self, piece: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[B, T] loss mask and document, known before the target reads anything."""
        _, mask, document, _ = laid_out([self.rows[at] for at in piece])
        return mask, document

    def features(self, piece: Sequence[int], then: Sequence[int] = ()) -> FeatureBatch:
        """What the target makes of the rows in `piece`; those of `then` may be read meanwhile."""
        began, key = time.perf_counter(), tuple(piece)
        coming = self._coming.pop(key, None)
        batch = self._kept.get(key) or (coming.result() if coming else self._read(key))
        if self.keep:
            self._kept[key] = batch
        if then and self.reader.waits:
            self._coming = {tuple(then): self._pool.submit(self._read, tuple(then))}
        self.waited += time.perf_counter() - began
        return batch

    def _read(self, piece: Sequence[int]) -> FeatureBatch:
        return self.reader.read([self.rows[at] for at in piece])

    def read_all(self, quiet: bool) -> None:
        """Read every row, where they are kept; always in the same company, so that a resumed run gets the same bits."""
        with Bar("target reads", sum(self.lengths), console=Console(quiet=quiet)) as bar:
            for piece in self.everything():
                self.features(piece)
                count = sum(self.lengths[at] for at in piece)
                bar.advance(count, tokens=count)


def laid_out(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[B, T] token ids, loss mask, document and position of the conversations of each row, padded on the right.

    Documents are numbered within their row, and every one begins at position 0.
    """
    ids = pad_sequence([_joined(row, "input_ids") for row in rows], batch_first=True)
    mask = pad_sequence([_joined(row, "loss_mask") for row in rows], batch_first=True)
    numbers = [
        torch.arange(len(row)).repeat_interleave(torch.tensor([len(one.input_ids) for one in row])) for row in rows
    ]
    document = pad_sequence(numbers, batch_first=True, padding_value=-1)
    place = torch.arange(ids.shape[1]).expand_as(ids)
    begins = document > torch.nn.functional.pad(document, (1, 0), value=-1)[:, :-1]
    return ids, mask, document, place - torch.where(begins, place, 0).cummax(1).values


def _joined(row: Sequence[Example], part: str) -> Tensor:
    return torch.cat([torch.tensor(getattr(one, part)) for one in row])
