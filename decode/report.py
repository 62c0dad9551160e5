"""What a measurement says: tau, acceptance by depth, tokens per second, speed-up, where a round's time went.

Both arms are counted the same way: tokens after the end token or beyond the limit do not exist, the first token comes
from reading the prompt and belongs to no round, and seconds are those of the rounds.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from decode.engine import PHASES, Run

DRAWS = 2000  # bootstrap resamples


@dataclass
class Sample:
    """One prompt, or as many as are decoded side by side, by both arms one after the other."""

    bench: str
    drafted: Run
    plain: Run


@dataclass
class Figure:
    """A value with its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass
class Line:
    """One benchmark, or all pooled."""

    bench: str
    prompts: int
    tokens: int
    rounds: int
    tau: Figure  # tokens committed in rounds / rounds
    speedup: Figure  # tokens per second over plain decoding's
    speedup_with_prompts: float  # the same with the time of reading prompts in both arms
    plain_tokens_per_second: float
    tokens_per_second: float
    equal: int  # outputs that are plain decoding's, token for token
    looped: float  # share of the target's own text that repeats an earlier 8-gram


@dataclass
class Report:
    """A measurement and what it was taken with."""

    lines: list[Line]  # pooled last
    alpha: list[float]  # accepted at depth k, of those tried that were accepted down to k - 1
    tried: list[int]
    round_ms: dict[str, float]
    plain_round_ms: float
    settings: dict[str, Any]

    @classmethod
    def of(cls, samples: Sequence[Sample], settings: dict[str, Any]) -> "Report":
        """The report of all samples."""
        benches = list(dict.fromkeys(sample.bench for sample in samples))
        lines = [line_of(bench, [sample for sample in samples if sample.bench == bench]) for bench in benches]
        if len(benches) > 1:
            lines.append(line_of("all", samples))
        runs = [sample.drafted for sample in samples]
        tried, alpha = alpha_by_depth(runs)
        count = sum(run.rounds for run in runs)
        round_ms = {phase: 1000 * sum(run.seconds[phase] for run in runs) / max(count, 1) for phase in PHASES}
        plain = (
            1000
            * sum(seconds_of(sample.plain) for sample in samples)
            / max(sum(sample.plain.rounds for sample in samples), 1)
        )
        return cls(lines, alpha, tried, round_ms, plain, settings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"version": 1, **asdict(self)}

    def show(self, console: Console) -> None:
        """Print the tables, within 80 columns."""
        shown = ("target", "dtype", "tokens", "nodes", "temperature", "threads")
        console.print(f"\n{self.settings['drafter']} against plain decoding", style="bold")
        console.print(" ".join(f"{key}={self.settings[key]}" for key in shown))
        table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        headings = ("set", "tau", "speed-up", "plain\ntok/s", "drafted\ntok/s", "equal", "looped")
        for heading in headings:
            name = heading == "set"  # may be long, and then takes several lines rather than the figures' room
            table.add_column(heading, justify="left" if name else "right", no_wrap=not name, overflow="fold")
        for line in self.lines:
            figures = (str(line.tau), str(line.speedup))
            speeds = (f"{line.plain_tokens_per_second:.1f}", f"{line.tokens_per_second:.1f}")
            counts = (f"{line.equal}/{line.prompts}", f"{line.looped:.0%}")
            table.add_row(line.bench, *figures, *speeds, *counts, style="bold" if line.bench == "all" else None)
        console.print(table)
        depths = enumerate(zip(self.alpha, self.tried, strict=True), 1)
        console.print("alpha by depth   " + "  ".join(f"{k}: {value:.2f} (n={n})" for k, (value, n) in depths))
        spent = "  ".join(f"{phase} {ms:.1f}" for phase, ms in self.round_ms.items())
        console.print(f"ms of a round    {spent}  together {sum(self.round_ms.values()):.1f}")
        console.print(f"ms of a plain one  {self.plain_round_ms:.1f}")


