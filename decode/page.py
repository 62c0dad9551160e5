"""One HTML page about one or several reports: self-contained, readable in light and dark, on paper and on a phone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from decode.markup import document, fold, node, table
from decode.pictures import Dot, Series, bars, dots, legend, lines, stack
from decode.style import STYLE
from decode.words import (
    Told,
    best_of,
    conditions,
    figure,
    grid,
    interval,
    known,
    line_for,
    lossless,
    marked,
    number,
    output,
    pooled,
    real,
    sets_of,
    signed_share,
    verdict,
    widest_gap,
)
from models.files import write_whole

METHODS = {
    "alpha": "from one alpha and c",
    "rates": "from the rates by depth",
    "costs": "from the cost curve",
}
PHASES = {"draft": 4, "verify": 6, "accept": 3, "keep": 5}  # colours that the first drafters do not have
DEEPEST = 5  # depths that have a shade of their own
MEANINGS = {
    "pass": "One reading of the target. Plain decoding makes one token a pass.",
    "tau": "Tokens committed per pass of the target, its own bonus token included; plain decoding has 1. Pooled: all tokens over all passes. Reading the prompt is no pass, and tokens after the end token do not count.",
    "alpha at depth k": "Of the rounds in which the guesses down to depth k - 1 were accepted and one was offered at depth k: the share in which it was accepted. Joint: the share of all rounds that were accepted down to depth k.",
    "overlap": "The sum over the vocabulary of min(target, draft): how often a guess drawn from the drafter would be accepted, computed from both distributions on the text just written.",
    "speed-up": "Tokens per second over plain decoding's, in the same loop and on the same clock: total tokens over total time. Both arms are measured prompt by prompt, in turn.",
    "95 %": "The interval from resampling prompts with replacement; both arms of a prompt stay together.",
    "draft, verify, accept, keep": "Where a round's time goes: the drafter guesses, the target reads the guesses, a path is chosen, text and cache keep it.",
    "T(n)": "The time the target takes for n tokens in one pass, on this machine; T(n) / T(1) says what guesses cost to check.",
    "predictions": "What theory expects. From one alpha and c: one rate of acceptance at every depth, and guesses checked at no cost. From the rates by depth: each depth's own rate, and what rounds took. From the cost curve: the same, with the machine's own T(n) for the check.",
    "equal": "Outputs that are plain decoding's, token for token.",
    "lossless": "The output's distribution is the target's own. Typical acceptance is lossy: it accepts what is likely enough.",
    "divergence": "Where an output first differs from plain decoding. The gap is that of the target's two best logits there: near 0 it is a near-tie that rounding decides, else something is wrong.",
    "looped": "The share of the target's own text that repeats an earlier run of eight tokens; a target that repeats itself flatters every drafter.",
}


def page(reports: Mapping[str, Told], notes: Sequence[str] = ()) -> str:
    """The page of `reports`, each under its name; `notes` say what keeps them from being compared fairly."""
    reports = marked(reports)
    best = best_of(reports)
    several = [node("p", note, class_="note") for note in notes]
    pictures = [picture for picture in (draw(reports) for draw in PICTURES) if picture is not None]
    body = node(
        "body",
        node("header", *headline(best, reports)),
        node("main", node("h2", "Side by side"), table(grid(reports), class_="grid"), *several, meanings(),
             node("h2", "Pictures"), node("div", *pictures, class_="pictures"),
             *(drafter(name, report, at) for at, (name, report) in enumerate(reports.items()))),
        node("footer", node("p", "Written by Outrider from its report.json. The page needs nothing but itself.")),
    )  # fmt: skip
    return document(f"{reports[best]['settings']['target']}: {', '.join(reports)}", STYLE, body)


def write_page(file: Path, reports: Mapping[str, Told], notes: Sequence[str] = ()) -> Path:
    """The page in `file`, which is never seen half written."""
    return write_whole(file, page(reports, notes))


# ---- parts


def headline(name: str, reports: Mapping[str, Told]) -> list[Element]:
    """The fastest drafter's figures, and what they were taken with."""
    report = reports[name]
    line = pooled(report)
    cards = [
        ("speed-up", f"{number(line['speedup']['value'])} x", f"95 %: {interval(line['speedup'])}"),
        ("tau, tokens a pass", number(line["tau"]["value"]), f"95 %: {interval(line['tau'])}; plain decoding: 1"),
        ("equal outputs", f"{line['equal']}/{line['prompts']}", "lossless acceptance" if lossless(report) else "lossy"),
    ]
    shown = [
        node("div", node("span", what), node("strong", value), node("small", more), class_="card")
        for what, value, more in cards
    ]
    faster = [
        f"{other} is faster, {figure(pooled(told)['speedup'])}, but writes something else than the target would."
        for other, told in reports.items()
        if real(pooled(told)["speedup"]["value"]) > real(line["speedup"]["value"])
    ]
    said = [output(report), *faster]
    words = [*(node("p", sentence) for sentence in said), node("p", conditions(report) + ".", class_="quiet")]
    return [node("h1", verdict(name, report)), node("div", *shown, class_="cards"), *words]


