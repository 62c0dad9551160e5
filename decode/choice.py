"""Which tree pays most on this machine: measured costs and acceptance in, one choice for each batch and context out.

Kept in the user's cache with the hardware and settings that it holds for.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from decode.cost import Cost
from decode.engine import Step
from models.files import write_whole
from models.source import cache_home

VERSION = 1
PLAIN, CHAIN, TREE = "plain", "chain", "tree"


@dataclass(frozen=True)
class Option:
    """A shape of proposal: `nodes` counts the root, `depth` the levels that are drafted."""

    kind: str
    nodes: int
    depth: int


@dataclass
class Point:
    """What one batch size at one context costs, in milliseconds."""

    rows: int
    context: int
    verify: Cost
    draft: dict[str, list[float]]  # of chains and trees: one entry for every depth from 1 on
    other: float  # accepting and keeping

    def round(self, option: Option) -> float:
        """Milliseconds of a round."""
        draft = self.draft[option.kind][option.depth - 1] if option.depth else 0.0
        return draft + self.verify.at(option.nodes) + self.other


@dataclass
class Choice:
    """What pays most for one batch and context, by the curve."""

    rows: int
    context: int
    option: Option
    tau: float
    speedup: float
    tokens_per_second: float  # of all rows together


def tau_within(steps: Sequence[Step], option: Option) -> float:
    """Tokens a round of `option` would have yielded where rounds of a larger proposal accepted as `steps` say.

    Nodes stand best first, so the first n are the tree of n nodes, and of an accepted path the part counts that lies in it.
    """
    if not option.depth:
        return 1.0
    inside = (takewhile(lambda node: node < option.nodes, step.path[: option.depth]) for step in steps)
    return 1.0 + sum(len(list(path)) for path in inside) / len(steps)


def options(depths: Mapping[str, int], sizes: Iterable[int]) -> list[Option]:
    """Chains of every length and trees of every size and depth, and proposing nothing."""
    chains = [Option(CHAIN, depth + 1, depth) for depth in range(1, depths.get(CHAIN, 0) + 1)]
    trees = [Option(TREE, n, d) for n in sizes for d in range(1, depths.get(TREE, 0) + 1) if n > d]
    return [Option(PLAIN, 1, 0), *chains, *trees]


def choose_at(point: Point, taus: Mapping[Option, float]) -> Choice:
    """The option with most tokens a second; plain decoding where nothing beats it."""
    plain = point.round(Option(PLAIN, 1, 0))

    def pays(option: Option) -> float:
        return taus[option] * plain / point.round(option)

    best = max(taus, key=lambda option: (pays(option), -option.nodes))
    speed = 1000 * point.rows * taus[best] / point.round(best)
    return Choice(point.rows, point.context, best, taus[best], pays(best), speed)


def sentence(choice: Choice) -> str:
    """The choice in words."""
    where = f"batch {choice.rows}, context {choice.context}"
    if choice.option.kind == PLAIN:
        return f"{where}: nothing pays, decode plainly ({choice.tokens_per_second:.1f} tokens/s)"
    shape = f"a {choice.option.kind} of {choice.option.nodes} nodes, {choice.option.depth} deep"
    return f"{where}: {shape}: tau {choice.tau:.2f}, speed-up {choice.speedup:.2f}, {choice.tokens_per_second:.1f} tokens/s"


def place_of(conf: str) -> Path:
    """Where what was tuned for the experiment `conf` is kept."""
    return cache_home() / "tuned" / f"{conf}.json"


def keep(conf: str, holds_for: Mapping[str, Any], points: Sequence[Point], choices: Sequence[Choice]) -> Path:
    """Write the curve and the choices, whole."""
    told = {
        "version": VERSION,
        "holds_for": dict(holds_for),
        "points": [asdict(point) for point in points],
        "choices": [asdict(choice) for choice in choices],
    }
    place = place_of(conf)
    place.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(place, json.dumps(told, indent=1))


def recall(conf: str, holds_for: Mapping[str, Any], rows: int, context: int) -> Choice:
    """The choice for the nearest batch and context; it must have been made for this hardware and these settings."""
    place, again = place_of(conf), f"run python -m decode.tune conf={conf}"
    if not place.exists():
        raise ValueError(f"decode.tree=tuned: nothing was tuned for {conf} on this machine; {again}")
    try:
        told = json.loads(place.read_text())
        known = told["holds_for"] if told["version"] == VERSION else {}
        choices = [Choice(**{**each, "option": Option(**each["option"])}) for each in told["choices"]]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{place} is no curve of decode.tune; {again}") from None
    for name, value in json.loads(json.dumps(holds_for)).items():
        if known.get(name) != value:
            raise ValueError(
                f"{place} was measured with {name} {known.get(name)}, and here it is {value}: a curve of other hardware or settings decides nothing; {again}"
            )
    return min(choices, key=lambda each: (_apart(each.rows, rows), _apart(each.context, context)))


def _apart(one: int, other: int) -> float:
    return abs(math.log(one / other))