def compare(console: Console, reports: Sequence[Report]) -> None:
    """Print one table of plain decoding and every drafter, all measured prompt by prompt in one run."""
    benches = [line.bench for line in reports[0].lines]
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in (*(f"tau\n{bench}" for bench in benches), "speed-up", "tok/s", "equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = f"{reports[0].lines[-1].plain_tokens_per_second:.1f}"
    table.add_row("plain", *("1.00" for _ in benches), "1.00", plain, "")
    for report in reports:
        last = report.lines[-1]
        taus = (f"{line.tau.value:.2f}" for line in report.lines)
        figures = (f"{last.speedup.value:.2f}", f"{last.tokens_per_second:.1f}", f"{last.equal}/{last.prompts}")
        table.add_row(report.settings["drafter"], *taus, *figures)
    console.print(table)


def line_of(bench: str, samples: Sequence[Sample]) -> Line:
    """The figures of `samples`."""
    return Line(
        bench,
        sum(len(sample.drafted.generations) for sample in samples),
        sum(tokens_of(sample.drafted) for sample in samples),
        sum(sample.drafted.rounds for sample in samples),
        bootstrap(samples, tau),
        bootstrap(samples, speedup),
        speedup(samples, prompts=True),
        speed([sample.plain for sample in samples]),
        speed([sample.drafted for sample in samples]),
        sum(
            ours == theirs
            for sample in samples
            for ours, theirs in zip(texts(sample.drafted), texts(sample.plain), strict=True)
        ),
        looped([tokens for sample in samples for tokens in texts(sample.plain)]),
    )


def tokens_of(run: Run) -> int:
    """Tokens committed in rounds."""
    return sum(sum(generation.committed) for generation in run.generations)


def seconds_of(run: Run) -> float:
    return sum(run.seconds.values())


def texts(run: Run) -> list[list[int]]:
    return [generation.tokens for generation in run.generations]


def speed(runs: Sequence[Run], prompts: bool = False) -> float:
    """Tokens per second over the rounds of `runs`, or over prompts and rounds."""
    seconds = sum(seconds_of(run) + prompts * run.prefill for run in runs)
    tokens = sum(tokens_of(run) + prompts * len(run.generations) for run in runs)
    return tokens / seconds if seconds else float("nan")


def tau(samples: Sequence[Sample]) -> float:
    """Tokens committed per pass of the target, the bonus token included: plain decoding has 1."""
    passes = sum(len(generation.committed) for sample in samples for generation in sample.drafted.generations)
    return sum(tokens_of(sample.drafted) for sample in samples) / passes if passes else float("nan")


def speedup(samples: Sequence[Sample], prompts: bool = False) -> float:
    """Total tokens over total time, relative to plain decoding."""
    return speed([sample.drafted for sample in samples], prompts) / speed([sample.plain for sample in samples], prompts)


def bootstrap(samples: Sequence[Sample], measure: Callable[[Sequence[Sample]], float]) -> Figure:
    """`measure` with a 95 % interval from resampling prompts; both arms of a prompt stay together."""
    rng = random.Random(0)
    drawn = sorted(measure(rng.choices(samples, k=len(samples))) for _ in range(DRAWS if len(samples) > 1 else 1))
    return Figure(measure(samples), drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))])


def alpha_by_depth(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """For each depth, rounds in which a guess there could count, and the share of them in which it did."""
    pairs = [
        pair
        for run in runs
        for generation in run.generations
        for pair in zip(generation.accepted, generation.offered, strict=True)
    ]
    deepest = max((offered for _, offered in pairs), default=0)
    tried = [sum(offered >= depth for _, offered in pairs) for depth in range(1, deepest + 1)]
    hits = [sum(accepted >= depth for accepted, _ in pairs) for depth in range(1, deepest + 1)]
    return tried, [hit / count for hit, count in zip(hits, tried, strict=True)]


def looped(written: Sequence[Sequence[int]]) -> float:
    """Share of 8-grams that stood earlier in the same text: a target that repeats itself flatters every drafter."""
    grams = [[tuple(tokens[at : at + 8]) for at in range(len(tokens) - 7)] for tokens in written]
    total = sum(map(len, grams))
    return 1 - sum(len(set(row)) for row in grams) / total if total else 0.0
