"""Conversations in batches, with what the target makes of them: computed when asked for, or read from a store.

B conversations, T tokens.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.drafter import FeatureBatch
from models.target import Target
from train.chat import Example
from train.log import tokens_bar


class Reader(Protocol):
    """Says what the target makes of conversations."""

    waits: bool  # it waits for a disk, so it may read the next batch while this one teaches

    def read(self, examples: Sequence[Example]) -> FeatureBatch: ...


class Live:
    """The target itself."""

    waits = False

    def __init__(self, target: Target):
        self.target = target

    def read(self, examples: Sequence[Example]) -> FeatureBatch:
        """One pass of the target over all of `examples`."""
        ids = pad_sequence([torch.tensor(example.input_ids) for example in examples], batch_first=True)
        lengths = torch.tensor([len(example.input_ids) for example in examples])
        batch = self.target.features(ids, masks_of(examples)[0], lengths)
        # out of inference mode, so that autograd may save them
        return FeatureBatch(*(value.clone() for value in vars(batch).values()))


class Source:
    """Examples in batches of `size`, in an order that the seed alone decides; `keep` what is read for the next time."""

    def __init__(self, examples: Sequence[Example], reader: Reader, size: int, seed: int, keep: bool = False):
        self.examples, self.reader, self.size, self.seed, self.keep = examples, reader, size, seed, keep
        self.lengths = [len(example.input_ids) for example in examples]
        self.waited = 0.0  # seconds that `features` took
        self._kept: dict[tuple[int, ...], FeatureBatch] = {}
        self._coming: dict[tuple[int, ...], Future[FeatureBatch]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        by_length = sorted(range(len(examples)), key=lambda at: self.lengths[at])
        self._groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def piece(self, number: int) -> list[int]:
        """Which conversations make the micro-batch `number` of the whole run, a function of the seed alone."""
        per_epoch = len(self.examples) // min(self.size, len(self.examples))
        epoch = number // per_epoch
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_batches(self.lengths, self.size, self.seed + epoch))
        return self._epoch[1][number % per_epoch]

    def everything(self) -> list[list[int]]:
        """Every conversation once, in batches of similar length."""
        return self._groups

    def masks(self, piece: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[B, T] loss mask and document, known before the target reads anything."""
        return masks_of([self.examples[at] for at in piece])

    def features(self, piece: Sequence[int], then: Sequence[int] = ()) -> FeatureBatch:
        """What the target makes of the conversations in `piece`; those of `then` may be read meanwhile."""
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
        return self.reader.read([self.examples[at] for at in piece])

    def read_all(self, quiet: bool) -> None:
        """Read every conversation, where they are kept; always in the same company, so that a resumed run gets the same bits."""
        with tokens_bar("target reads", sum(self.lengths), quiet) as advance:
            for piece in self.everything():
                self.features(piece)
                advance(sum(self.lengths[at] for at in piece))


def masks_of(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """[B, T] loss mask and document of `examples`, padded on the right."""
    mask = pad_sequence([torch.tensor(example.loss_mask) for example in examples], batch_first=True)
    lengths = torch.tensor([len(example.loss_mask) for example in examples])
    return mask, torch.where(torch.arange(mask.shape[1]) < lengths[:, None], 0, -1)


def epoch_batches(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Indices of one epoch's batches of `size`: shuffled, yet batches hold conversations of similar length."""
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
