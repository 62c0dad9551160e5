"""What is counted, and how: every figure of a report is defined here once, from what rounds did to rows.

Both arms are counted the same way: tokens after the end token or beyond the limit do not exist, the first token comes
from reading the prompt and belongs to no round, and seconds are those of the rounds.
S samples: prompts, or as many as were decoded side by side.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.engine import PHASES, Run, Step

DRAWS = 2000  # bootstrap resamples


@dataclass
class Sample:
    """One prompt, or as many as are decoded side by side, by both arms one after the other."""

    bench: str
    drafted: Run
    plain: Run
    prompts: list[list[int]] = field(default_factory=list)  # what was asked
    start: int = 0  # number of the first prompt in its benchmark

    def texts(self) -> list[tuple[list[int], list[int]]]:
        """What each prompt was answered with the drafter, and without."""
        pairs = zip(self.drafted.generations, self.plain.generations, strict=True)
        return [(ours.tokens, plain.tokens) for ours, plain in pairs]


@dataclass
class Figure:
    """A value with its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


class Tally(NamedTuple):
    """What samples amount to: every field is [..., S], so that sums over the last dimension pool them."""

    tokens: Tensor  # committed in rounds
    passes: Tensor  # of the target over one row's tree
    prompts: Tensor
    seconds: Tensor
    prefill: Tensor
    plain_tokens: Tensor
    plain_seconds: Tensor
    plain_prefill: Tensor
    taus: Tensor  # sum of the prompts' own tau
    counted: Tensor  # prompts that had rounds at all

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Tally":
        """The tally of `samples`, in their order."""
        rows = [_row(sample) for sample in samples]
        return cls(*torch.tensor(rows, dtype=torch.float64).T)

    def take(self, index: Tensor) -> "Tally":
        """The samples that `index` [..., S] names."""
        return Tally(*(column[index] for column in self))


def _row(sample: Sample) -> list[float]:
    ours, plain = sample.drafted, sample.plain
    written = [one.committed for one in ours.generations if one.steps]
    return [
        tokens_of(ours),
        sum(map(len, written)),
        len(ours.generations),
        seconds_of(ours),
        ours.prefill,
        tokens_of(plain),
        seconds_of(plain),
        plain.prefill,
        sum(sum(committed) / len(committed) for committed in written),
        len(written),
    ]


def tokens_of(run: Run) -> int:
    """Tokens committed in rounds."""
    return sum(sum(generation.committed) for generation in run.generations)


def seconds_of(run: Run) -> float:
    """What the rounds took."""
    return sum(run.seconds.values())


def round_ms(runs: Sequence[Run]) -> dict[str, float]:
    """Mean milliseconds of a round by phase."""
    count = max(sum(run.rounds for run in runs), 1)
    spent = [run.seconds for run in runs]
    return {phase: 1000 * sum(seconds[phase] for seconds in spent) / count for phase in PHASES}


def tau(tally: Tally) -> Tensor:
    """Tokens committed per pass of the target, the bonus token included: plain decoding has 1."""
    return tally.tokens.sum(-1) / tally.passes.sum(-1)


def tau_per_prompt(tally: Tally) -> Tensor:
    """Mean over prompts of each prompt's own tau: long answers weigh no more than short ones."""
    return tally.taus.sum(-1) / tally.counted.sum(-1)


def speed(tally: Tally) -> Tensor:
    """Total tokens over total seconds of the rounds."""
    return tally.tokens.sum(-1) / tally.seconds.sum(-1)


def plain_speed(tally: Tally) -> Tensor:
    """The same for plain decoding."""
    return tally.plain_tokens.sum(-1) / tally.plain_seconds.sum(-1)


def speedup(tally: Tally) -> Tensor:
    """Total tokens over total time, relative to plain decoding."""
    return speed(tally) / plain_speed(tally)


def speedup_with_prompts(tally: Tally) -> Tensor:
    """The same with the time and the first token of reading prompts in both arms."""
    ours = (tally.tokens + tally.prompts).sum(-1) / (tally.seconds + tally.prefill).sum(-1)
    plain = (tally.plain_tokens + tally.prompts).sum(-1) / (tally.plain_seconds + tally.plain_prefill).sum(-1)
    return ours / plain