def picture(title: str, drawn: Element, key: Element | None, says: str, rows: list[list[str]] | None = None) -> Element:
    """A figure with its heading, its legend, what it shows, and its numbers as text."""
    numbers = fold("Numbers", table(rows)) if rows else None
    return node("figure", node("figcaption", title), key, drawn, node("p", says, class_="quiet"), numbers)


def meanings() -> Element:
    words = (part for term, meaning in MEANINGS.items() for part in (node("dt", term), node("dd", meaning)))
    return fold("What the figures mean", node("dl", *words))


def shapes(reports: Mapping[str, Told], *more: tuple[str, int, str]) -> Element:
    return legend([*((name, at, "dot") for at, name in enumerate(reports)), *more])


# ---- pictures of all drafters


def by_depth(reports: Mapping[str, Told], key: str) -> dict[str, list[tuple[float, float]]]:
    found = {
        name: [(depth["depth"], depth[key]) for depth in report["depths"] if known(depth[key])]
        for name, report in reports.items()
    }
    return {name: points for name, points in found.items() if points}


def alphas(reports: Mapping[str, Told]) -> Element | None:
    """Acceptance by depth: conditional, and of all rounds."""
    sure, joint = by_depth(reports, "alpha"), by_depth(reports, "joint")
    if not sure:
        return None
    at = {name: colour for colour, name in enumerate(reports)}
    series = [Series(name, points, at[name], dashed=True) for name, points in joint.items()]
    series += [Series(name, points, at[name]) for name, points in sure.items()]
    title = "Accepted guesses, by depth"
    says = "Alpha: of the guesses tried at a depth, the share accepted. Dashed: of all rounds."
    rows = [["", "depth", "tried", "alpha", "joint"]]
    rows += [
        [name, str(depth["depth"]), str(depth["tried"]), number(depth["alpha"]), number(depth["joint"])]
        for name, report in reports.items()
        for depth in report["depths"]
    ]
    drawn = lines(title, says, series, ("depth", "share accepted"), (0, 1))
    return picture(title, drawn, shapes(reports, ("of all rounds", 0, "dashed")), says, rows)


def overlaps(reports: Mapping[str, Told]) -> Element | None:
    """The analytic acceptance by depth, of the drafters that have a distribution."""
    found = {name: report["overlap"] for name, report in reports.items() if report.get("overlap")}
    if not found:
        return None
    colours = {name: colour for colour, name in enumerate(reports)}
    series = [
        Series(name, [(depth, share) for depth, share in enumerate(shares, 1) if known(share)], colours[name])
        for name, shares in found.items()
    ]
    title = "Overlap of draft and target, by depth"
    says = "The sum of min(target, draft) over the vocabulary: how often a drawn guess would be accepted."
    rows = [["", *(f"depth {depth}" for depth in range(1, max(map(len, found.values())) + 1))]]
    rows += [[name, *map(number, shares), *("" for _ in rows[0][len(shares) + 1 :])] for name, shares in found.items()]
    drawn = lines(title, says, series, ("depth", "overlap"), (0, 1))
    return picture(title, drawn, legend([(name, colours[name], "dot") for name in found]), says, rows)


def dot(name: str, value: Told, colour: int) -> Dot:
    return Dot(name, real(value["value"]), real(value["low"]), real(value["high"]), figure(value), colour)


def by_set(reports: Mapping[str, Told], key: str) -> list[tuple[str, list[Dot]]]:
    """For each set every drafter's figure `key`."""
    groups = []
    for bench in sets_of(reports):
        found = [(at, name, line_for(report, bench)) for at, (name, report) in enumerate(reports.items())]
        group = [dot(name, line[key], at) for at, name, line in found if line]
        groups.append((bench, group))
    return groups


def taus(reports: Mapping[str, Told]) -> Element | None:
    says = "Tokens a pass of the target yields, with 95 % intervals; plain decoding has 1."
    return set_picture(reports, "tau", "Tokens a pass (tau), by set", says)


