"""python -m decode.regimes conf=NAME: where speculation pays on this machine and where it stops, measured and foretold.

Speed-up against batch, context, draft length and tree size. At every point both arms decode the same prompts in turn, and
count while all rows of a batch write. Beside it stands what the machine's costs, timed in isolation, make of the rounds
recorded at batch 1.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path

from rich.console import Console

from conf import command
from conf.schema import Run
from decode.arms import Arm, arms_of, holds_for, require_least
from decode.choice import CHAIN, DYNAMIC, PLAINLY, STATIC, Option, Point, trial
from decode.cost import Cost, Ladder
from decode.engine import Run as Decoded
from decode.engine import generate
from decode.figures import Figure, Sample, Tally, bootstrap, round_ms, speedup, steps_of, tau
from decode.measure import in_turn
from decode.opening import open_drafter, open_target, open_tokenizer
from decode.progress import tracked
from decode.prompts import choose, evenly
from decode.regimes_page import write_page
from decode.tune import Drafting
from models.drafter import Budget, Drafter, Plain
from models.files import write_whole
from models.shelf import make_folder
from models.target import Target

KNEE = 128  # nodes up to which a pass is timed, to see where it stops costing what one node costs


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    rows: int
    context: int  # tokens of every prompt
    kind: str
    budget: Budget

    @property
    def option(self) -> Option:
        """Its proposal as decode.choice names it."""
        return Option(self.kind, self.budget.nodes, self.budget.levels, self.budget.least)


@dataclass
class Spot:
    """What one setting was worth; `at` is what its sweep varies."""

    at: int
    tau: float
    speedup: Figure
    foretold: float


@dataclass
class Regimes:
    """Every sweep's spots by what it varies, and what a pass over n nodes costs."""

    sweeps: dict[str, list[Spot]]
    cost: Cost

    def crossings(self) -> dict[str, float | None]:
        """For each sweep where the measured speed-up falls below 1, if it does."""
        return {
            name: crossing([(spot.at, spot.speedup.value) for spot in spots]) for name, spots in self.sweeps.items()
        }


def regimes(run: Run) -> Regimes:
    """Measure every sweep, print it, and write the figures and a page of pictures."""
    console, how = Console(), run.regimes
    check(run)
    arm = arms_of(replace(run, decode=replace(run.decode, beside=[])))[0]
    prompts = {context: prompts_of(run, context) for context in how.contexts}
    target = open_target(run.target)
    if (longest := max(how.contexts) + how.tokens + KNEE) > target.context:
        raise ValueError(
            f"regimes.contexts={how.contexts} with answers and {KNEE} nodes to time take {longest} of the {target.context} tokens of {run.target.name}; name shorter ones"
        )
    work = [(name, at, setting) for name, each in sweeps_of(run, arm).items() for at, setting in each.items()]
    widest = max(setting.budget.nodes for *_, setting in work)
    field = Field(run, target, open_drafter(arm.folder, arm.card, target), prompts, widest)
    sweeps: dict[str, list[Spot]] = {name: [] for name, _, _ in work}
    for name, at, setting in tracked(work, "measuring", console=console):
        sweeps[name].append(field.spot(at, setting))
    found = Regimes(sweeps, knee_curve(target, min(how.contexts)))
    console.print(told(found), markup=False)
    console.print(f"written to {write(run, arm, found)}", soft_wrap=True, markup=False)
    return found


def check(run: Run) -> None:
    """Raise ValueError for what cannot be measured."""
    require_least("regimes", run.regimes, {"rows": 1, "contexts": 1, "nodes": 2, "prompts": 1, "tokens": 2})
    if run.decode.temperature:
        raise ValueError("decode.regimes measures greedy decoding; leave decode.temperature at 0")


def sweeps_of(run: Run, arm: Arm) -> dict[str, dict[int, Setting]]:
    """What is tried: each sweep varies one thing and leaves the others at batch 1, the first context and the run's tree."""
    how, usual = run.regimes, min(run.regimes.contexts)
    kind = STATIC if arm.budget.paths else DYNAMIC
    deepest = min(run.decode.depth, max(how.nodes) - 1)
    chains = {depth: Budget.chain(depth) for depth in range(1, deepest + 1)}
    return {
        "batch": {rows: Setting(rows, usual, kind, arm.budget) for rows in how.rows},
        "context": {context: Setting(1, context, kind, arm.budget) for context in how.contexts},
        "guesses of a chain": {depth: Setting(1, usual, CHAIN, budget) for depth, budget in chains.items()},
        "nodes of a tree": {nodes: Setting(1, usual, kind, sized(arm, nodes)) for nodes in how.nodes},
    }


def sized(arm: Arm, nodes: int) -> Budget:
    """The drafter's tree with `nodes` nodes."""
    if not arm.budget.paths:
        return replace(arm.budget, nodes=nodes)
    best = tuple(tuple(path) for path in (arm.card.tree or arm.budget.paths)[: nodes - 1])
    return replace(arm.budget, paths=best, nodes=len(best) + 1)


