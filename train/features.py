"""Target features for a batch of conversations: computed when asked for, or once and then kept in memory.

B conversations, T tokens.
"""

import random
import time
from collections.abc import Sequence

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.drafter import FeatureBatch
from models.target import Target
from train.data import Example


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


class Source:
    """Conversations in batches, with what the target makes of them."""

    def __init__(self, examples: Sequence[Example], target: Target, size: int, keep: bool, seed: int):
        self.examples, self.target, self.size, self.keep, self.seed = examples, target, size, keep, seed
        self.lengths = [len(example.input_ids) for example in examples]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
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
        mask = pad_sequence([torch.tensor(self.examples[at].loss_mask) for at in piece], batch_first=True)
        lengths = torch.tensor([self.lengths[at] for at in piece])
        return mask, torch.where(torch.arange(mask.shape[1]) < lengths[:, None], 0, -1)

    def features(self, piece: Sequence[int]) -> FeatureBatch:
        """What the target makes of the conversations in `piece`."""
        if not self.keep:
            return self._read(piece)
        if not self._kept:
            self.read_all(quiet=True)
        ids, mask, document = self._text(piece)
        kept = [self._kept[at] for at in piece]
        position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        features, hidden = (pad_sequence([entry[part] for entry in kept], batch_first=True) for part in (0, 1))
        return FeatureBatch(ids, mask, document, position, features, hidden)

    def read_all(self, quiet: bool) -> None:
        """Let the target read every conversation once, and keep what it makes of them.

        Always in the same company, whatever the order of training, so that a resumed run gets the same bits.
        """
        columns = (TextColumn("target reads"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        with Progress(*columns, disable=quiet) as progress:
            bar = progress.add_task("", total=sum(self.lengths), rate="")
            began = time.perf_counter()
            for group in self._groups:
                batch = self._read(group)
                for row, at in enumerate(group):
                    length = self.lengths[at]
                    self._kept[at] = (batch.features[row, :length].clone(), batch.last_hidden[row, :length].clone())
                progress.advance(bar, sum(self.lengths[at] for at in group))
                done = progress.tasks[0].completed / (time.perf_counter() - began)
                progress.update(bar, rate=f"{done:,.0f} tokens/s")

    def _text(self, piece: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        ids = pad_sequence([torch.tensor(self.examples[at].input_ids) for at in piece], batch_first=True)
        mask, document = self.masks(piece)
        return ids.to(self.target.device), mask.to(self.target.device), document.to(self.target.device)

    def _read(self, piece: Sequence[int]) -> FeatureBatch:
        ids, mask, _ = self._text(piece)
        batch = self.target.features(ids, mask, torch.tensor([self.lengths[at] for at in piece]))
        # out of inference mode, so that autograd may save them
        return FeatureBatch(*(value.clone() for value in vars(batch).values()))
