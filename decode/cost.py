"""What this machine asks for reading n nodes at once: the curve that decides which tree pays."""

from bisect import bisect_left
from dataclasses import dataclass
from statistics import median

import torch

from decode.engine import Clock
from models.target import Target
from models.tree import TokenTree

REPEATS = 5  # passes of each size at least
LEAST = 16  # the curve goes at least this far, so that it can say what a larger tree would cost
SIZES = sorted({2**power for power in range(20)} | {3 * 2**power for power in range(20)})


@dataclass
class Cost:
    """T_verify(n): median milliseconds of one pass of the target over n nodes in every row."""

    nodes: list[int]
    ms: list[float]

    def at(self, nodes: float) -> float:
        """The curve at any size: straight lines between what was measured, the last of which goes on."""
        right = min(max(bisect_left(self.nodes, nodes), 1), len(self.nodes) - 1)
        low, high = self.nodes[right - 1 : right + 1]
        start, end = self.ms[right - 1 : right + 1]
        return start + (end - start) * (nodes - low) / (high - low)

    def knee(self) -> float:
        """Nodes whose arithmetic alone, at the curve's last slope, takes as long as a pass over one."""
        slope = (self.ms[-1] - self.ms[-2]) / (self.nodes[-1] - self.nodes[-2])
        return self.ms[0] / slope if slope > 0 else float("inf")


def sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the first that is at least `largest`."""
    return SIZES[: bisect_left(SIZES, largest) + 1]


class Ladder:
    """Times passes over chains of random tokens: one of each size a climb, after `context` tokens in each of `rows` rows.

    Climbs stand between the prompts of a run, so that the curve and the run meet the same moments of the machine.
    """

    def __init__(self, target: Target, rows: int, context: int, largest: int):
        self.target, self.tried = target, sizes(max(largest, LEAST))
        before = max(1, min(context, target.context - self.tried[-1]))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(target.config.vocab_size, (rows, before + self.tried[-1]), generator=generator)
        self.cache = target.cache(rows, before + self.tried[-1])
        target.prefill(ids[:, :before], torch.full((rows,), before), self.cache)
        self.chains = [TokenTree.chains(ids[:, before : before + size].to(target.device)) for size in self.tried]
        self.passes: list[list[float]] = [[] for _ in self.tried]
        self.climb()
        self.passes = [[] for _ in self.tried]  # the first passes compile and allocate

    def climb(self) -> None:
        """One pass of each size."""
        clock = Clock(self.target.device)
        for tree, taken in zip(self.chains, self.passes, strict=True):
            clock.lap()
            self.target.read(tree, self.cache)  # nothing is kept: every pass reads the same place
            taken.append(clock.lap())

    def cost(self) -> Cost:
        """The curve so far, from at least `REPEATS` passes of each size."""
        for _ in range(REPEATS - len(self.passes[0])):
            self.climb()
        return Cost(self.tried, [1000 * median(taken) for taken in self.passes])