def prompts_of(run: Run, context: int) -> list[list[int]]:
    """Prompts of exactly `context` tokens: questions that fit every context, each behind others, the first of which is cut."""
    count = max(run.regimes.prompts, *run.regimes.rows)
    chosen = choose(run.decode.bench, open_tokenizer(run.target), count, min(run.regimes.contexts), 1)
    every = evenly([dialogue.prompt() for dialogues in chosen.values() for dialogue in dialogues], count)
    whole = [token for prompt in every for token in prompt]
    before = whole * (context // len(whole) + 1)
    long = [[*before, *whole[:end]][-context:] for end in accumulate(map(len, every))]
    return list(islice(cycle(long), count))


class Field:
    """Decodes at one setting after the other, and keeps what several of them ask for."""

    def __init__(self, run: Run, target: Target, drafter: Drafter, prompts: Mapping[int, list[list[int]]], widest: int):
        self.how, self.target, self.drafter, self.prompts, self.widest = run.regimes, target, drafter, prompts, widest
        self.taken: dict[Setting, list[Sample]] = {}
        self.costs: dict[tuple[int, int], Cost] = {}

    def spot(self, at: int, setting: Setting) -> Spot:
        """What `setting` is worth, and what is foretold of it."""
        tally = Tally.of(self.samples(setting))
        return Spot(at, tau(tally).item(), bootstrap(tally, speedup), self.foretold(setting))

    def samples(self, setting: Setting) -> list[Sample]:
        """The prompts, as many side by side as the setting says, by both arms in turn."""
        if setting not in self.taken:
            self.taken[setting] = self._decoded(setting)
        return self.taken[setting]

    def _decoded(self, setting: Setting) -> list[Sample]:
        prompts = self.prompts[setting.context][: max(self.how.prompts, setting.rows)]
        guessers = [(Plain(), Budget(nodes=1)), (self.drafter, setting.budget)]
        decode = partial(generate, self.target, limit=self.how.tokens, rows=setting.rows)
        in_turn(partial(decode, limit=4), guessers, prompts[:1], 1)  # first calls compile and allocate
        found = []
        for number, start in enumerate(range(0, len(prompts), setting.rows)):
            batch = prompts[start : start + setting.rows]
            runs = in_turn(decode, guessers, batch, number)
            found.append(Sample("", busy(runs[1]), busy(runs[0]), batch, start))
        return found

    def foretold(self, setting: Setting) -> float:
        """Speed-up by costs in isolation and the rounds of the same proposal at batch 1 behind the shortest context."""
        runs = [sample.drafted for sample in self.samples(replace(setting, rows=1, context=min(self.prompts)))]
        spent = round_ms(runs)
        point = self.point(setting, spent["accept"] + spent["keep"])
        each = trial(steps_of(runs), setting.option)
        return each.tau * point.round(PLAINLY, trial([], PLAINLY)) / point.round(setting.option, each)

    def point(self, setting: Setting, other: float) -> Point:
        """What passes and drafts cost in a setting."""
        place = setting.rows, setting.context
        if place not in self.costs:
            self.costs[place] = Ladder(self.target, *place, self.widest).cost()
        draft = Drafting(self.target, self.drafter, *place).by_depth(setting.budget)
        return Point(*place, self.costs[place], {setting.kind: draft}, other)


def busy(run: Decoded) -> Decoded:
    """The rounds of a batch in which every row took part: later the seat of one that is done would be the next prompt's."""
    rounds = min((len(one.steps) for one in run.generations if one.steps), default=0)
    return Decoded([replace(one, steps=one.steps[:rounds]) for one in run.generations], run.turns[:rounds])


def knee_curve(target: Target, context: int) -> Cost:
    """What a pass costs from one node to many."""
    return Ladder(target, 1, context, KNEE).cost()


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Where the line through `points` (x, y) first falls below 1; None where it never does, its start where it begins below."""
    if points[0][1] < 1:
        return points[0][0]
    for (x, y), (further, lower) in pairwise(points):
        if lower < 1:
            return x + (further - x) * (y - 1) / (y - lower)
    return None


def told(found: Regimes) -> str:
    """The figures, line by line."""
    lines = []
    for name, spots in found.sweeps.items():
        lines.append(f"{name}:")
        lines += [
            f"  {spot.at:>5}: speed-up {spot.speedup}, foretold {spot.foretold:.2f}, tau {spot.tau:.2f}"
            for spot in spots
        ]
        where = found.crossings()[name]
        lines.append("  pays throughout" if where is None else f"  no longer pays from {where:.3g} on")
    return "\n".join(
        [*lines, f"the arithmetic of about {found.cost.knee():.0f} nodes takes as long as a pass over one"]
    )


def write(run: Run, arm: Arm, found: Regimes) -> Path:
    """The figures as JSON, and the page beside them."""
    out = Path(run.decode.out or Path(run.out, "regimes"))
    make_folder(out)
    settings = {**holds_for(run, arm), "tokens": run.regimes.tokens, "prompts": run.regimes.prompts}
    figures = {"settings": settings, **asdict(found), "crossings": found.crossings()}
    write_whole(out / "regimes.json", json.dumps(figures, indent=1))
    return write_page(out / "regimes.html", arm.name, figures, found.cost.knee())


main = command("decode.regimes:regimes")

if __name__ == "__main__":
    main()
