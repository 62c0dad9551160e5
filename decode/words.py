"""What a report says, in words and in rows: the same for the terminal, the page and the README."""

import math
from collections.abc import Mapping
from typing import Any

Told = dict[str, Any]  # a report as its JSON holds it
ABSENT = "-"
HARDWARE = ("cpu", "cores", "threads", "torch")


def real(value: float | None) -> float:
    """A figure for computing with: one that could not be measured is not a number."""
    return math.nan if value is None else value


def known(value: float | None) -> bool:
    return math.isfinite(real(value))


def number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if known(value) else ABSENT


def interval(figure: Told) -> str:
    return f"{number(figure['low'])}-{number(figure['high'])}"


def figure(value: Told) -> str:
    """A value with its 95 % interval."""
    return f"{number(value['value'])} ({interval(value)})"


def signed_share(value: float | None) -> str:
    return f"{value:+.0%}" if known(value) else ABSENT


def pooled(report: Told) -> Told:
    """The line over all sets."""
    return dict(report["lines"][-1])


def sets_of(reports: Mapping[str, Told]) -> list[str]:
    """The sets of all reports, pooled last."""
    benches = dict.fromkeys(line["bench"] for report in reports.values() for line in report["lines"])
    return [bench for bench in benches if bench != "all"] + ["all"] * ("all" in benches)


def line_for(report: Told, bench: str) -> Told | None:
    return next((line for line in report["lines"] if line["bench"] == bench), None)


def lossless(report: Told) -> bool:
    return bool(report["settings"]["accept"] == "lossless")


def marked(reports: Mapping[str, Told]) -> dict[str, Told]:
    """`reports` under names that say which of them change the output."""
    return {name if lossless(report) else f"{name} (lossy)": report for name, report in reports.items()}


def best_of(reports: Mapping[str, Told]) -> str:
    """The name of the fastest drafter; one that changes the output counts only where all do."""
    fair = [name for name, report in reports.items() if lossless(report)] or list(reports)
    speeds = {name: real(pooled(reports[name])["speedup"]["value"]) for name in fair}
    return max(fair, key=lambda name: speeds[name] if known(speeds[name]) else -math.inf)


def verdict(name: str, report: Told) -> str:
    """Whether a drafter is worth having, as far as the interval allows."""
    speed = pooled(report)["speedup"]
    if not known(speed["value"]):
        return f"{name}: nothing was decoded that could be timed"
    if real(speed["low"]) > 1:
        return f"{name} is {number(speed['value'])} times as fast as plain decoding"
    if real(speed["high"]) < 1:
        return f"{name} is slower than plain decoding: {number(speed['value'])} times as fast"
    return f"{name}: no certain gain over plain decoding, {figure(speed)} times as fast"


def output(report: Told) -> str:
    """Whether the text is still the target's, in a sentence."""
    line = pooled(report)
    alike = f"{line['equal']} of {line['prompts']}" if line["equal"] < line["prompts"] else f"all {line['prompts']}"
    equal = f"{alike} outputs are plain decoding's, token for token"
    if not lossless(report):
        return f"Lossy: {report['settings']['accept']} acceptance changes what the target would write; {equal}."
    if report["settings"]["temperature"] > 0:
        return "Lossless: every token is drawn from the target's own distribution, so outputs differ only by chance."
    if line["equal"] == line["prompts"]:
        return f"Lossless: {equal}."
    gap = widest_gap(report)
    apart = f"at most {gap:.4g} apart: " if gap is not None else "apart by an unknown gap: "
    return f"Lossless by its rule; {equal}. Where the others part, the target's two best logits are {apart}near 0 that is rounding, else a fault."


def widest_gap(report: Told) -> float | None:
    """How far apart the target's two best logits were where an output left plain decoding's, at most."""
    return max((each["gap"] for each in report.get("divergences") or []), default=None)


def sampling(settings: Told) -> str:
    if not settings["temperature"]:
        return "greedy"
    cuts = [f"top-k {settings['top_k']}"] * bool(settings["top_k"])
    cuts += [f"top-p {settings['top_p']:g}"] * (settings["top_p"] < 1)
    return ", ".join([f"temperature {settings['temperature']:g}", *cuts])


def hardware(settings: Told) -> str:
    threads = f"{settings['threads']} thread{'s' * (settings['threads'] != 1)}"
    return f"{settings['cpu'] or 'an unnamed CPU'}, {threads} on {settings['cores']} cores, torch {settings['torch']}"


def conditions(report: Told) -> str:
    """What the figures were taken with and when, in one sentence."""
    how, line = report["settings"], pooled(report)
    asked = [each["bench"] for each in report["lines"] if each["bench"] != "all"]
    return (
        f"{how['target']} in {how['dtype']}{', layers compiled,' * how['compiled']} on {hardware(how)}; {line['prompts']} prompts of {', '.join(asked)}, up to "
        f"{how['tokens']} new tokens, {sampling(how)}, batch {how['rows']}; {how['taken'][:10]}"
    )


def plain_speed(reports: Mapping[str, Told]) -> str:
    """Plain decoding's tokens per second; from the least to the most where it was measured more than once."""
    speeds = sorted(real(pooled(report)["plain_tokens_per_second"]) for report in reports.values())
    return "-".join(dict.fromkeys((number(speeds[0], 1), number(speeds[-1], 1))))


def grid(reports: Mapping[str, Told]) -> list[list[str]]:
    """Plain decoding and every drafter in one table, its headings first."""
    benches = sets_of(reports)
    benches = benches[-1:] + benches[:-1]  # what is pooled stands first
    rows = [["", "speed-up", "95 %", "tok/s", "equal", *(f"tau {bench}" for bench in benches)]]
    rows.append(["plain", "1.00", "", plain_speed(reports), "", *("1.00" for _ in benches)])
    for name, report in reports.items():
        last = pooled(report)
        lines = [line_for(report, bench) for bench in benches]
        speed = (number(last["speedup"]["value"]), interval(last["speedup"]), number(last["tokens_per_second"], 1))
        taus = (number(line["tau"]["value"]) if line else ABSENT for line in lines)
        rows.append([name, *speed, f"{last['equal']}/{last['prompts']}", *taus])
    over = [pooled(report).get("tau_over_first") for report in reports.values()]
    if any(over):
        column = ["tau over first", "", *(figure(one) if one else "" for one in over)]
        rows = [[*row, cell] for row, cell in zip(rows, column, strict=True)]
    return rows
