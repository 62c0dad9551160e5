"""Which tree pays most on this machine: measured costs and acceptance in, one choice for each batch and context out.

Kept in the user's cache with the hardware and settings that it holds for.
"""

import json
import math
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import mean
from typing import Any

from decode.cost import Cost
from decode.engine import Step
from models.files import cache_home, write_whole
from models.growth import floor_of

VERSION = 2
PLAIN, CHAIN, STATIC, DYNAMIC = "plain", "chain", "static", "dynamic"
FLOORS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # of decode.least


@dataclass(frozen=True)
class Option:
    """A shape of proposal: `nodes` counts the root, `depth` the levels that are drafted; both at most where `least` is set."""

    kind: str
    nodes: int
    depth: int
    least: float = 0.0


@dataclass
class Trial:
    """What rounds of one option came to: tokens a round, and for each round how many levels were drafted and nodes read."""

    tau: float
    shapes: list[tuple[int, int]]

    def side_by_side(self, rows: int) -> list[tuple[int, int]]:
        """The shapes of rounds in which `rows` rows take part: all wait for the one that drafts and reads most."""
        mixed = random.Random(0).sample(self.shapes, len(self.shapes))
        beside = [mixed[at : at + rows] for at in range(0, len(mixed), rows)]
        return [(max(levels), max(nodes)) for levels, nodes in (zip(*some, strict=True) for some in beside)]


@dataclass
class Point:
    """What one batch size at one context costs, in milliseconds."""

    rows: int
    context: int
    verify: Cost
    draft: dict[str, list[float]]  # of every kind of proposal: one entry for every depth from 1 on
    other: float  # accepting and keeping

    def round(self, option: Option, trial: Trial) -> float:
        """Milliseconds of a round, on average."""
        draft = [0.0, *self.draft.get(option.kind, [])]
        shapes = trial.side_by_side(self.rows)
        return mean(draft[levels] + self.verify.at(nodes) for levels, nodes in shapes) + self.other


@dataclass
class Choice:
    """What pays most for one batch and context, by the curve."""

    rows: int
    context: int
    option: Option
    tau: float
    speedup: float
    tokens_per_second: float  # of all rows together


PLAINLY = Option(PLAIN, 1, 0)


def trial(steps: Sequence[Step], option: Option) -> Trial:
    """What `option` would have come to where rounds of a larger proposal of its kind went as `steps` say.

    Nodes stand best first, so the first n are the tree of n nodes, and of an accepted path the part counts that lies in it.
    """
    if option == PLAINLY:
        return Trial(1.0, [(0, 1)])
    kept = [_inside(step, option) for step in steps]
    paths = [
        list(takewhile(set(nodes).__contains__, step.path[: option.depth]))
        for step, nodes in zip(steps, kept, strict=True)
    ]
    shapes = [(_levels(step, nodes, option), 1 + len(nodes)) for step, nodes in zip(steps, kept, strict=True)]
    return Trial(1.0 + mean(map(len, paths)), shapes)


def _inside(step: Step, option: Option) -> list[int]:
    """The nodes of a round that would have stood in the smaller tree."""
    if not step.odds:
        return list(range(1, option.nodes))
    floor = floor_of(option.least)
    fit = [node for node, (depth, odds) in enumerate(step.odds, 1) if depth <= option.depth and odds >= floor]
    return fit[: option.nodes - 1]


def _levels(step: Step, kept: Sequence[int], option: Option) -> int:
    """How many levels would have been drafted: as `models.growth.barren` stops."""
    if not step.odds:
        return option.depth
    full = len(kept) == option.nodes - 1
    floor = max(floor_of(option.least), step.odds[kept[-1] - 1][1] if full else -math.inf)
    return 1 + len({depth for depth, odds in step.odds if depth < option.depth and odds > floor})


def options(depths: Mapping[str, int], sizes: Iterable[int], ranked: Iterable[str]) -> list[Option]:
    """Proposing nothing, chains of every length and trees of every size and depth; those `ranked` by what the drafter
    says of a path also with every floor.
    """
    shapes = [(CHAIN, depth + 1, depth) for depth in range(1, depths.get(CHAIN, 0) + 1)]
    trees = [kind for kind in depths if kind != CHAIN]
    shapes += [(kind, n, d) for kind in trees for n in sizes for d in range(1, depths[kind] + 1) if n > d]
    floors = {kind: FLOORS if kind in set(ranked) else FLOORS[:1] for kind in depths}
    return [PLAINLY, *(Option(*shape, floor) for shape in shapes for floor in floors[shape[0]])]


def choose_at(point: Point, trials: Mapping[Option, Trial]) -> Choice:
    """The option with most tokens a second; plain decoding where nothing beats it."""
    plain = point.round(PLAINLY, trials[PLAINLY])
    took = {option: point.round(option, each) for option, each in trials.items()}
    pays = {option: each.tau * plain / took[option] for option, each in trials.items()}
    best = max(trials, key=lambda option: (pays[option], -option.nodes))
    tau = trials[best].tau
    return Choice(point.rows, point.context, best, tau, pays[best], 1000 * point.rows * tau / took[best])


def sentence(choice: Choice) -> str:
    """The choice in words."""
    where = f"batch {choice.rows}, context {choice.context}"
    if choice.option.kind == PLAIN:
        return f"{where}: nothing pays, decode plainly ({choice.tokens_per_second:.1f} tokens/s)"
    option = choice.option
    name = "chain" if option.kind == CHAIN else f"{option.kind} tree"
    shape = f"a {name} of {option.nodes} nodes, {option.depth} deep"
    if option.least:
        shape += f", of paths with at least {option.least:g}"
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


def measured(conf: str, holds_for: Mapping[str, Any]) -> tuple[str, list[Point]]:
    """The processor, and what everything cost there, if that was tuned for `conf` with what `holds_for` names; else nothing."""
    try:
        told = json.loads(place_of(conf).read_text())
        known = told["holds_for"] if told["version"] == VERSION else {}
        if any(known.get(name) != value for name, value in json.loads(json.dumps(holds_for)).items()):
            return "", []
        return known["processor"], [Point(**{**each, "verify": Cost(**each["verify"])}) for each in told["points"]]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return "", []


def chain_lengths(points: Sequence[Point], rates: Sequence[float]) -> list[tuple[int, int, int]]:
    """Runs of batch sizes from first to last, and how long a chain pays most there; 0: plain decoding does.

    `rates` are the acceptance by depth. A batch size that was not measured goes with the next smaller one that was, at the
    middle of the contexts.
    """
    contexts = sorted({point.context for point in points})
    chosen = sorted(
        (point for point in points if point.context == contexts[len(contexts) // 2]), key=lambda point: point.rows
    )
    runs: list[tuple[int, int, int]] = []
    for number, point in enumerate(chosen):
        trials, reached = {PLAINLY: Trial(1.0, [(0, 1)])}, list(accumulate(rates, operator.mul))
        for depth in range(1, min(len(rates), len(point.draft.get(CHAIN, []))) + 1):
            trials[Option(CHAIN, depth + 1, depth)] = Trial(1.0 + sum(reached[:depth]), [(depth, depth + 1)])
        length = choose_at(point, trials).option.depth
        last = chosen[number + 1].rows - 1 if number + 1 < len(chosen) else point.rows
        same = runs and runs[-1][2] == length
        first = runs.pop()[0] if same else runs[-1][1] + 1 if runs else 1
        runs.append((first, last, length))
    return runs


def _apart(one: int, other: int) -> float:
    return abs(math.log(one / other))
