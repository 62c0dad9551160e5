"""Which static tree suits a drafter, by the ranks at which its picks were right along recorded text.

A turn is a tensor [P, K]: for each position from which a round may start, the rank at which each depth had the token that
was said, -1 where it had not. W ranks.
"""

import heapq
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from models.tree import Path, chain

Picks = list[Path]  # a turn's ranks, position by position


def best_tree(turns: Sequence[Tensor], nodes: int) -> list[Path]:
    """The tree of up to `nodes` nodes, root included, in which the recorded text takes the fewest passes.

    Grown node by node: the next one is where most rounds would have gone on, had it been there. Rounds are counted from
    where they begin with the tree so far, and no independence of depths is assumed (Medusa multiplies accuracies). The
    list cut short is the tree of fewer nodes. It ends where no node would help; where none does, it is the chain.
    """
    texts = [picks_of(turn) for turn in turns]
    found: dict[Path, None] = {}  # in the order of their coming
    while len(found) < nodes - 1:
        worth = Counter(row[: right + 1] for text in texts for row, right in rounds_of(text, found))
        helpful = [path for path in worth if path not in found and path[-1] >= 0]
        if not helpful:
            break
        found[min(helpful, key=lambda path: (-worth[path], len(path), path))] = None
    return list(found) or chain(turns[0].shape[1])[: nodes - 1]


def picks_of(turn: Tensor) -> Picks:
    """The ranks of `turn` [P, K] as tuples."""
    return [tuple(row) for row in turn.tolist()]


def rounds_of(text: Picks, tree: Container[Path]) -> Iterator[tuple[Path, int]]:
    """The ranks where each round of `text` begins, and how many guesses the `tree` has right there."""
    at = 0
    while at < len(text):
        paths = (text[at][:depth] for depth in range(1, len(text[at]) + 1))
        right = sum(1 for _ in takewhile(tree.__contains__, paths))
        yield text[at], right
        at += 1 + right


def replayed(turns: Sequence[Tensor], paths: Sequence[Path]) -> tuple[int, int]:
    """Tokens committed and passes of the target, had the recorded text been decoded with the tree of `paths`.

    Exactly what greedy decoding of that text does: a round that accepts m guesses commits m + 1 tokens, and the next one
    starts behind them. What the last round has beyond the end of the text is not counted.
    """
    tree = set(paths)
    return sum(map(len, turns)), sum(1 for turn in turns for _ in rounds_of(picks_of(turn), tree))


def tau_of(turns: Sequence[Tensor], paths: Sequence[Path]) -> float:
    """Tokens per pass of the target on the recorded text."""
    tokens, passes = replayed(turns, paths)
    return tokens / passes


def expected_tau(turns: Sequence[Tensor], nodes: int) -> float:
    """Tau that the best tree of `nodes` nodes, root included, has on text like this.

    Each half of the turns is replayed with the tree that the other half would choose: on the text that chose it, a tree
    looks better than it is.
    """
    halves = turns[::2], turns[1::2]
    counts = [replayed(mine, best_tree(other, nodes)) for mine, other in (halves, halves[::-1]) if mine and other]
    if not counts:
        raise ValueError("one turn of text says nothing about other text; hold out more conversations (data.heldout)")
    return sum(tokens for tokens, _ in counts) / sum(passes for _, passes in counts)


def rates_of(turns: Sequence[Tensor], width: int) -> Tensor:
    """[K, W] how often each depth was right with each of its first `width` picks, whatever the depths before it had."""
    ranks = torch.cat(list(turns))
    return torch.stack([(ranks == rank).double().mean(0) for rank in range(width)], dim=1)


def independent_tree(rates: Tensor, nodes: int) -> list[tuple[Path, float]]:
    """The tree of `nodes` nodes, root included, with the largest products of `rates` [K, W], and those products.

    Best under a model in which depths are right independently of each other (Cai et al. 2024, section 2.3.3): a child is
    never likelier than its parent, so taking the likeliest node that may be added, one after the other, cannot go wrong.
    """
    best = rates.sort(dim=1, descending=True, stable=True)
    rank, rate = best.indices.tolist(), best.values.tolist()
    waiting: list[tuple[float, Path, float]] = [(-rate[0][0], (0,), 1.0)]  # by place in the order, not yet by rank
    found: list[tuple[Path, float]] = []
    while waiting and len(found) < nodes - 1:
        worth, places, above = heapq.heappop(waiting)
        depth, next_place = len(places), places[-1] + 1
        found.append((tuple(rank[k][place] for k, place in enumerate(places)), -worth))
        if depth < len(rate):
            heapq.heappush(waiting, (worth * rate[depth][0], (*places, 0), -worth))
        if next_place < len(rate[0]):
            heapq.heappush(waiting, (-above * rate[depth - 1][next_place], (*places[:-1], next_place), above))
    return found
