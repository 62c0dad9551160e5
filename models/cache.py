"""The target's keys and values: preallocated, one length per row, the accepted path kept in place.

Works under stock Hugging Face models, which ask a cache layer only to store new keys and return all of them.
B rows, N new tokens, P path nodes, H key-value heads, L layers, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 64  # tokens a row by which a cache in one piece grows


class KVCache(Cache):
    """Room for `rows` sequences of up to `capacity` tokens.

    A prompt is written by the pass after `fill`; every other pass appends node i of row b at `lengths[b] + i`
    and `keep` then says which of those nodes stay.

    A pass sees the slots in use, a slice of the store. With `whole` it sees all there are, in one piece, which products
    that need it so then do not copy; and there are few more than are in use, for the store grows with the text.
    """

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device | str = "cpu", whole: bool = False):
        self.lengths = [0] * rows  # in main memory: slots and slices are computed from it
        self.capacity, self.whole = capacity, whole
        self.room = 0 if whole else capacity
        self.seen = 0  # slots that this pass sees
        self.where = torch.device(device)
        self.store: Tensor | None = None  # [L, 2, B, H, room, D]
        self.filled: Tensor | None = None  # rows whose prompts are being read
        self.starts = [0] * rows  # where the nodes of this pass begin
        self.aligned = True  # rows are equally long: new keys are one block
        self.slots = torch.empty(0)  # [B, N] where the nodes of this pass go, unless rows are aligned
        self.rows = torch.empty(0)  # [B, 1]
        super().__init__(layers=[_Layer(self, index) for index in range(layers)])

    def open(self, nodes: int, known: int = 0) -> None:
        """Make ready for a pass over `nodes` new tokens in every row, behind the `known` ones of the passes before."""
        self.filled = None
        lengths = self.lengths
        self.end = max(lengths) + known + nodes
        if self.end > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens a row and this pass needs {self.end}; ask for fewer new tokens or a smaller tree"
            )
        self.reach(self.end)
        self.starts = [length + known for length in lengths]
        self.seen = self.room if self.whole else self.end
        self.aligned = len(set(lengths)) == 1
        if not self.aligned:
            self.rows = torch.arange(len(lengths), device=self.where)[:, None]
            self.slots = (torch.tensor(self.starts)[:, None] + torch.arange(nodes)).to(self.where)

    def pair(self, layer: int, like: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
        """The keys and values [B, G, room, D] of `layer`, to be written to from `starts` on; `like` says of what kind."""
        held = self.layers[layer]
        assert isinstance(held, _Layer)
        if not held.is_initialized:
            none = like.new_empty(len(self.lengths), groups, 0, width)
            held.lazy_initialization(none, none)
        return held.keys, held.values

    def fill(self, rows: Tensor, lengths: Tensor) -> None:
        """Make ready for a pass that reads the prompts of `rows` [R] afresh; `lengths` [R] of them will count."""
        if int(lengths.max()) > self.capacity:
            raise ValueError(f"a prompt of {int(lengths.max())} tokens does not fit a cache of {self.capacity} tokens")
        self.filled = rows.to(self.where)
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self.lengths[row] = length

    def reach(self, end: int) -> None:
        """Have room for `end` tokens a row."""
        if end <= self.room:
            return
        self.room = min(-(-end // GROWTH) * GROWTH, self.capacity)
        if self.store is not None:
            grown = self.store.new_zeros(*self.store.shape[:4], self.room, self.store.shape[5])
            grown[..., : self.store.shape[4], :] = self.store
            self._hold(grown)

    def _hold(self, store: Tensor) -> None:
        """Let every layer write to its share of `store`."""
        self.store = store
        for layer, pair in zip(self.layers, store, strict=True):
            assert isinstance(layer, _Layer)
            layer.keys, layer.values = pair

    @torch.inference_mode()  # the store was made by the target's passes, which run in it
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep of the last pass each row's nodes on its path, in path order; drop the rest."""
        moves = [
            (row, held + at, held + node)
            for row, (held, path) in enumerate(zip(self.lengths, paths, strict=True))
            for at, node in enumerate(path)
            if at != node
        ]
        if moves and self.store is not None:
            row, goal, source = torch.tensor(moves, device=self.where).unbind(1)
            self.store[:, :, row, :, goal] = self.store[:, :, row, :, source]
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget what `rows` [R] held, or all."""
        for row in range(len(self.lengths)) if rows is None else rows.tolist():
            self.lengths[row] = 0

    def select(self, rows: Tensor) -> None:
        """Hold only `rows` [R] from now on, in this order; those that keep their places are not copied."""
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        if self.store is None:
            return
        moved = (rows != torch.arange(len(rows))).nonzero().flatten()
        with torch.inference_mode():
            self.store[:, :, moved.to(self.where)] = self.store[:, :, rows[moved].to(self.where)]
        self._hold(self.store[:, :, : len(rows)])


class _Layer(CacheLayerMixin):
    """One layer's share of the store, in the words that transformers speaks."""

    is_sliding = False  # all history is kept; a window lives in the mask

    def __init__(self, owner: KVCache, index: int):
        super().__init__()
        self.owner, self.index = owner, index
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        owner, (_, heads, _, width) = self.owner, key_states.shape
        if (
            owner.store is None
        ):  # zeros, not empty: a hidden slot still meets the softmax's weight 0, and 0 * NaN is NaN
            shape = (len(owner.layers), 2, len(owner.lengths), heads, owner.room, width)
            owner.store = key_states.new_zeros(shape)
        if owner.store.shape[3] != heads or owner.store.shape[5] != width or value_states.shape != key_states.shape:
            raise ValueError(
                "this target's layers have keys and values of different shapes, which the cache does not hold; choose another target"
            )
        self.keys, self.values = owner.store[self.index]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, H, N, D]; return everything the row's mask may look at."""
        owner, new = self.owner, key_states.shape[2]
        owner.reach(new)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pairs = ((self.keys, key_states), (self.values, value_states))
        if owner.filled is not None:
            for store, states in pairs:
                store[owner.filled, :, :new] = states
            return key_states, value_states
        for store, states in pairs:
            if owner.aligned:
                store[:, :, owner.end - new : owner.end] = states
            else:
                store[owner.rows, :, owner.slots] = states.transpose(1, 2)
        return self.keys[:, :, : owner.seen], self.values[:, :, : owner.seen]

    def get_seq_length(self) -> int:
        return 0 if self.owner.filled is not None else max(self.owner.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.owner.capacity