def speedup_per_prompt(tally: Tally) -> Tensor:
    """Mean over prompts of each prompt's own speed-up; prompts decoded side by side share their batch's."""
    ratio = (tally.tokens / tally.seconds) / (tally.plain_tokens / tally.plain_seconds)
    told = tally.counted * ~ratio.isnan()
    return (ratio.nan_to_num(0.0) * told).sum(-1) / told.sum(-1)


def bootstrap(tally: Tally, measure: Callable[[Tally], Tensor], over: Tally | None = None) -> Figure:
    """`measure` with a 95 % interval from resampling prompts; both arms of a prompt stay together.

    With the tally `over` of the same prompts by another drafter it is the ratio to that one's, paired prompt by prompt.
    """

    def measured(index: Tensor) -> Tensor:
        found = measure(tally.take(index))
        return found if over is None else found / measure(over.take(index))

    count = len(tally.tokens)
    index = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = measured(index).nanquantile(bounds).tolist()
    value = measured(torch.arange(count)).item()
    return Figure(value, low, high) if count > 1 else Figure(value, value, value)


def steps_of(runs: Sequence[Run]) -> list[Step]:
    """Every round of every row."""
    return [step for run in runs for generation in run.generations for step in generation.steps]


@dataclass
class Depth:
    """How guesses at one depth fared."""

    depth: int
    tried: int  # rounds accepted down to the depth before that had a guess here which could still count
    alpha: float  # share of those in which one was accepted: conditional on the depths before
    joint: float  # share of all rounds that were accepted down to here
    reach: (
        float  # share of the rounds accepted down to the depth before, with text left to write, that had a guess here
    )


def depths(steps: Sequence[Step]) -> list[Depth]:
    """Acceptance by depth, down to the deepest guess that could count."""
    deepest = max((step.offered for step in steps), default=0)
    return [_depth(steps, depth) for depth in range(1, deepest + 1)]


def _depth(steps: Sequence[Step], depth: int) -> Depth:
    tried = sum(step.offered >= depth for step in steps)
    hits = sum(len(step.path) >= depth for step in steps)
    # where the text ended with a guess, before the bonus token, whether a guess followed is not known
    arrived = sum(len(step.path) >= depth - 1 and step.committed >= depth for step in steps)
    return Depth(depth, tried, hits / tried, hits / len(steps), tried / arrived)


def by_node(steps: Sequence[Step]) -> list[int]:
    """How often tree node 1, 2, ... was accepted."""
    hits = Counter(node for step in steps for node in step.path)
    widest = max(max((step.nodes, *step.path), default=0) for step in steps) if steps else 0
    return [hits[node] for node in range(1, widest + 1)]


def counters(steps: Sequence[Step]) -> dict[str, Any]:
    """What vLLM's spec_decode metrics count, under its names.

    A draft is one row's proposal in one round, counted where it proposes anything; accepted tokens leave out the bonus
    token; position k of the last is how many drafts were accepted down to depth k. A tree's draft tokens are its nodes
    without the root (vLLM drafts chains). Tokens cut off by the end of the text are not counted as accepted.
    """
    deepest = max((step.offered for step in steps), default=0)
    return {
        "num_drafts": sum(step.nodes > 0 for step in steps),
        "num_draft_tokens": sum(step.nodes for step in steps),
        "num_accepted_tokens": sum(len(step.path) for step in steps),
        "num_accepted_tokens_per_pos": [
            sum(len(step.path) >= depth for step in steps) for depth in range(1, deepest + 1)
        ],
    }


def looped(written: Sequence[Sequence[int]]) -> float:
    """Share of 8-grams that stood earlier in the same text: a target that repeats itself flatters every drafter."""
    grams = [[tuple(tokens[at : at + 8]) for at in range(len(tokens) - 7)] for tokens in written]
    total = sum(map(len, grams))
    return 1 - sum(len(set(row)) for row in grams) / total if total else 0.0
