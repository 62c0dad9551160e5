"""What the target made of conversations, on disk: computed once, taught from as often as one likes.

A store is a folder of shards for one target, one choice of taps and one precision. A conversation is found in it by its
token ids, so experiments on the same text share it. S tokens of a shard, D width, L taps.
"""

import hashlib
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.progress import Bar
from models.drafter import FeatureBatch
from models.files import cache_home, write_whole
from models.shelf import make_folder
from models.source import Identity
from models.target import Target
from models.transfer import sent
from train.chat import Example
from train.features import Live, Rows, laid_out

SCHEMA = 1
SHARD = 16_384  # a shard ends with the conversation that reaches this many tokens
TOGETHER = 8  # conversations that the target reads at once


class Known(Protocol):
    """What a store asks of a target that it need not run."""

    identity: Identity
    taps: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Stamp:
    """Whose hidden states a store holds."""

    target: str  # fingerprint of weights, template and tokenizer
    taps: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, target: Known) -> "Stamp":
        return cls(target.identity.fingerprint, tuple(target.taps), str(target.dtype).removeprefix("torch."))

    @property
    def folder(self) -> str:
        return "-".join((self.target, "_".join(map(str, self.taps)) or "last", self.dtype))

    def said(self) -> str:
        """What every shard says of itself: one string, as safetensors writes several in an order that changes."""
        return f"schema {SCHEMA}, target {self.target}, taps {list(self.taps)}, {self.dtype}"

    def serves(self, other: "Stamp") -> bool:
        """Whether `other`'s taps are among this one's."""
        return (self.target, self.dtype) == (other.target, other.dtype) and set(other.taps) <= set(self.taps)


class Store:
    """The shards of one stamp in `folder`, and where each conversation stands in them. `taps` are those asked for."""

    waits = True

    def __init__(self, folder: Path, stamp: Stamp, taps: tuple[int, ...], device: torch.device):
        self.folder, self.stamp, self.taps, self.device = folder, stamp, taps, device
        self.places: dict[bytes, tuple[Any, int, int]] = {}  # open shard, first token, end
        self.files: set[Path] = set()
        self.look()

    def look(self) -> None:
        """Take in the shards that are there by now. Raises ValueError, naming the file, for one that is not of this store."""
        for file in sorted(set(self.folder.glob("*.safetensors")) - self.files):
            shard = self._opened(file)
            keys, starts = shard.get_tensor("keys"), shard.get_tensor("starts").tolist()
            for number, key in enumerate(keys):
                self.places[bytes(key.tolist())] = (shard, starts[number], starts[number + 1])
            self.files.add(file)

    def _opened(self, file: Path) -> Any:
        try:
            shard = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}); delete it, and the next run writes it again") from None
        said = (shard.metadata() or {}).get("stamp")
        if said != self.stamp.said():
            raise ValueError(
                f"{file} holds features of {said or 'who knows what'} in the folder of {self.stamp.said()}; move it away, and the next run writes its conversations again"
            )
        return shard

    def missing(self, examples: Sequence[Example]) -> list[Example]:
        """Those of `examples` that the store does not hold, each once, the short ones first."""
        found = {key_of(example): example for example in examples}
        return [
            found[key]
            for key in sorted(found, key=lambda key: (len(found[key].input_ids), key))
            if key not in self.places
        ]

    def read(self, rows: Rows) -> FeatureBatch:
        """What the target made of the conversations in `rows`, from the shards' memory maps."""
        found = [zip(*map(self._found, row), strict=True) for row in rows]
        features, hidden = (
            pad_sequence([torch.cat(one) for one in part], batch_first=True) for part in zip(*found, strict=True)
        )
        ids, mask, document, position = laid_out(rows)
        ids, position, features, hidden = (sent(part, self.device) for part in (ids, position, features, hidden))
        return FeatureBatch(ids, mask, document, position, features, hidden)

    def _found(self, example: Example) -> tuple[Tensor, Tensor]:
        shard, start, end = self.places[key_of(example)]
        hidden = shard.get_slice("hidden")[start:end]
        if not self.taps:
            return hidden.new_empty(len(hidden), 0), hidden
        every = shard.get_slice("features")[start:end]
        if self.taps == self.stamp.taps:
            return every, hidden
        parts = every.split(hidden.shape[-1], dim=-1)
        return torch.cat([parts[self.stamp.taps.index(tap)] for tap in self.taps], dim=-1), hidden

    def fill(self, target: Target, examples: Sequence[Example], rank: int = 0, ranks: int = 1) -> None:
        """Let the target read those of `examples` that are missing, and write them, shard by shard.

        Each of several processes takes every so many shards. Which conversations share a shard and a batch depends on
        the list alone: a run that was killed and goes on leaves the same files as one that was not.
        """
        lacking = self.missing(examples)
        if not lacking:
            return
        make_folder(self.folder)
        target.tap(self.stamp.taps)
        tokens = sum(len(example.input_ids) for example in lacking)
        size = tokens * (len(self.stamp.taps) + 1) * target.identity.width * target.dtype.itemsize
        free = shutil.disk_usage(self.folder).free
        told = f"the features of {len(lacking):,} conversations ({tokens:,} tokens) take {size / 1e9:.2f} GB in {self.folder}"
        if size > 0.95 * free:
            raise ValueError(
                f"{told}, where {free / 1e9:.2f} GB are free; choose another disk with data.store=, fewer data.conversations, or data.features=online"
            )
        if rank == 0:
            print(told)
        mine = list(shards(lacking))[rank::ranks]
        share = sum(len(example.input_ids) for part in mine for example in part)
        with Bar("target reads", share, console=Console(quiet=rank > 0)) as bar:
            for part in mine:
                self._write(target, part, bar)
        self.look()

    def _write(self, target: Target, part: Sequence[Example], bar: Bar) -> None:
        """One shard, beside its name and then renamed."""
        features, hidden = [], []
        for start in range(0, len(part), TOGETHER):
            group = part[start : start + TOGETHER]
            batch = Live(target).read([[example] for example in group])
            read = batch.document >= 0
            if not (batch.last_hidden[read].isfinite().all() and batch.features[read].isfinite().all()):
                raise ValueError(
                    f"the target's hidden states are not finite for one of the conversations that begin {group[0].input_ids[:8]} and follow; try target.dtype=fp32, or drop them from the data"
                )
            for row, example in enumerate(group):
                features.append(batch.features[row, : len(example.input_ids)])
                hidden.append(batch.last_hidden[row, : len(example.input_ids)])
            count = sum(len(example.input_ids) for example in group)
            bar.advance(count, tokens=count)
        keys = [key_of(example) for example in part]
        lengths = torch.tensor([0, *(len(example.input_ids) for example in part)])
        tensors = {
            "keys": torch.tensor([list(key) for key in keys], dtype=torch.uint8),
            "starts": lengths.cumsum(0),
            "features": torch.cat(features).cpu(),
            "hidden": torch.cat(hidden).cpu(),
        }
        file = self.folder / f"{hashlib.sha256(b''.join(keys)).hexdigest()[:16]}.safetensors"
        try:
            write_whole(file, save(tensors, metadata={"stamp": self.stamp.said()}))
        except OSError as error:
            raise ValueError(
                f"{file} cannot be written ({error.strerror}); the shards before it stay: make room or choose data.store=, and run again"
            ) from None


