"""The proposal: a tree of guessed tokens whose root is the last committed one.

B sequences, N nodes, V vocabulary, K depths, P positions of a text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as File
from typing import NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

Path = tuple[int, ...]  # the rank taken at each depth: (0, 2) is the third pick below the first pick


class Node(NamedTuple):
    """A guess as numbers in main memory."""

    token: int
    parent: int  # -1 at the root
    valid: int  # 0 where the row does not use it


@dataclass(frozen=True)
class TokenTree:
    """Guesses for the target to read in one pass; a parent comes before its children, node 0 is the root."""

    tokens: Tensor  # [B, N] target ids
    parents: Tensor  # [B, N] -1 at the root
    valid: Tensor  # [B, N] a row may use fewer nodes; an unused one is never accepted
    child_probs: Tensor | None = None  # [B, N, V] what node n's children were drawn from; None: top picks
    scores: list[list[float]] | None = None  # [B][N] log-probabilities of paths, where the drafter ranked nodes by them

    @classmethod
    def of(cls, rows: Sequence[tuple[list[Node], list[float]]], device: torch.device) -> "TokenTree":
        """Each row's nodes, of which the unused ones stand last, with the scores of their paths; those no row uses are left out."""
        used = max(sum(node.valid for node in nodes) for nodes, _ in rows)
        listed, scores = [nodes[:used] for nodes, _ in rows], [scores[:used] for _, scores in rows]
        told = torch.tensor(listed, device=device)  # at once: to start is most of what a small tensor costs
        tree = cls(told[..., 0], told[..., 1], told[..., 2].bool(), scores=scores)
        tree.__dict__["listed"] = listed  # what would be read back from the device
        return tree

    @classmethod
    def roots(cls, tokens: Tensor) -> "TokenTree":
        """A proposal of nothing: only the committed `tokens` [B]."""
        return cls(
            tokens[:, None], torch.full_like(tokens, -1)[:, None], torch.ones_like(tokens, dtype=torch.bool)[:, None]
        )

    @classmethod
    def chains(cls, tokens: Tensor) -> "TokenTree":
        """Each row of `tokens` [B, N] as one branch."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        return cls(tokens, parents.expand_as(tokens), torch.ones_like(tokens, dtype=torch.bool))

    @cached_property
    def listed(self) -> list[list[Node]]:
        """[B][N] the nodes in main memory, where a walk from node to node takes less time than a kernel's start."""
        return [
            [Node(*node) for node in zip(*row, strict=True)]
            for row in zip(*torch.stack([self.tokens, self.parents, self.valid.long()]).tolist(), strict=True)
        ]

    @cached_property
    def sights(self) -> list[list[int]]:
        """[B][N] whom each node sees, itself and its ancestors, as the bits of a number."""
        every = []
        for nodes in self.listed:
            sees: list[int] = []
            for number, node in enumerate(nodes):
                sees.append(1 << number | (sees[node.parent] if 0 <= node.parent < number else 0))
            every.append(sees)
        return every

    @cached_property
    def mask(self) -> Tensor:
        """[B, N, N] true where the column is the row's node itself or one of its ancestors."""
        return torch.from_numpy(spread(self.sights, self.tokens.shape[1])).to(self.parents.device)

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] edges between the node and the root."""
        return torch.tensor(
            [[bits.bit_count() - 1 for bits in sees] for sees in self.sights], device=self.tokens.device
        )


def seen_behind(
    ends: Sequence[int], sights: Sequence[Sequence[int]], guesses: int, since: Sequence[int], width: int
) -> Tensor:
    """[B, N, width] what is seen from behind texts of `ends` [B] tokens: theirs from `since` [B] on, and of as many `guesses`
    that follow those whose bits `sights` [B][N] have.

    In main memory, where so little takes less time than a kernel's start.
    """
    seen = np.zeros((len(ends), len(sights[0]), width), bool)
    for row, end, begin, bits in zip(seen, ends, since, spread(sights, guesses), strict=True):
        row[:, begin:end] = True
        row[:, end : end + guesses] = bits
    return torch.from_numpy(seen)


def spread(numbers: Sequence[Sequence[int]], bits: int) -> np.ndarray:
    """[B, N, bits] the lowest `bits` of each of `numbers` [B][N], the lowest first, as truths."""
    size = -(-bits // 8)
    packed = b"".join(number.to_bytes(size, "little") for row in numbers for number in row)
    found = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(-1, size), 1, bits, "little")
    return found.view(bool).reshape(len(numbers), -1, bits)


def path_to(nodes: Sequence[Node], leaf: int) -> list[int]:
    """The numbers of the nodes from the root down to `leaf`."""
    path = [leaf]
    while path[-1]:
        path.append(nodes[path[-1]].parent)
    return path[::-1]


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


def published_trees() -> dict[str, list[Path]]:
    """The trees that ship, by name, the best nodes first."""
    listed = yaml.safe_load(File(__file__).with_name("trees.yaml").read_text())
    return {name: [tuple(map(int, path)) for path in paths.split()] for name, paths in listed.items()}


def rank_of(label: Tensor, logits: Tensor, width: int) -> Tensor:
    """[R] the rank of `label` [R] among the `width` first picks of `logits` [R, V], -1 where it is not among them."""
    right = logits.topk(min(width, logits.shape[-1])).indices == label[:, None]
    return torch.where(right.any(-1), right.int().argmax(-1), -1)
