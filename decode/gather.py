"""Reports of several measurements, found in their folders, checked and laid side by side.

`python -m decode.report outputs/a outputs/b --html` prints one table and writes one page.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from decode.page import write_page
from decode.words import HARDWARE, Told, conditions, grid, marked

VERSION = 3
PARTS = ("settings", "lines", "depths", "round_ms", "plain_round_ms")
FAIR = ("dtype", "compiled", "tokens", "longest", "temperature", "top_k", "top_p", "rows", *HARDWARE)


def find(place: Path) -> list[Path]:
    """The reports of a measurement: `place` is a report, its folder, or a run's, whose newest measurement counts."""
    if place.is_file():
        return [place]
    # an unfinished measurement has made its folder, but no report; names are times
    measured = sorted((file.parent for file in place.glob("measure/*/report.json")), reverse=True)
    for folder in (place, *measured):
        if (folder / "report.json").is_file():
            return [folder / "report.json", *sorted(folder.glob("report_*.json"))]
    lost = "holds no report.json" if place.is_dir() else "does not exist"
    raise ValueError(
        f"{place} {lost}; give a folder that decode/run.py wrote, such as outputs/<conf>, or a report.json"
    )


def read(file: Path) -> Told:
    """The report in `file`."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{file} is no JSON; measure again with decode/run.py") from None
    version = told.get("version") if isinstance(told, dict) else None
    if version is None or any(part not in told for part in PARTS if version == VERSION):
        raise ValueError(f"{file} is no report of decode/run.py")
    if version != VERSION:
        raise ValueError(f"{file} is a report of version {version}, and this Outrider reads {VERSION}; measure again")
    return dict(told)


def gather(places: Sequence[Path]) -> dict[str, Told]:
    """Every report in `places`, each under a name of its own; all must be of one target."""
    files = list(dict.fromkeys(file.resolve() for place in places for file in find(place)))
    reports = [read(file) for file in files]
    targets = {report["settings"]["target"]: file for report, file in zip(reports, files, strict=True)}
    if len(targets) > 1:
        (one, here), (other, there) = list(targets.items())[:2]
        raise ValueError(f"{here} measured {one} and {there} {other}; lay reports of one target side by side")
    return dict(zip(distinct(reports, files), reports, strict=True))


def distinct(reports: Sequence[Told], files: Sequence[Path]) -> list[str]:
    """The drafters' names, with their folder, then their whole path, where that is needed to tell them apart."""
    drafters = [report["settings"]["drafter"] for report in reports]
    for where in (lambda file: file.parent.name, lambda file: file):
        repeated = {name for name in drafters if drafters.count(name) > 1}
        drafters = [
            f"{report['settings']['drafter']} [{where(file)}]" if name in repeated else name
            for name, report, file in zip(drafters, reports, files, strict=True)
        ]
    return drafters


def differences(reports: Mapping[str, Told]) -> list[str]:
    """What keeps the reports from being compared fairly, a sentence each."""
    said = []
    for key in FAIR:
        values: dict[str, list[str]] = {}
        for name, report in reports.items():
            values.setdefault(str(report["settings"].get(key)), []).append(name)
        if len(values) > 1:
            told = ", ".join(f"{value} for {' and '.join(names)}" for value, names in values.items())
            said.append(f"Not measured alike: {key} is {told}.")
    asked = {tuple((line["bench"], line["prompts"]) for line in report["lines"]) for report in reports.values()}
    if len(asked) > 1:
        said.append("Not measured alike: the sets or the numbers of prompts differ, so figures over all sets do too.")
    return said


def show(console: Console, reports: Mapping[str, Told], notes: Sequence[str]) -> None:
    """Print one table, and what to mind when reading it."""
    rows = grid(marked(reports))
    rows[0] = [heading.replace("tau ", "tau\n") for heading in rows[0]]
    if wide(rows) > console.width:  # many sets: down instead of across
        rows = [[cell.replace("\n", " ") for cell in column] for column in zip(*rows, strict=True)]
        rows[0] = [textwrap.fill(heading, 11) for heading in rows[0]]
        console.width = max(console.width, wide(rows))  # a figure is never cut off
    table = Table(box=SIMPLE_HEAD, padding=0)
    for at, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if at else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    console.print(conditions(next(iter(reports.values()))), markup=False)


def wide(rows: Sequence[Sequence[str]]) -> int:
    """Columns of the screen that a table of `rows` takes."""
    longest = [max(len(part) for cell in column for part in cell.split("\n")) for column in zip(*rows, strict=True)]
    return sum(longest) + len(longest) + 1


def beside(places: Sequence[Path]) -> Path:
    """Where the page goes if nobody says: beside the first report."""
    first = find(places[0])[0].parent
    return first / ("report.html" if len(places) == 1 else "side_by_side.html")


def command(words: Sequence[str] | None = None) -> None:
    """Lay reports side by side, as the command line asks; a mistake ends in its one sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m decode.report", description="Lay the reports of several measurements side by side."
    )
    parser.add_argument(
        "places", nargs="+", type=Path, metavar="FOLDER", help="outputs/<conf>, a measurement, a report"
    )
    parser.add_argument("--html", nargs="?", const=Path(), type=Path, metavar="FILE", help="also write one HTML page")
    asked = parser.parse_args(words)
    try:
        lay(asked.places, asked.html)
    except (ValueError, OSError) as mistake:
        sys.exit(f"error: {mistake}")


def lay(places: Sequence[Path], html: Path | None) -> None:
    """Print the reports of `places`, and write their page to `html`; an empty path means beside them."""
    reports, console = gather(places), Console()
    notes = differences(reports)
    if html == Path():
        html = beside(places)
    elif html and html.is_dir():
        raise ValueError(f"--html {html} is a folder; name a file such as {html}/report.html, or put --html last")
    show(console, reports, notes)
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        console.print(f"written to {write_page(html, reports, notes)}", soft_wrap=True, markup=False)