def key_of(example: Example) -> bytes:
    """What a conversation is found by: 16 bytes of its token ids' digest."""
    return hashlib.sha256(struct.pack(f"<{len(example.input_ids)}q", *example.input_ids)).digest()[:16]


def shards(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """The examples in runs of SHARD tokens or slightly more, the rest last."""
    part: list[Example] = []
    for example in examples:
        part.append(example)
        if sum(len(each.input_ids) for each in part) >= SHARD:
            yield part
            part = []
    if part:
        yield part


def open_store(home: str | None, target: Known, examples: Sequence[Example]) -> Store:
    """The store for the taps that are set on `target`, in `home` or the user's cache.

    A store of more taps serves fewer: the one that lacks least of `examples` is taken.
    """
    root, stamp = Path(home) if home else cache_home() / "features", Stamp.of(target)
    stamps = [
        found
        for folder in sorted(root.glob(f"{stamp.target}-*"))
        if (found := stamp_of(folder)) and found.serves(stamp)
    ]
    stores = [
        Store(root / each.folder, each, stamp.taps, target.device) for each in {stamp: 0, **dict.fromkeys(stamps, 0)}
    ]
    return min(stores, key=lambda store: (len(store.missing(examples)), store.stamp != stamp))


def stamp_of(folder: Path) -> Stamp | None:
    """The stamp that a store's folder is named by, None for other folders."""
    target, _, rest = folder.name.partition("-")
    taps, _, dtype = rest.partition("-")
    numbers = () if taps == "last" else tuple(int(tap) for tap in taps.split("_") if tap.isdecimal())
    found = Stamp(target, numbers, dtype)
    return found if found.folder == folder.name else None