def speedups(reports: Mapping[str, Told]) -> Element | None:
    says = "Tokens per second over plain decoding's, with 95 % intervals; right of the line at 1 is faster."
    return set_picture(reports, "speedup", "Speed-up by set", says)


def set_picture(reports: Mapping[str, Told], key: str, title: str, says: str) -> Element | None:
    groups = by_set(reports, key)
    if not any(known(dot.value) for _, group in groups for dot in group):
        return None
    return picture(title, dots(title, says, groups, at_one=True), shapes(reports), says)


def times(reports: Mapping[str, Told]) -> Element | None:
    """A round's time in its parts, with a plain round's beside."""
    spent = {name: report["round_ms"] for name, report in reports.items() if report.get("round_ms")}
    if not spent:
        return None
    first = next(iter(spent))
    plain = reports[first]["plain_round_ms"]
    rows = [("a plain round", [(PHASES["verify"], plain)])]
    rows += [(name, [(at, parts[phase]) for phase, at in PHASES.items()]) for name, parts in spent.items()]
    title = "Where a round's time goes"
    says = "Milliseconds of one round of each drafter, beside a plain one, which yields a single token."
    written = [["", *PHASES, "together", "plain round"]]
    written += [
        [name, *(number(parts[phase], 1) for phase in PHASES), number(sum(parts[phase] for phase in PHASES), 1),
         number(reports[name]["plain_round_ms"], 1)]
        for name, parts in spent.items()
    ]  # fmt: skip
    key = legend([(phase, at, "block") for phase, at in PHASES.items()])
    return picture(title, stack(title, says, rows), key, says, written)


def costs(reports: Mapping[str, Told]) -> Element | None:
    """What a pass over n tokens costs on this machine; reports of one run share a curve."""
    curves: dict[str, tuple[int, Told]] = {}
    for at, (name, report) in enumerate(reports.items()):
        cost = report.get("cost") or {"nodes": []}
        if cost["nodes"] and cost not in [known_cost for _, known_cost in curves.values()]:
            curves[name] = (at, cost)
    if not curves:
        return None
    series = [
        Series(name, [(n, ms / cost["ms"][0]) for n, ms in zip(cost["nodes"], cost["ms"], strict=True)], at)
        for name, (at, cost) in curves.items()
    ]
    title = "What checking guesses costs here"
    says = f"The time of one pass of the target over n tokens, relative to {series[0].points[0][0]:g}: T(n) / T(1)."
    rows = [["", "n", "ms", "T(n) / T(1)"]]
    rows += [
        [name, str(n), number(ms, 1), number(ms / cost["ms"][0])]
        for name, (_, cost) in curves.items()
        for n, ms in zip(cost["nodes"], cost["ms"], strict=True)
    ]
    key = legend([(name, at, "dot") for name, (at, _) in curves.items()]) if len(curves) > 1 else None
    drawn = lines(title, says, series, ("tokens in one pass", "T(n) / T(1)"), (1,), log=True)
    return picture(title, drawn, key, says, rows)


def forecasts(reports: Mapping[str, Told]) -> Element | None:
    """Speed-up as measured, and as each method foretells it."""
    told = {name: report for name, report in reports.items() if report.get("predictions")}
    if not told:
        return None
    groups = []
    for name, report in told.items():
        speed = pooled(report)["speedup"]
        group = [dot("measured", speed, 0)]
        for each in report["predictions"]:
            said, colour = real(each["speedup"]), 1 + list(METHODS).index(each["method"])
            text = f"{number(said)} ({signed_share(each['speedup_error'])})"
            group.append(Dot(METHODS[each["method"]], said, said, said, text, colour))
        groups.append((name, group))
    title = "Speed-up, foretold and measured"
    says = "The measured speed-up with its 95 % interval, and what theory expects, with its error in brackets."
    rows = [["", "method", "tau", "error", "speed-up", "error"]]
    rows += [
        [name, METHODS[each["method"]], number(each["tau"]), signed_share(each["tau_error"]), number(each["speedup"]),
         signed_share(each["speedup_error"])]
        for name, report in told.items()
        for each in report["predictions"]
    ]  # fmt: skip
    key = legend([("measured", 0, "dot"), *((says, at, "dot") for at, says in enumerate(METHODS.values(), 1))])
    return picture(title, dots(title, says, groups, at_one=True), key, says, rows)


PICTURES = (speedups, taus, alphas, times, forecasts, costs, overlaps)


# ---- one drafter


