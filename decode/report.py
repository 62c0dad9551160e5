"""What a measurement says, as a table and as JSON. decode/figures.py defines the figures, decode/theory.py the forecasts."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from decode import figures
from decode.cost import Cost
from decode.explain import explain
from decode.figures import Depth, Figure, Sample, Tally, bootstrap
from decode.gather import VERSION, command
from decode.hindsight import Divergence
from decode.theory import Facts, Prediction, predictions
from models.files import write_whole


@dataclass
class Line:
    """One benchmark, or all pooled."""

    bench: str
    prompts: int
    tokens: int
    rounds: int
    tau: Figure  # tokens over passes of the target
    tau_per_prompt: Figure  # mean of the prompts' own
    speedup: Figure  # total tokens over total time, relative to plain decoding
    speedup_per_prompt: Figure  # mean of the prompts' own
    speedup_with_prompts: float  # with the time of reading prompts in both arms
    plain_tokens_per_second: float
    tokens_per_second: float
    equal: int  # outputs that are plain decoding's, token for token
    looped: float  # share of the target's own text that repeats an earlier 8-gram
    tau_over_first: Figure | None = None  # tau relative to that of the drafter this one was measured beside

    @classmethod
    def of(cls, bench: str, samples: Sequence[Sample], first: Sequence[Sample] | None = None) -> "Line":
        """The figures of `samples`, and how they compare with what the `first` drafter did after the same prompts."""
        tally = Tally.of(samples)
        pairs = [pair for sample in samples for pair in sample.texts()]
        return cls(
            bench,
            len(pairs),
            int(tally.tokens.sum()),
            sum(sample.drafted.rounds for sample in samples),
            bootstrap(tally, figures.tau),
            bootstrap(tally, figures.tau_per_prompt),
            bootstrap(tally, figures.speedup),
            bootstrap(tally, figures.speedup_per_prompt),
            figures.speedup_with_prompts(tally).item(),
            figures.plain_speed(tally).item(),
            figures.speed(tally).item(),
            sum(ours == plain for ours, plain in pairs),
            figures.looped([plain for _, plain in pairs]),
            bootstrap(tally, figures.tau, Tally.of(first)) if first else None,
        )

    @classmethod
    def read(cls, told: dict[str, Any]) -> "Line":
        """The line that `told` was written from."""
        values: dict[str, Any] = {
            key: Figure(**_known(value)) if isinstance(value, dict) else value for key, value in _known(told).items()
        }
        return cls(**{**values, "tau_over_first": values["tau_over_first"] if told.get("tau_over_first") else None})


@dataclass
class Report:
    """A measurement and what it was taken with."""

    settings: dict[str, Any]
    lines: list[Line]  # pooled last
    depths: list[Depth]
    by_node: list[int]
    counters: dict[str, Any]
    draft_acceptance_rate: float
    overlap: list[float]  # analytic acceptance by depth
    round_ms: dict[str, float]
    plain_round_ms: float
    cost: Cost
    predictions: list[Prediction]
    divergences: list[Divergence]
    explanation: list[str]
    sample: dict[str, Any]

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        settings: dict[str, Any],
        cost: Cost,
        overlap: Sequence[float] = (),
        divergences: Sequence[Divergence] = (),
        sample: dict[str, Any] | None = None,
        first: Sequence[Sample] | None = None,
    ) -> "Report":
        """The report of all samples; `first` are those of the drafter that this one was measured beside."""
        lines = lines_of(samples, first)
        facts = facts_of(samples, cost)
        counted = figures.counters(figures.steps_of([sample.drafted for sample in samples]))
        return cls(
            settings,
            lines,
            facts.depths,
            facts.by_node,
            counted,
            counted["num_accepted_tokens"] / max(counted["num_draft_tokens"], 1),
            list(overlap),
            facts.round_ms,
            facts.plain,
            cost,
            predictions(facts),
            list(divergences),
            explain(facts),
            sample or {},
        )

    @classmethod
    def read(cls, file: Path) -> "Report":
        """The report in `file`. Raises ValueError where it is none of this version."""
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no report {file}; decode/run.py writes one") from None
        except json.JSONDecodeError:
            raise ValueError(f"{file} is no report: it is no JSON; measure again with decode/run.py") from None
        version = told.pop("version", None) if isinstance(told, dict) else None
        if version != VERSION:
            raise ValueError(
                f"{file} is a report of version {version} and this is version {VERSION}; measure again with decode/run.py"
            )
        told["lines"] = [Line.read(line) for line in told["lines"]]
        told["cost"] = Cost(**told["cost"])
        for name, kind in {"depths": Depth, "predictions": Prediction, "divergences": Divergence}.items():
            told[name] = [kind(**one) for one in told[name]]
        return cls(**told)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return _told({"version": VERSION, **asdict(self)})

    @property
    def lossy(self) -> bool:
        """Whether the text may differ from the target's own."""
        return self.settings["accept"] != "lossless"

    def show(self, console: Console, explained: bool = False) -> None:
        """Print the tables, within 80 columns."""
        shown = ("target", "dtype", "compiled", "tokens", "nodes", "temperature", "threads")
        console.print(f"\n{self.settings['drafter']} against plain decoding", style="bold")
        console.print(" ".join(f"{key}={self.settings[key]}" for key in shown))
        console.print(self._results())
        console.print(self._by_depth())
        console.print(self._predicted())
        told = self.counters
        console.print(
            f"accepted guesses  {self.draft_acceptance_rate:.1%}, {told['num_accepted_tokens']} of {told['num_draft_tokens']}"
        )
        spent = "  ".join(f"{phase} {ms:.1f}" for phase, ms in self.round_ms.items())
        console.print(f"ms of a round     {spent}  all {sum(self.round_ms.values()):.1f}")
        console.print(f"ms of a plain one {self.plain_round_ms:.1f}")
        curve = zip(self.cost.nodes, self.cost.ms, strict=True)
        console.print("ms of n nodes     " + " ".join(f"{nodes}:{ms:.0f}" for nodes, ms in curve))
        if over := [f"{line.bench} {line.tau_over_first}" for line in self.lines if line.tau_over_first]:
            console.print(f"tau over {self.settings['first']}'s, prompt by prompt  {', '.join(over)}", markup=False)
        if self.divergences:
            widest = max(one.gap for one in self.divergences)
            console.print(f"outputs that differ  {len(self.divergences)}, top two logits at most {widest:.3g} apart")
        for sentence in self.explanation if explained else ():
            console.print(sentence)

    def _results(self) -> Table:
        tau = "lossy tau" if self.lossy else "tau"
        table = _table("set", tau, "speed-up", "plain\ntok/s", "drafted\ntok/s", "equal", "looped")
        for line in self.lines:
            speeds = (f"{line.plain_tokens_per_second:.1f}", f"{line.tokens_per_second:.1f}")
            counts = (f"{line.equal}/{line.prompts}", f"{line.looped:.0%}")
            style = "bold" if line.bench == "all" else None
            table.add_row(line.bench, str(line.tau), str(line.speedup), *speeds, *counts, style=style)
        return table

    def _by_depth(self) -> Table:
        table = _table("by depth", *(str(depth.depth) for depth in self.depths))
        table.add_row("tried", *(str(depth.tried) for depth in self.depths))
        table.add_row("alpha", *(f"{depth.alpha:.2f}" for depth in self.depths))
        table.add_row("joint", *(f"{depth.joint:.2f}" for depth in self.depths))
        if self.overlap:
            table.add_row("overlap", *(f"{share:.2f}" for share in self.overlap[: len(self.depths)]))
        return table

    def _predicted(self) -> Table:
        table = _table("", "measured", *(f"by {one.method}" for one in self.predictions))
        pooled = self.lines[-1]
        taus = (f"{one.tau:.2f} ({one.tau_error:+.0%})" for one in self.predictions)
        speedups = (f"{one.speedup:.2f} ({one.speedup_error:+.0%})" for one in self.predictions)
        table.add_row("lossy tau" if self.lossy else "tau", f"{pooled.tau.value:.2f}", *taus)
        table.add_row("speed-up", f"{pooled.speedup.value:.2f}", *speedups)
        return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column(first, overflow="fold")  # a set's name may be long: it takes lines rather than the figures' room
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _told(value: Any) -> Any:
    """`value` for JSON, which has no word for what could not be measured but null."""
    if isinstance(value, dict):
        return {key: _told(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_told(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _known(told: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in told.items()}


def lines_of(samples: Sequence[Sample], first: Sequence[Sample] | None = None) -> list[Line]:
    """A line for each benchmark, and one for all where there are several."""

    def of(bench: str, some: Sequence[Sample] | None) -> list[Sample]:
        return [sample for sample in some or () if sample.bench == bench]

    benches = list(dict.fromkeys(sample.bench for sample in samples))
    lines = [Line.of(bench, of(bench, samples), of(bench, first)) for bench in benches]
    return lines if len(lines) == 1 else [*lines, Line.of("all", samples, first)]


def facts_of(samples: Sequence[Sample], cost: Cost) -> Facts:
    """What forecasts and explanations go by. Raises ValueError where no round was measured."""
    drafted, plain = [sample.drafted for sample in samples], [sample.plain for sample in samples]
    steps = figures.steps_of(drafted)
    if not steps:
        raise ValueError("every text ended with its first token, so nothing was measured; choose other prompts")
    tally = Tally.of(samples)
    return Facts(
        figures.tau(tally).item(),
        figures.speedup(tally).item(),
        figures.depths(steps),
        figures.by_node(steps),
        len(steps),
        figures.round_ms(drafted),
        figures.round_ms(plain),
        [turn.width for run in drafted for turn in run.turns if turn.moved],
        cost,
    )


def write_report(report: Report, file: Path) -> None:
    """The report as JSON, written beside and renamed."""
    write_whole(file, json.dumps(report.to_json(), indent=1))


if __name__ == "__main__":
    command()  # lays reports side by side
