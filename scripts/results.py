"""Write the README's table of results from the reports of measurements.

python scripts/results.py outputs/a outputs/b [--readme README.md]
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from decode.gather import differences, gather
from decode.words import Told, conditions, grid, marked
from models.files import write_whole

OPENS, CLOSES = "<!-- results: written by scripts/results.py -->", "<!-- end of results -->"


def results(reports: Mapping[str, Told], notes: Sequence[str]) -> str:
    """A Markdown table, and what it was taken with: hardware and date."""
    headings, *rows = ([cell.replace("|", r"\|") for cell in row] for row in grid(marked(reports)))
    aligned = ["---", *("--:" for _ in headings[1:])]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (headings, aligned, *rows))
    taken = dict.fromkeys(conditions(report) for report in reports.values())
    return "\n\n".join([table, "\n".join([*notes, *(f"Measured: {sentence}." for sentence in taken)])])


def rewrite(readme: Path, block: str) -> None:
    """Put `block` between the two markers in `readme`."""
    text = readme.read_text(encoding="utf-8")
    if text.count(OPENS) != 1 or text.count(CLOSES) != 1 or text.index(OPENS) > text.index(CLOSES):
        raise ValueError(f"{readme} needs the lines {OPENS} and {CLOSES} once each, in this order, around the table")
    before, after = text[: text.index(OPENS)], text[text.index(CLOSES) :]
    write_whole(readme, f"{before}{OPENS}\n{block}\n{after}")


def main(words: Sequence[str] | None = None) -> None:
    """What the command line asks; a mistake ends in its one sentence."""
    parser = argparse.ArgumentParser(description="Write the README's table of results from reports.")
    parser.add_argument(
        "places", nargs="+", type=Path, metavar="FOLDER", help="outputs/<conf>, a measurement, a report"
    )
    parser.add_argument("--readme", type=Path, default=Path(__file__).parent.parent / "README.md")
    asked = parser.parse_args(words)
    try:
        reports = gather(asked.places)
        rewrite(asked.readme, results(reports, differences(reports)))
    except (ValueError, OSError) as mistake:
        sys.exit(f"error: {mistake}")


if __name__ == "__main__":
    main()