def drafter(name: str, report: Told, colour: int) -> Element:
    """What only this drafter's report holds."""
    explained = [node("li", sentence) for sentence in report.get("explanation") or []]
    drawn = [part for part in (tree_nodes(name, report, colour), sample(report)) if part is not None]
    parts = [
        node("ul", *explained) if explained else None,
        sets(report),
        node("div", *drawn, class_="pictures") if drawn else None,
        divergences(report),
        counters(report),
        how_taken(report),
    ]
    return node("section", node("h2", name), node("p", output(report)), *parts)


def sets(report: Told) -> Element:
    """Every figure of every set."""
    rows = [["set", "tau", "tau a prompt", "speed-up", "speed-up a prompt", "with reading prompts", "plain tok/s",
             "tok/s", "tokens", "passes", "equal", "looped"]]  # fmt: skip
    for line in report["lines"]:
        figures = (figure(line[key]) for key in ("tau", "tau_per_prompt", "speedup", "speedup_per_prompt"))
        speeds = (number(line[key], 1) for key in ("plain_tokens_per_second", "tokens_per_second"))
        rows.append(
            [line["bench"], *figures, number(line["speedup_with_prompts"]), *speeds, str(line["tokens"]),
             str(line["rounds"]), f"{line['equal']}/{line['prompts']}", f"{line['looped']:.0%}"]
        )  # fmt: skip
    return fold("All figures, by set", table(rows))


def tree_nodes(name: str, report: Told, colour: int) -> Element | None:
    """How often each place of the tree was accepted."""
    counts = report.get("by_node")
    if not counts or not any(counts):
        return None
    title = f"Accepted, by tree node: {name}"
    says = "How often each node of the tree was accepted, in the order in which the tree lists them."
    rows = [["node", "accepted"], *([str(at), str(count)] for at, count in enumerate(counts, start=1))]
    drawn = bars(title, says, counts, colour, ("tree node", "times accepted"))
    return picture("Accepted, by tree node", drawn, None, says, rows)


def sample(report: Told) -> Element | None:
    """A text in which every piece shows who wrote it."""
    found = report.get("sample")
    if not found or not found["pieces"]:
        return None
    counted = Counter(min(piece["by"], DEEPEST) for piece in found["pieces"])
    key = [
        node("li", node("span", shade_name(by), class_=f"by{by}"), f" {count}") for by, count in sorted(counted.items())
    ]
    pieces = (
        node("span", piece["text"], class_=f"by{min(piece['by'], DEEPEST)}", title=writer(piece["by"]))
        for piece in found["pieces"]
    )
    return node(
        "figure",
        node("figcaption", "Who wrote each token"),
        node("ul", *key, class_="legend"),
        fold(f"The prompt ({found['bench']})", node("p", found["prompt"], class_="text")),
        node("p", *pieces, class_="text"),
        node("p", "Shaded tokens were guessed by the drafter and accepted; the deeper the guess, the darker. The target's own stand unshaded.", class_="quiet"),
    )  # fmt: skip


def writer(by: int) -> str:
    return f"guessed, accepted at depth {by}" if by else "the target's own (bonus)"


def shade_name(by: int) -> str:
    return f"depth {by}{' and beyond' if by == DEEPEST else ''}" if by else "bonus, the target's own"


def divergences(report: Told) -> Element | None:
    """Where outputs leave plain decoding, and how near a tie it was."""
    found = report.get("divergences")
    if not found:
        return None
    rows = [["set", "prompt", "at token", "ours", "plain", "logit gap"]]
    rows += [
        [each["bench"], str(each["prompt"]), str(each["at"]), str(each["ours"]), str(each["plain"]), f"{each['gap']:.4g}"]
        for each in found
    ]  # fmt: skip
    outputs = f"{len(found)} output{' leaves' if len(found) == 1 else 's leave'} plain decoding"
    gap = f"{outputs}; the largest gap between the target's two best logits there is {widest_gap(report):.4g}"
    return fold(gap, table(rows), opened=len(found) <= 8)


def counters(report: Told) -> Element | None:
    """The counters of served drafters, under the names vLLM gives them."""
    found = report.get("counters")
    if not found:
        return None
    rows = [["counter", "value"], *([key, str(value)] for key, value in found.items())]
    rows.append(["draft acceptance rate", number(report.get("draft_acceptance_rate"), 3)])
    return fold("Counters, under vLLM's names", table(rows))


def how_taken(report: Told) -> Element:
    rows = [["setting", "value"], *([key, str(value)] for key, value in report["settings"].items())]
    return fold("Settings", table(rows))
