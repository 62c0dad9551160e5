"""Drafters that read the target's text through a stack of layers: element t is the target's feature t with token t + 1.

The stack keeps keys and values of what the target has verified. Guesses stand behind them and are forgotten.
B rows, N new elements, P committed tokens, Q queries, F growing nodes, S slots, D width, G groups, C head width.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from models.drafter import Budget, Committed, Drafter
from models.growth import grow
from models.layer import Layer, Pair, PlainLayer
from models.sampling import Voice
from models.tree import TokenTree, seen_behind
from models.vocabulary import DraftVocabulary

FEW = 16  # elements: where more are read and few are wanted, the rest need no last layer
Seen = Callable[[Tensor | None], Tensor]  # which elements [B, Q] ask, None for all -> what each may see [B, Q, S]


class FeatureDrafter(Drafter):
    """A stack of layers over pairs of feature and token. A family says what goes in and what its states mean."""

    vocabulary: DraftVocabulary
    window: int | None = None  # how far back attention looks; None: to the beginning

    @property
    def stack(self) -> Sequence[Layer]:
        """The layers, the lowest first."""
        raise NotImplementedError

    def known(self, committed: Committed) -> Tensor:
        """[B, P, D] the features of what the target has read."""
        raise NotImplementedError

    def inputs(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What the lowest layer's attention reads of `tokens` [B, N] with `feature` [B, N, D], and what it adds to."""
        raise NotImplementedError

    def fed(self, state: Tensor) -> Tensor:
        """The feature [..., D] that the next guess reads, from the stack's state."""
        raise NotImplementedError

    def says(self, state: Tensor) -> Tensor:
        """Logits [..., V] of the stack's state."""
        raise NotImplementedError

    def begin(self, rows: int, capacity: int) -> "Memory":
        """Room for the keys and values of verified pairs."""
        return Memory(rows, capacity)

    @torch.inference_mode()
    def propose(self, committed: Committed, state: "Memory", budget: Budget, voice: Voice) -> TokenTree:
        """A chain, a static or a dynamic tree, grown on the drafter's own states below the last verified pair."""
        return grow(committed.bonus, Growing(self, committed, state), self.vocabulary, budget, voice)


class Memory:
    """For each layer keys and values [B, G, capacity, C] of the pairs that the target has verified."""

    def __init__(self, rows: int, capacity: int):
        self.start, self.length = [0] * rows, [0] * rows  # where each row's new pairs begin, and its verified ones end
        self.capacity = capacity
        self.pairs: dict[int, Pair] = {}

    def seat(self, committed: Committed) -> None:
        """Expect the new pairs of what was `committed`; a fresh row forgets who sat there."""
        fresh = committed.fresh.tolist()
        self.start = [0 if anew else held for anew, held in zip(fresh, self.length, strict=True)]
        self.length = [begin + new for begin, new in zip(self.start, committed.length.tolist(), strict=True)]

    def store(self, layer: int, end: int, like: Tensor, groups: int, width: int) -> Pair:
        """Room [B, G, at least `end`, C] for the keys and values of `layer`, of the kind of `like`."""
        held = self.pairs.get(layer)
        if held is None or end > held[0].shape[2]:
            shape = len(self.length), groups, max(self.capacity, end + end // 2), width
            new = like.new_zeros(shape), like.new_zeros(shape)
            for room, old in zip(new, held or (), strict=False):
                room[:, :, : old.shape[2]] = old
            held = self.pairs[layer] = new
        return held

    def write(self, pairs: Pair, starts: Sequence[int], layer: int = 0) -> Pair:
        """Put `pairs` [B, G, N, C] of `layer` into the slots from `starts` [B] on and return all up to the last of them."""
        _, groups, count, width = pairs[0].shape
        end = max(starts) + count
        held = self.store(layer, end, pairs[0], groups, width)
        if len(starts) == 1:
            for store, new in zip(held, pairs, strict=True):
                store[:, :, end - count : end] = new
        else:
            device = held[0].device
            row = torch.arange(len(starts), device=device)[:, None]
            slots = torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)
            for store, new in zip(held, pairs, strict=True):
                store[row, :, slots] = new.transpose(1, 2)
        return held[0][:, :, :end], held[1][:, :, :end]


