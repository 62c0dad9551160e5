"""The target's keys and values: preallocated, one length per row, the accepted path kept in place.

Works under stock Hugging Face models, which ask a cache layer only to store new keys and return all of them.
B rows, N new tokens, P path nodes, H key-value heads, L layers, D head width.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVCache(Cache):
    """Room for `rows` sequences of up to `capacity` tokens.

    A prompt is written by the pass after `fill`; every other pass appends node i of row b at `lengths[b] + i`
    and `keep` then says which of those nodes stay.
    """

    def __init__(self, layers: int, rows: int, capacity: int, device: torch.device | str = "cpu"):
        self.lengths = torch.zeros(rows, dtype=torch.long)  # on the host: slots and slices are computed from it
        self.capacity = capacity
        self.where = torch.device(device)
        self.store: Tensor | None = None  # [L, 2, B, H, capacity, D]
        self.filled: Tensor | None = None  # rows whose prompts are being read
        self.slots = torch.empty(0)  # [B, N] where the nodes of this pass go
        self.rows = torch.empty(0)  # [B, 1]
        super().__init__(layers=[_Layer(self, index) for index in range(layers)])

    def open(self, nodes: int, known: int = 0) -> None:
        """Make ready for a pass over `nodes` new tokens in every row, behind the `known` ones of the passes before."""
        self.filled = None
        self.end = int(self.lengths.max()) + known + nodes
        if self.end > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens a row and this pass needs {self.end}; ask for fewer new tokens or a smaller tree"
            )
        self.aligned = bool((self.lengths == self.lengths[0]).all())
        self.rows = torch.arange(len(self.lengths), device=self.where)[:, None]
        self.slots = (self.lengths[:, None] + known + torch.arange(nodes)).to(self.where)

    def fill(self, rows: Tensor, lengths: Tensor) -> None:
        """Make ready for a pass that reads the prompts of `rows` [R] afresh; `lengths` [R] of them will count."""
        if int(lengths.max()) > self.capacity:
            raise ValueError(f"a prompt of {int(lengths.max())} tokens does not fit a cache of {self.capacity} tokens")
        self.filled = rows.to(self.where)
        self.lengths[rows] = lengths

    @torch.inference_mode()  # the store was made by the target's passes, which run in it
    def keep(self, path: Tensor, length: Tensor) -> None:
        """Keep the first `length` [B] nodes of `path` [B, P] of the last pass, in path order; drop the rest."""
        path, length = path.cpu(), length.cpu()
        step = torch.arange(path.shape[1])
        moved = (step < length[:, None]) & (path != step)
        if bool(moved.any()) and self.store is not None:
            row, at = moved.nonzero(as_tuple=True)
            source = (self.lengths[row] + path[row, at]).to(self.where)
            goal = (self.lengths[row] + at).to(self.where)
            row = row.to(self.where)
            self.store[:, :, row, :, goal] = self.store[:, :, row, :, source]
        self.lengths += length

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget what `rows` [R] held, or all."""
        self.lengths[slice(None) if rows is None else rows] = 0

    def select(self, rows: Tensor) -> None:
        """Hold only `rows` [R] from now on, in this order."""
        self.lengths = self.lengths[rows]
        if self.store is not None:
            self.store = self.store[:, :, rows.to(self.where)]
            for layer, pair in zip(self.layers, self.store, strict=True):
                assert isinstance(layer, _Layer)
                layer.keys, layer.values = pair


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
            shape = (len(owner.layers), 2, len(owner.lengths), heads, owner.capacity, width)
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
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, new = self.owner, key_states.shape[2]
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
        return self.keys[:, :, : owner.end], self.values[:, :, : owner.end]

    def get_seq_length(self) -> int:
        return 0 if self.owner.filled is not None else int(self.owner.lengths.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.owner.capacity
