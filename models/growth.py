"""Trees grown level by level, for drafters whose guesses depend on the branch they stand on.

B rows, N nodes, F nodes that grow at a level, C children of all of them, W picks, V draft vocabulary.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from models.drafter import Budget
from models.sampling import Voice
from models.tree import Node, Path, TokenTree, chain, parents_of
from models.vocabulary import DraftVocabulary

# tokens [B, F] and where their parents stood [B, F] among the nodes that grew before
# -> logits [B, F, V] of what follows, or [B, 1, V] where that is the same below every node
Ask = Callable[[Tensor, Tensor], Tensor]


def grow(root: Tensor, ask: Ask, vocabulary: DraftVocabulary, budget: Budget, voice: Voice) -> TokenTree:
    """A tree below the tokens `root` [B]: the static one of `budget.paths`, or a dynamic one where there are none.

    A sampled one has the shape of `budget.paths`, or is a chain.
    """
    if budget.sampled:
        if not voice.sampling.temperature:
            raise ValueError("at temperature 0 there is nothing to draw; propose top picks, or raise the temperature")
        paths = budget.paths or tuple(chain(min(budget.depth, budget.nodes - 1)))
        return grow_sampled(root, ask, vocabulary, paths, voice)
    if budget.paths:
        return grow_static(root, ask, vocabulary, budget.paths)
    return grow_dynamic(root, ask, vocabulary, budget)


class Level(NamedTuple):
    """The nodes of one depth that have children, and those children; nodes are numbered as in the tree."""

    inner: list[int]  # [F]
    places: list[int]  # [F] where their parents stood among the inner nodes of the level before
    children: list[int]  # [C]
    above: list[int]  # [C] each child's parent among `inner`
    ranks: list[int]  # [C]


@cache
def levels(paths: tuple[Path, ...]) -> list[Level]:
    """The tree of `paths`, level by level."""
    parents, found, before = parents_of(paths), [], {-1: 0}
    for depth in range(max(map(len, paths))):
        children = [node for node, path in enumerate(paths, start=1) if len(path) == depth + 1]
        inner = sorted({parents[child] for child in children})
        here = {node: place for place, node in enumerate(inner)}
        places = [before[parents[node]] for node in inner]
        above = [here[parents[child]] for child in children]
        found.append(Level(inner, places, children, above, [paths[child - 1][-1] for child in children]))
        before = here
    return found


def asked_below(level: Level, tokens: Tensor, ask: Ask) -> Tensor:
    """What follows the inner nodes of `level` in a tree that so far holds `tokens` [B, N]."""
    growing = tokens[:, level.inner]
    return ask(growing, torch.tensor(level.places, device=tokens.device).expand_as(growing))


def grow_static(root: Tensor, ask: Ask, vocabulary: DraftVocabulary, paths: tuple[Path, ...]) -> TokenTree:
    """The tree of `paths`: only nodes with children are asked what follows."""
    tokens = root[:, None].repeat(1, len(paths) + 1)
    for level in levels(paths):
        logits, width = asked_below(level, tokens, ask), 1 + max(level.ranks)
        if width > logits.shape[-1]:
            raise ValueError(
                f"the tree takes the {width}th pick of a draft vocabulary of {logits.shape[-1]} tokens; choose a narrower tree"
            )
        picks = vocabulary.to_target(logits.topk(width).indices).expand(-1, len(level.inner), -1)
        tokens[:, level.children] = picks[:, level.above, level.ranks]
    return TokenTree(tokens, _parents(paths, tokens), torch.ones_like(tokens, dtype=torch.bool))


def grow_sampled(
    root: Tensor, ask: Ask, vocabulary: DraftVocabulary, paths: tuple[Path, ...], voice: Voice
) -> TokenTree:
    """The tree of `paths` with children drawn as each row speaks: siblings one after the other, without replacement.

    The first listed of them is the first draw, whatever its rank: a draw left out would make the next one's odds
    others than the accept rule knows. Where a drafter runs out of tokens, the node and what is below it are not used.
    """
    tokens = root[:, None].repeat(1, len(paths) + 1)
    valid, child_probs = torch.ones_like(tokens, dtype=torch.bool), None
    for level in levels(paths):
        probs = voice.sampling.probs(asked_below(level, tokens, ask)).expand(-1, len(level.inner), -1)
        if child_probs is None:
            child_probs = probs.new_zeros(*tokens.shape, vocabulary.whole)
        child_probs[:, level.inner] = vocabulary.spread(probs)
        picks, drawn = _draw(probs, level, voice)
        tokens[:, level.children] = vocabulary.to_target(picks)
        valid[:, level.children] = drawn & valid[:, level.inner][:, level.above]
    return TokenTree(tokens, _parents(paths, tokens), valid, child_probs)


def _draw(probs: Tensor, level: Level, voice: Voice) -> tuple[Tensor, Tensor]:
    """[B, C] draft tokens of the children below nodes that believe in `probs` [B, F, V], and whether there was one left."""
    left = probs.clone()
    picks = torch.zeros(len(probs), len(level.children), dtype=torch.long)
    drawn = torch.zeros_like(picks, dtype=torch.bool)
    for row, draw in enumerate(voice.draws):
        for child, above in enumerate(level.above):
            if left[row, above].any():
                picks[row, child], drawn[row, child] = draw(left[row, above]), True
                left[row, above, picks[row, child]] = 0.0
    return picks.to(probs.device), drawn.to(probs.device)


def _parents(paths: tuple[Path, ...], tokens: Tensor) -> Tensor:
    return torch.tensor(parents_of(paths), device=tokens.device).expand_as(tokens)


def grow_dynamic(root: Tensor, ask: Ask, vocabulary: DraftVocabulary, budget: Budget) -> TokenTree:
    """The `budget.nodes` nodes, root included, with the most probable paths among all that were drafted (EAGLE-2, section 4).

    At each of `budget.depth` levels the `budget.branch` most probable nodes of the level before grow, by as many children
    each. A child is never more probable than its parent and is made after it, so a stable sort takes the parent first.
    The nodes stand in that order: the first n are the tree of n nodes. Where a path is less likely than `budget.least`
    it is left out, and where no further level could change the tree, none is drafted.
    """
    tokens, places = root[:, None], torch.zeros_like(root)[:, None]
    rows = [Candidates(token) for token in root.tolist()]
    for _ in range(budget.depth):
        log_probs, best = vocabulary.likeliest(ask(tokens, places), budget.branch)
        for row, picks, worth in zip(rows, best.tolist(), log_probs.tolist(), strict=True):
            row.extend(picks, worth, budget.branch)
        if all(row.barren(budget) for row in rows):
            break
        tokens = torch.tensor([row.heads for row in rows], device=root.device)
        places = torch.tensor([row.places for row in rows], device=root.device)
    return TokenTree.of([row.likeliest(budget) for row in rows], root.device)


class Candidates:
    """What may stand below the root of one row, numbered as it was made; the root is 0.

    In main memory: it is few numbers, and a kernel takes longer to start than they take to sort.
    """

    def __init__(self, root: int):
        self.tokens, self.parents, self.scores = [root], [-1], [0.0]  # scores are log-probabilities of paths
        self.growing = [0]  # the nodes that were asked last, or are to be asked next
        self.places = [0]  # where the parents of `growing` stood among those that grew before

    @property
    def heads(self) -> list[int]:
        """The tokens of the nodes that grow next."""
        return [self.tokens[node] for node in self.growing]

    def extend(self, picks: list[list[int]], worth: list[list[float]], branch: int) -> None:
        """Below each growing node its children `picks`, with their own log-probabilities; one list is for all of them."""
        first, width = len(self.tokens), len(picks[0])
        for place, node in enumerate(self.growing):
            here = place if len(picks) > 1 else 0
            self.tokens += picks[here]
            self.parents += [node] * width
            self.scores += [self.scores[node] + own for own in worth[here]]
        made = range(first, len(self.tokens))
        self.growing = sorted(made, key=self.scores.__getitem__, reverse=True)[:branch]
        self.places = [(node - first) // width for node in self.growing]

    def barren(self, budget: Budget) -> bool:
        """Whether no child of the last level's nodes could stand in the tree."""
        floor, room = floor_of(budget.least), budget.nodes - 1
        if len(self.tokens) > room > 0:
            floor = max(floor, sorted(self.scores[1:], reverse=True)[room - 1])
        return self.scores[self.growing[0]] <= floor

    def likeliest(self, budget: Budget) -> tuple[list[Node], list[float]]:
        """The root and the best others, `budget.nodes` in all, the best first, and the scores of their paths."""
        order = [0, *sorted(range(1, len(self.tokens)), key=self.scores.__getitem__, reverse=True)[: budget.nodes - 1]]
        number = {-1: -1} | {node: place for place, node in enumerate(order)}
        scores, floor = [self.scores[node] for node in order], floor_of(budget.least)
        nodes = [
            Node(self.tokens[node], number[self.parents[node]], int(score >= floor))
            for node, score in zip(order, scores, strict=True)
        ]
        return nodes, scores


def floor_of(least: float) -> float:
    """The log-probability below which a path is left out."""
    return math.log(least) if least else -math.inf