def climb(
    stack: Sequence[Layer],
    memory: Memory,
    inputs: tuple[Tensor, Tensor],
    position: Tensor,
    starts: Sequence[int],
    seen: Seen,
    wanted: Tensor | None = None,
) -> Tensor:
    """The states [B, Q, D] above the `stack` of new elements at `position` [B, N], which are remembered from the slots
    `starts` [B] on.

    Only `wanted` [B, Q] of them (all) are asked of the last layer.
    """
    (pair, base), state, count = inputs, inputs[1], position.shape[1]
    end, seen = max(starts) + count, cache(seen)  # layers ask for the same
    row = None if wanted is None else torch.arange(len(wanted), device=wanted.device)[:, None]
    for number, layer in enumerate(stack):
        if number:
            assert isinstance(layer, PlainLayer)
            pair, base = layer.inputs(state)
        attention, asked = layer.self_attn, wanted if number == len(stack) - 1 else None
        if layer.whole is not None and (asked is None or count <= FEW):
            store = memory.store(number, end, base, attention.groups, attention.width)
            angles = attention.rotary.angles(position, base.dtype)
            state = layer.whole(pair, base, angles, store, starts, seen(None))
            state = state if asked is None else state[row, asked]
            continue
        queries, new = attention.queries_and_pairs(pair, position)
        pairs = memory.write(new, starts, number)
        if asked is not None:
            queries, base = queries[row, :, asked].transpose(1, 2), base[row, asked]
        state = layer.outputs(base, attention.found(queries, pairs, attention.mask(seen(asked))))
    return state


def read(
    stack: Sequence[Layer],
    memory: Memory,
    inputs: tuple[Tensor, Tensor],
    wanted: Tensor,
    window: int | None = None,
) -> Tensor:
    """The states [B, Q, D] of `wanted` [B, Q] above the `stack`, whose `inputs` [B, N, ...] are the pairs that `memory` expects."""
    count, device = inputs[0].shape[1], wanted.device
    begin = torch.tensor(memory.start, device=device)[:, None]
    slots, every = begin + torch.arange(count, device=device), torch.arange(max(memory.start) + count, device=device)

    def seen(asked: Tensor | None) -> Tensor:
        here = slots if asked is None else begin + asked
        back = here[..., None] - every
        return (back >= 0) if window is None else (back >= 0) & (back < window)

    return climb(stack, memory, inputs, slots, memory.start, seen, wanted)


def last_pairs(committed: Committed) -> tuple[Tensor, Tensor]:
    """[B, P] the token after each committed one, the bonus token last, and [B, 1] the number of each row's last pair."""
    last, bonus = (committed.length - 1).clamp(min=0)[:, None], committed.bonus[:, None]
    return torch.cat([committed.tokens[:, 1:], bonus], dim=1).scatter_(1, last, bonus), last


class Growing:
    """One round of drafting: answers what follows each node, level by level."""

    def __init__(self, drafter: FeatureDrafter, committed: Committed, memory: Memory):
        self.drafter, self.memory = drafter, memory
        tokens, last = last_pairs(committed)
        memory.seat(committed)
        inputs = drafter.inputs(tokens, drafter.known(committed))
        self.state = read(drafter.stack, memory, inputs, last, drafter.window)
        self.row = torch.arange(len(tokens), device=tokens.device)[:, None]
        self.above = [[0]] * len(tokens)  # which guesses are above each node asked last, and itself: bits of a number
        self.level = self.guesses = 0

    def __call__(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits [B, F, V] of what follows `tokens` [B, F], children of the nodes at `places` [B, F]."""
        if self.level:
            self._descend(tokens, places)
        self.level += 1
        return self.drafter.says(self.state)

    def _descend(self, tokens: Tensor, places: Tensor) -> None:
        """Take the states from the nodes that were asked last to their children `tokens`."""
        drafter, count, first = self.drafter, tokens.shape[1], self.guesses
        self.guesses += count
        rows = zip(self.above, places.tolist(), strict=True)
        self.above = [[above[place] | 1 << node for node, place in enumerate(row, first)] for above, row in rows]
        ends = self.memory.length
        position = torch.tensor([[end + self.level - 1] * count for end in ends], device=tokens.device)
        inputs = drafter.inputs(tokens, drafter.fed(self.state[self.row, places]))
        window, starts = drafter.window, [end + first for end in ends]
        since = [0 if window is None else max(end + self.level - window, 0) for end in ends]
        seen = seen_behind(ends, self.above, self.guesses, since, max(ends) + self.guesses).to(tokens.device)
        self.state = climb(drafter.stack, self.memory, inputs, position, starts, lambda _: seen)
