"""python -m decode.tune conf=NAME: measure what trees cost on this machine, and choose the one that pays most.

Acceptance is measured once, on a chain and on the largest tree; costs at every batch size and context. Both together
say what any smaller proposal would bring. `decode.tree=tuned` then decodes as was chosen.
"""

from dataclasses import replace
from statistics import median

import torch
from rich.console import Console

from conf import command
from conf.schema import Run
from decode.arms import Arm, arms_of, holds_for, require_least
from decode.choice import CHAIN, DYNAMIC, STATIC, Point, choose_at, keep, options, sentence, trial
from decode.cost import Ladder, sizes
from decode.engine import Clock, generate
from decode.figures import round_ms, steps_of
from decode.opening import open_drafter, open_target, open_tokenizer
from decode.prompts import choose
from models.drafter import Budget, Committed, Drafter
from models.sampling import Voice
from models.target import Target

REPEATS = 5
COMMITTED = 2  # tokens that a round adds, about: what a drafter reads before it guesses


def tune(run: Run) -> None:
    """Measure, choose, and keep both for `decode.tree=tuned`."""
    console, how = Console(), run.tune
    check(run)
    arm = arms_of(replace(run, decode=replace(run.decode, tree="auto", beside=[])))[0]
    prompts = [
        dialogue.prompt()
        for dialogues in choose(
            run.decode.bench, open_tokenizer(run.target), how.prompts, run.decode.longest, 1
        ).values()
        for dialogue in dialogues
    ]
    target = open_target(run.target)
    if max(how.contexts) + how.nodes > target.context:
        raise ValueError(
            f"tune.contexts={how.contexts} and a tree of {how.nodes} exceed the {target.context} tokens of {run.target.name}; name shorter ones"
        )
    drafter = open_drafter(arm.folder, arm.card, target)
    budgets = budgets_of(run, arm)
    depths = {kind: budget.levels for kind, budget in budgets.items()}
    runs = {
        kind: [generate(target, drafter, [prompt], how.tokens, budget) for prompt in prompts]
        for kind, budget in budgets.items()
    }
    steps = {kind: steps_of(each) for kind, each in runs.items()}
    ranked = [kind for kind, each in steps.items() if any(step.odds for step in each)]
    spent = round_ms([each for some in runs.values() for each in some])
    tried = options(depths, [size for size in sizes(how.nodes) if size <= how.nodes], ranked)
    trials = {option: trial(steps.get(option.kind, []), option) for option in tried}
    points = [
        point_at(target, drafter, budgets, rows, context, how.nodes, spent["accept"] + spent["keep"])
        for context in how.contexts
        for rows in how.rows
    ]
    choices = [choose_at(point, trials) for point in points]
    for point, choice in zip(points, choices, strict=True):
        console.print(curve(point), markup=False)
        console.print(sentence(choice), markup=False)
    console.print(f"written to {keep(run.conf_name, holds_for(run, arm), points, choices)}", soft_wrap=True)


def check(run: Run) -> None:
    """Raise ValueError for what cannot be tried."""
    require_least("tune", run.tune, {"rows": 1, "contexts": 1, "nodes": 2, "prompts": 1, "tokens": 2})
    if run.decode.temperature:
        raise ValueError("decode.tune measures greedy acceptance; leave decode.temperature at 0")


def budgets_of(run: Run, arm: Arm) -> dict[str, Budget]:
    """The largest proposal of each kind that is tried: a chain, which ends where the drafter knows no further, a dynamic
    tree, and the drafter's recommended one, cut to size, where it has one.
    """
    how, largest = run.decode, run.tune.nodes
    depth = min(how.depth, largest - 1)
    kinds = {CHAIN: Budget.chain(depth), DYNAMIC: Budget((), largest, depth, how.branch)}
    if paths := tuple(tuple(path) for path in arm.card.tree[: largest - 1]):
        kinds[STATIC] = Budget(paths, len(paths) + 1, max(map(len, paths)))
    return kinds


def cut(budget: Budget, depth: int) -> Budget:
    """`budget` with its first `depth` levels, and room for all that is drafted, so that none of them is left out."""
    if not budget.paths:
        return replace(budget, depth=depth, nodes=1 + budget.branch + (depth - 1) * budget.branch**2)
    return replace(budget, paths=tuple(path for path in budget.paths if len(path) <= depth), depth=depth)


def point_at(
    target: Target, drafter: Drafter, budgets: dict[str, Budget], rows: int, context: int, nodes: int, other: float
) -> Point:
    """What a pass of the target and a draft of every depth cost with `rows` rows of `context` tokens."""
    ladder = Ladder(target, rows, context, nodes)
    drafting = Drafting(target, drafter, rows, context)
    draft = {kind: drafting.by_depth(budget) for kind, budget in budgets.items()}
    return Point(rows, context, ladder.cost(), draft, other)


class Drafting:
    """Times proposals after a context of random tokens, as a round asks for them."""

    def __init__(self, target: Target, drafter: Drafter, rows: int, context: int):
        target.tap(drafter.taps)
        ids = torch.randint(target.config.vocab_size, (rows, context), generator=torch.Generator().manual_seed(0))
        lengths = torch.full((rows,), context)
        reading = target.prefill(ids, lengths, target.cache(rows, context))
        self.drafter, self.clock = drafter, Clock(target.device)
        self.state = drafter.begin(rows, 2 * context + 256)
        ids, fresh = ids.to(target.device), torch.ones(rows, dtype=torch.bool, device=target.device)
        self.prompt = Committed(ids, lengths.to(target.device), reading.features, reading.hidden, ids[:, 0], fresh)
        few = min(COMMITTED, context)
        self.step = Committed(
            ids[:, :few],
            torch.full_like(self.prompt.length, few),
            reading.features[:, :few],
            reading.hidden[:, :few],
            ids[:, 0],
            ~fresh,
        )

    def by_depth(self, budget: Budget) -> list[float]:
        """Milliseconds of drafting 1, 2, ... levels of `budget`."""
        return [self.ms(cut(budget, depth)) for depth in range(1, budget.levels + 1)]

    def ms(self, budget: Budget) -> float:
        """Median milliseconds of a proposal within `budget`; the first reads the context and is not counted."""
        self.drafter.propose(self.prompt, self.state, budget, Voice())
        taken = []
        for _ in range(REPEATS):
            self.clock.lap()
            self.drafter.propose(self.step, self.state, budget, Voice())
            taken.append(1000 * self.clock.lap())
        return median(taken)


def curve(point: Point) -> str:
    """What was measured, on two lines."""
    verify = ", ".join(f"{n}: {ms:.0f}" for n, ms in zip(point.verify.nodes, point.verify.ms, strict=True))
    draft = "; ".join(f"{kind} {', '.join(f'{ms:.1f}' for ms in some)}" for kind, some in point.draft.items())
    return f"ms of reading n nodes: {verify}\nms of drafting 1, 2, ... levels: {draft}; the rest of a round {point.other:.1f}"


main = command("decode.tune:tune")

if __name__ == "__main__":
    main()
