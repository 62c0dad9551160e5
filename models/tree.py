"""The proposal: a tree of guessed tokens whose root is the last committed one.

B sequences, N nodes, V vocabulary, K depths, R ranks.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Path = tuple[int, ...]  # the rank taken at each depth: (0, 2) is the third pick below the first pick


@dataclass(frozen=True)
class TokenTree:
    """Guesses for the target to read in one pass; a parent comes before its children, node 0 is the root."""

    tokens: Tensor  # [B, N] target ids
    parents: Tensor  # [B, N] -1 at the root
    valid: Tensor  # [B, N] a row may use fewer nodes; an unused one is never accepted
    child_probs: Tensor | None = None  # [B, N, V] what node n's children were drawn from; None: top picks

    @classmethod
    def roots(cls, tokens: Tensor) -> "TokenTree":
        """A proposal of nothing: only the committed `tokens` [B]."""
        return cls(
            tokens[:, None], torch.full_like(tokens, -1)[:, None], torch.ones_like(tokens, dtype=torch.bool)[:, None]
        )

    @cached_property
    def mask(self) -> Tensor:
        """[B, N, N] true where the column is the row's node itself or one of its ancestors."""
        nodes = torch.arange(self.parents.shape[1], device=self.parents.device)
        reach = (self.parents[..., None] == nodes) | (nodes[:, None] == nodes)
        for _ in range(max(len(nodes) - 1, 1).bit_length()):  # each squaring doubles how far up a node sees
            reach = torch.bmm(reach.float(), reach.float()) > 0
        return reach

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] edges between the node and the root."""
        return self.mask.sum(-1) - 1


def parents_of(paths: Sequence[Path]) -> list[int]:
    """Parent of each node when node 0 is the root and node i + 1 is `paths[i]`."""
    node = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    return [-1, *(node[path[:-1]] for path in paths)]


def ordered_paths(paths: Iterable[Sequence[int]]) -> list[Path]:
    """The paths by depth, then by rank, so that parents come first.

    Raises ValueError where the list is no tree: an empty, repeated or negative path, or one whose parent is missing.
    """
    listed = [tuple(int(rank) for rank in path) for path in paths]
    known = {(), *listed}
    for path in listed:
        if not path or min(path) < 0:
            raise ValueError(f"the tree lists {list(path)}; a path has at least one rank, and ranks start at 0")
        if listed.count(path) > 1:
            raise ValueError(f"the tree lists {list(path)} twice; list every node once")
        if path[:-1] not in known:
            raise ValueError(f"the tree lists {list(path)} without its parent {list(path[:-1])}; add the parent")
    return sorted(listed, key=lambda path: (len(path), path))


def chain(depth: int) -> list[Path]:
    """The first pick at every depth."""
    return [(0,) * length for length in range(1, depth + 1)]


def best_tree(accuracy: Tensor, nodes: int) -> list[Path]:
    """The tree of `nodes` nodes, root included, that accepts most when depths are independent.

    `accuracy` [K, R] holds the probability that the pick of rank r at depth k is the target's token. A node is worth
    the product along its path, which only shrinks on the way down and with rank, so taking the best open node again
    and again is optimal (Medusa, section 2.3.3).
    """
    rates: list[list[float]] = accuracy.double().tolist()
    taken: list[Path] = []
    open_nodes: list[tuple[float, Path]] = [(-rates[0][0], (0,))]
    while open_nodes and len(taken) < nodes - 1:
        worth, path = heapq.heappop(open_nodes)
        taken.append(path)
        depth, rank = len(path), path[-1]
        if depth < len(rates):
            heapq.heappush(open_nodes, (worth * rates[depth][0], (*path, 0)))
        if rank + 1 < len(rates[0]):
            above = worth / rates[depth - 1][rank] if rates[depth - 1][rank] else 0.0
            heapq.heappush(open_nodes, (above * rates[depth - 1][rank + 1], (*path[:-1], rank + 1)))
    return ordered_paths(taken)
