"""Pearson's chi-square: whether counted texts follow a law, and how sure one may be that a fault would show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laws import Law, Text

FEW = 5.0  # cells with a smaller expectation are pooled


@dataclass(frozen=True)
class Verdict:
    """How far `count` texts are from what they should be."""

    statistic: float
    cells: int
    count: int

    @property
    def freedom(self) -> int:
        return self.cells - 1

    @property
    def chance(self) -> float:
        """The p-value: how likely lawful texts are to be as far off."""
        return tail(self.freedom, self.statistic)

    @property
    def effect(self) -> float:
        """The non-centrality a text, estimated: what the statistic is above its expectation under the law."""
        return (self.statistic - self.freedom) / self.count


def judge(texts: Sequence[Text], law: Law) -> Verdict:
    """The texts against their law; a text that the law knows not of is infinitely far off."""
    counts: dict[Text, int] = dict.fromkeys(law, 0)
    for text in texts:
        if text not in counts:
            return Verdict(math.inf, len(pooled(law, len(texts))), len(texts))
        counts[text] += 1
    statistic, cells = 0.0, pooled(law, len(texts))
    for cell in cells:
        expected = len(texts) * sum(law[text] for text in cell)
        statistic += (sum(counts[text] for text in cell) - expected) ** 2 / expected
    return Verdict(statistic, len(cells), len(texts))


def pooled(law: Law, count: int) -> list[list[Text]]:
    """Cells that each expect at least FEW of `count` texts: rare texts share one with their neighbours."""
    cells: list[list[Text]] = []
    rare: list[Text] = []
    for text in sorted(law):
        if count * law[text] >= FEW:
            cells.append([text])
            continue
        rare.append(text)
        if count * sum(law[each] for each in rare) >= FEW:
            cells.append(rare)
            rare = []
    if rare:
        cells[-1] = cells[-1] + rare
    return cells


def tail(freedom: float, statistic: float) -> float:
    """The probability that chi-square with `freedom` degrees exceeds `statistic`."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float) -> float:
    """The statistic that lawful texts exceed with probability `alpha`, by bisection."""
    low, high = 0.0, 10.0 * freedom + 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(freedom, middle) > alpha else (low, middle)
    return high


def power(freedom: int, alpha: float, noncentrality: float) -> float:
    """The probability to see a fault of this non-centrality: a Poisson mixture of central chi-squares."""
    bound, half = critical(freedom, alpha), noncentrality / 2
    spread = 12 * math.sqrt(half) + 12
    terms = range(max(0, int(half - spread)), int(half + spread) + 1)
    return sum(
        math.exp(-half + term * math.log(half) - math.lgamma(term + 1)) * tail(freedom + 2 * term, bound)
        for term in terms
    )
