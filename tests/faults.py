"""Faults of speculative decoding, planted one at a time: each must be caught by the check that the real code passes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import decode.accept
from decode.accept import Accepted
from laws import Text, World, drawn
from models.cache import KVCache
from models.sampling import Draw, Sampling
from models.tree import Node, Path, TokenTree
from reference import Tabled, sampled_by_walking

Plant = Callable[[pytest.MonkeyPatch], None]


def _walk(**switches: bool) -> Callable[..., tuple[list[int], int]]:
    """A walk to stand in for the product's."""

    def walk(nodes: list[Node], target_probs: Tensor, draft_probs: Tensor | None, draw: Draw) -> tuple[list[int], int]:
        tokens, parents, valid = (list(part) for part in zip(*nodes, strict=True))
        guess = None if draft_probs is None else draft_probs.tolist()
        return sampled_by_walking(tokens, parents, valid, target_probs.tolist(), guess, draw, **switches)

    return walk


def no_fault(patch: pytest.MonkeyPatch) -> None:
    """The slow twin itself stands in: what the faults below are faults of is right without them."""
    patch.setattr(decode.accept, "_walk", _walk())


def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the next sibling is judged by what is left of the target's probabilities, undivided by its sum."""
    patch.setattr(decode.accept, "_walk", _walk(renormalise=False))


def siblings_with_replacement(patch: pytest.MonkeyPatch) -> None:
    """A rejected sibling is put back: neither struck from the target's certain children nor from the drafter's draws."""
    patch.setattr(decode.accept, "_walk", _walk(replace=True))


def bonus_from_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    """The bonus token follows the last but one node of the path."""
    accept_sampled = decode.accept.accept_sampled

    def accept(tree: TokenTree, logits: Tensor, sampling: Sampling, draws: Sequence[Draw]) -> Accepted:
        accepted = accept_sampled(tree, logits, sampling, draws)
        probs, bonus = sampling.probs(logits), list(accepted.bonus)
        for row, path in enumerate(accepted.paths):
            if len(path) > 1:
                bonus[row] = draws[row](probs[row, path[-2]])
        return Accepted(accepted.paths, bonus)

    patch.setattr(decode.accept, "accept_sampled", accept)


def row_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A row keeps as many tokens in the cache as the row that accepted most."""
    keep = KVCache.keep

    def keep_all(cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, paths))
        keep(cache, [[*path, *[0] * (longest - len(path))] if path else [] for path in paths])

    patch.setattr(KVCache, "keep", keep_all)


def path_not_moved(patch: pytest.MonkeyPatch) -> None:
    """The cache keeps the first nodes of the tree, not those of the path."""
    keep = KVCache.keep

    def keep_first(cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        keep(cache, [range(len(path)) for path in paths])

    patch.setattr(KVCache, "keep", keep_first)


class OneSided(Tabled):
    """Draws its guesses at temperature 0.5 and says it drew them at 1."""

    def weights(self, token: int) -> Tensor:
        return self.table[token] ** 2


class Peeking(Tabled):
    """Withdraws guesses for what was drawn: those of odd tokens are not tried."""

    def used(self, tokens: Tensor) -> Tensor:
        even = tokens % 2 == 0
        even[:, 0] = True
        return even


def one_sided(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Siblings drawn at temperature 0.5 by a drafter that says it drew them at 1."""
    return drawn(world, text, paths, lambda weights: draw(weights**2))


def peeking(world: World, text: Text, paths: list[Path], draw: Draw) -> TokenTree:
    """Of the drawn guesses only those are tried that turned out to be token 0."""
    tree = drawn(world, text, paths, draw)
    tree.valid[0, 1:] = tree.tokens[0, 1:] == 0
    return tree


class Coin(World):
    """Two tokens: the target says the first with 0.7, the drafter with 0.5, whatever came before."""

    def logits(self, text: Text, name: str = "target") -> Tensor:
        return torch.tensor([0.7, 0.3], dtype=torch.float64).log()

    def guesses(self, text: Text) -> Tensor:
        return torch.full((2,), 0.5, dtype=torch.float64)


RULES: dict[str, Plant] = {
    plant.__name__: plant for plant in (residual_not_renormalised, siblings_with_replacement, bonus_from_the_wrong_row)
}
CACHES: dict[str, Plant] = {plant.__name__: plant for plant in (row_not_rolled_back, path_not_moved)}
DRAFTERS: dict[str, Any] = {"temperature_on_one_side": OneSided, "truncation_that_peeks": Peeking}
