"""The HTML page: it says what the JSON says, hides nothing, and needs nothing but itself."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from decode.markup import node
from decode.page import PHASES, page, write_page
from decode.pictures import Scale, span, ticks
from reports import SETS, family, told


def parsed(reports: dict[str, Any]) -> Element:
    return ElementTree.fromstring(page(reports).split("\n", 1)[1])


@pytest.fixture(scope="module")
def body() -> Element:
    return parsed(family())


def text_of(element: Element) -> str:
    return "".join(element.itertext())


def figure_named(body: Element, title: str) -> Element:
    (found,) = [each for each in body.iter("figure") if each[0].text == title]
    return found


def titles(body: Element) -> list[str]:
    return [each[0].text or "" for each in body.iter("figure")]


def cells(inside: Element) -> list[list[str]]:
    """The rows of the first table in `inside`, headings first."""
    table = next(inside.iter("table"))
    return [[text_of(cell) for cell in row] for row in table.iter("tr")]


def section(body: Element, name: str) -> Element:
    (found,) = [each for each in body.iter("section") if each[0].text == name]
    return found


def folded(inside: Element, summary: str) -> Element:
    (found,) = [each for each in inside.iter("details") if summary in (each[0].text or "")]
    return found


def two(value: float) -> str:
    return f"{value:.2f}"


def with_interval(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


# ---- the page as a file


def test_the_page_is_well_formed_and_starts_as_html():
    written = page(family())
    assert written.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>')
    root = ElementTree.fromstring(written.split("\n", 1)[1])
    assert [child.tag for child in root] == ["head", "body"]
    assert "/>" not in written.split("</head>")[1]  # HTML would leave such an element open


def test_the_page_needs_nothing_but_itself():
    written = page(family())
    assert not re.findall(r"https?:|//|url\(|@import|\bsrc=|\bhref=|<link|<script|<iframe|<img| on\w+=", written)


def test_two_pages_of_one_report_are_the_same():
    assert page(family()) == page(family())


def test_the_page_is_never_seen_half_written(tmp_path, monkeypatch):
    file = write_page(tmp_path / "report.html", family())
    before = file.read_text(encoding="utf-8")
    assert before == page(family())
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_page(file, {"other": told("other")})
    assert file.read_text(encoding="utf-8") == before


# ---- its figures are those of the JSON


def test_the_headline_is_the_fastest_lossless_drafter(body):
    reports = family()
    last = {name: report["lines"][-1] for name, report in reports.items()}
    assert max(last, key=lambda name: last[name]["speedup"]["value"]) == "typical"
    header = text_of(body.find("body/header"))
    speed = last["medusa_smol"]["speedup"]
    assert header.startswith(f"medusa_smol is {two(speed['value'])} times as fast as plain decoding")
    assert f"95 %: {two(speed['low'])}-{two(speed['high'])}" in header
    assert two(last["medusa_smol"]["tau"]["value"]) in header
    assert "30/30" in header
    assert (
        f"typical (lossy) is faster, {with_interval(last['typical']['speedup'])}, but writes something else" in header
    )
    for fact in ("AMD EPYC 7B13, 2 threads on 2 cores", "30 prompts of gsm8k, humaneval, mt_bench", "2026-11-29"):
        assert fact in header


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.01, 1.3, "x is 1.10 times as fast"),
        (0.9, 1.3, "x: no certain gain over plain decoding, 1.10 (0.90-1.30) times as fast"),
        (0.8, 0.99, "x is slower than plain decoding: 1.10 times as fast"),
    ],
)
def test_the_headline_claims_no_more_than_the_interval(low, high, words):
    report = told("x")
    report["lines"][-1]["speedup"] = {"value": 1.1, "low": low, "high": high}
    assert text_of(parsed({"x": report})).count(words) == 1


def test_the_table_holds_plain_decoding_and_every_drafter(body):
    reports = family()
    rows = cells(body.find("body/main"))
    assert rows[0] == ["", "speed-up", "95 %", "tok/s", "equal", "tau all", *(f"tau {bench}" for bench in SETS)]
    assert rows[1] == ["plain", "1.00", "", "10.4", "", *["1.00"] * 4]
    for row, (name, report) in zip(rows[2:], reports.items(), strict=True):
        *lines, last = report["lines"]
        assert row[0] == (name if name != "typical" else "typical (lossy)")
        speed = last["speedup"]
        assert row[1:3] == [two(speed["value"]), f"{two(speed['low'])}-{two(speed['high'])}"]
        assert row[3:5] == [f"{last['tokens_per_second']:.1f}", f"{last['equal']}/30"]
        assert row[5:] == [two(line["tau"]["value"]) for line in (last, *lines)]


@pytest.mark.parametrize(("title", "key"), [("Speed-up by set", "speedup"), ("Tokens a pass (tau), by set", "tau")])
def test_dots_by_set_stand_where_the_figures_are(body, title, key):
    shown = figure_named(body, title)
    lines = [line for at in range(4) for report in family().values() for line in [report["lines"][at]]]
    written = [text_of(each) for each in shown.iter("text") if each.get("class") == "value"]
    assert written == [with_interval(line[key]) for line in lines]
    whiskers = [each for each in shown.find("svg").iter("line") if each.get("y1") == each.get("y2")]
    (one,) = [float(each.get("x1")) for each in shown.iter("line") if each.get("class") == "one"]
    places = [(float(each.get("x1")), float(each.get("x2"))) for each in whiskers]
    scale = (places[0][1] - one) / (lines[0][key]["high"] - 1)
    for (left, right), line in zip(places, lines, strict=True):
        assert left == pytest.approx(one + scale * (line[key]["low"] - 1), abs=0.5)
        assert right == pytest.approx(one + scale * (line[key]["high"] - 1), abs=0.5)


def test_depths_times_costs_and_forecasts_are_also_written_as_numbers(body):
    reports = {("typical (lossy)" if name == "typical" else name): report for name, report in family().items()}
    assert cells(figure_named(body, "Accepted guesses, by depth"))[1:] == [
        [name, str(depth["depth"]), str(depth["tried"]), two(depth["alpha"]), two(depth["joint"])]
        for name, report in reports.items()
        for depth in report["depths"]
    ]
    assert cells(figure_named(body, "Where a round's time goes"))[1:] == [
        [name, *(f"{ms:.1f}" for ms in report["round_ms"].values()), f"{sum(report['round_ms'].values()):.1f}", "95.8"]
        for name, report in reports.items()
    ]
    cost = reports["medusa_smol"]["cost"]  # the same curve in all three: drawn once
    assert cells(figure_named(body, "What checking guesses costs here"))[1:] == [
        ["medusa_smol", str(n), f"{ms:.1f}", two(ms / cost["ms"][0])]
        for n, ms in zip(cost["nodes"], cost["ms"], strict=True)
    ]
    forecasts = cells(figure_named(body, "Speed-up, foretold and measured"))[1:]
    assert [(row[0], *row[2:]) for row in forecasts] == [
        (name, two(each["tau"]), f"{each['tau_error']:+.0%}", two(each["speedup"]), f"{each['speedup_error']:+.0%}")
        for name, report in reports.items()
        for each in report["predictions"]
    ]


def test_a_rounds_time_is_drawn_to_scale(body):
    blocks = list(figure_named(body, "Where a round's time goes").findall("svg")[0].iter("rect"))
    widths = [float(each.get("width")) for each in blocks]
    spent = [95.8, *(report["round_ms"][phase] for report in family().values() for phase in PHASES)]
    scale = widths[0] / spent[0]
    assert widths == pytest.approx([scale * ms for ms in spent], abs=0.2)


def test_lines_pass_through_what_was_measured(body):
    shown = figure_named(body, "Accepted guesses, by depth")
    solid = [each for each in shown.find("svg").iter("polyline") if "dashed" not in each.get("class")]
    for line, report in zip(solid, family().values(), strict=True):
        points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        tall = (points[1][1] - points[0][1]) / (report["depths"][1]["alpha"] - report["depths"][0]["alpha"])
        for (_, y), depth in zip(points, report["depths"], strict=True):
            assert y - points[0][1] == pytest.approx(tall * (depth["alpha"] - report["depths"][0]["alpha"]), abs=0.5)


def test_each_drafter_has_all_its_figures(body):
    for name, report in family().items():
        part = section(body, "typical (lossy)" if name == "typical" else name)
        rows = cells(folded(part, "All figures, by set"))[1:]
        for row, line in zip(rows, report["lines"], strict=True):
            assert row[0] == line["bench"]
            figures = ("tau", "tau_per_prompt", "speedup", "speedup_per_prompt")
            assert row[1:5] == [with_interval(line[key]) for key in figures]
            assert row[5:] == [
                two(line["speedup_with_prompts"]), f"{line['plain_tokens_per_second']:.1f}",
                f"{line['tokens_per_second']:.1f}", str(line["tokens"]), str(line["rounds"]),
                f"{line['equal']}/{line['prompts']}", "14%",
            ]  # fmt: skip
        nodes = cells(figure_named(part, "Accepted, by tree node"))[1:]
        assert nodes == [[str(at), str(count)] for at, count in enumerate(report["by_node"], 1)]
        counted = dict(map(tuple, cells(folded(part, "Counters"))[1:]))
        assert counted.pop("draft acceptance rate") == f"{report['draft_acceptance_rate']:.3f}"
        assert counted == {key: str(value) for key, value in report["counters"].items()}
        set_to = dict(map(tuple, cells(folded(part, "Settings"))[1:]))
        assert set_to == {key: str(value) for key, value in report["settings"].items()}
        assert [text_of(each) for each in part.find("ul")] == report["explanation"]


def test_divergences_stand_with_their_gaps(body):
    found = family()["eagle3_smol_long"]["divergences"]
    part = folded(section(body, "eagle3_smol_long"), "2 outputs leave plain decoding")
    assert "best logits there is 0.00826" in part[0].text
    assert cells(part)[1:] == [
        [str(each[key]) for key in ("bench", "prompt", "at", "ours", "plain")] + [f"{each['gap']:.4g}"]
        for each in found
    ]


@pytest.mark.parametrize(
    ("changes", "apart", "words"),
    [
        ({}, 0, "Lossless: all 30 outputs are plain decoding's, token for token."),
        (
            {},
            2,
            "Lossless by its rule; 28 of 30 outputs are plain decoding's, token for token. Where the others part, the target's two best logits are at most 0.00826 apart",
        ),
        ({"temperature": 0.7}, 9, "Lossless: every token is drawn from the target's own distribution"),
        ({"accept": "typical"}, 9, "Lossy: typical acceptance changes what the target would write; 21 of 30"),
    ],
)
def test_lossless_and_lossy_are_said_in_plain_words(changes, apart, words):
    name = "x (lossy)" if "accept" in changes else "x"
    assert words in text_of(section(parsed({"x": told("x", apart=apart, **changes)}), name))


def test_the_sample_shows_who_wrote_each_token(body):
    report = family()["eagle3_smol_long"]
    shown = figure_named(section(body, "eagle3_smol_long"), "Who wrote each token")
    key, (prompt, text, _) = shown.find("ul"), list(shown.iter("p"))
    pieces = report["sample"]["pieces"]
    assert [(each.text, each.get("class")) for each in text] == [(one["text"], f"by{one['by']}") for one in pieces]
    assert prompt.text == report["sample"]["prompt"]
    counts = {each[0].get("class"): int(each[0].tail) for each in key}
    assert counts == {f"by{by}": sum(one["by"] == by for one in pieces) for by in {one["by"] for one in pieces}}


# ---- whatever text there is


def test_text_is_escaped_wherever_it_stands():
    evil = '<script>alert("&")</script>'
    report = told(evil, sets=(evil, "b"), target=evil, cpu=evil)
    report["explanation"] = [evil]
    report["sample"] = {
        "bench": evil,
        "prompt": evil,
        "pieces": [{"text": evil, "by": 1}, {"text": "\x00\x1b\ud800", "by": 0}],
    }
    written = page({evil: report}, [evil])
    assert "<script" not in written
    body = ElementTree.fromstring(written.encode("utf-8").split(b"\n", 1)[1].decode())
    assert evil in text_of(body.find("head/title"))
    (text,) = [each for each in figure_named(body, "Who wrote each token").iter("p") if len(each)]
    assert [each.text for each in text] == [evil, "\N{REPLACEMENT CHARACTER}" * 3]


def test_attributes_are_named_and_text_keeps_its_place():
    made = node("p", "a", node("b", "c"), "d<", None, class_="x", stroke_width=1.25, role=None)
    assert ElementTree.tostring(made, encoding="unicode") == '<p class="x" stroke-width="1.2">a<b>c</b>d&lt;</p>'


# ---- what is missing is left out

EMPTY = {
    "depths": ([], "Accepted guesses, by depth"),
    "overlap": ([], "Overlap of draft and target, by depth"),
    "cost": ({"nodes": [], "ms": []}, "What checking guesses costs here"),
    "predictions": ([], "Speed-up, foretold and measured"),
    "round_ms": ({}, "Where a round's time goes"),
    "by_node": ([], "Accepted, by tree node"),
    "sample": ({}, "Who wrote each token"),
}  # fmt: skip


@pytest.mark.parametrize("part", EMPTY)
def test_a_missing_part_leaves_out_its_picture_and_no_other(part):
    empty, title = EMPTY[part]
    whole = titles(parsed({"x": told("x")}))
    assert titles(parsed({"x": told("x") | {part: empty}})) == [each for each in whole if each != title]
    without = {key: value for key, value in told("x").items() if key != part or part in ("depths", "round_ms")}
    assert title not in titles(parsed({"x": without | ({part: empty} if part in ("depths", "round_ms") else {})}))


def test_a_drafter_without_a_distribution_is_left_out_of_that_picture_alone(body):
    rows = cells(figure_named(body, "Overlap of draft and target, by depth"))
    assert [row[0] for row in rows[1:]] == ["medusa_smol", "eagle3_smol_long"]


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_figures_that_could_not_be_measured_are_not_invented(nothing):
    report = json.loads(json.dumps(told("x")))
    for line in report["lines"]:
        line["speedup"] = line["tau"] = dict.fromkeys(("value", "low", "high"), nothing)
        line["plain_tokens_per_second"] = line["tokens_per_second"] = line["speedup_with_prompts"] = nothing
    for depth in report["depths"][1:]:
        depth["alpha"] = nothing
    for each in report["predictions"]:
        each["speedup"] = each["speedup_error"] = nothing
    body = parsed({"x": report, "y": told("y")})
    assert text_of(body.find("body/header")).startswith("y is")
    assert cells(body.find("body/main"))[2][:6] == ["x", "-", "---", "-", "30/30", "-"]
    assert "nan" not in ElementTree.tostring(body, encoding="unicode").lower()
    alone = parsed({"x": report})
    assert text_of(alone.find("body/header")).startswith("x: nothing was decoded")
    assert "Speed-up by set" not in titles(alone)


def test_many_drafters_sets_and_nodes_find_room():
    sets = tuple(f"set {number}" for number in range(13))
    reports = {
        f"drafter {n}": told(f"drafter {n}", tuple([0.8] * 9), 1.5, sets) | {"by_node": [9] * 63} for n in range(9)
    }
    body = parsed(reports)
    assert len(cells(body.find("body/main"))) == 11
    for shown in body.iter("svg"):
        wide, tall = map(float, shown.get("viewBox").split()[2:])
        for each in shown.iter():
            for across in ("x", "x1", "x2", "cx"):
                assert -0.1 <= float(each.get(across, 0)) <= wide + 0.1
            for down in ("y", "y1", "y2", "cy"):
                assert -0.1 <= float(each.get(down, 0)) <= tall + 0.1


# ---- the pictures


def test_every_picture_says_what_it_shows_to_those_who_do_not_see_it(body):
    shown = [each for each in body.iter("svg") if each.get("class") != "swatch"]
    assert len(shown) == 7 + 3
    for each in shown:
        assert each.get("role") == "img"
        assert each.get("aria-label") == f"{text_of(each.find('title'))}. {text_of(each.find('desc'))}"
    assert all(each.get("aria-hidden") == "true" for each in body.iter("svg") if each not in shown)


def test_no_two_drafters_look_alike(body):
    looks = [
        (mark.tag, mark.get("class"), len(mark.get("points", "").split()))
        for mark in (each.find("svg")[0] for each in figure_named(body, "Speed-up by set").find("ul"))
    ]
    assert len({tag_class[1] for tag_class in looks}) == len({(tag, corners) for tag, _, corners in looks}) == 3


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1, 1), (0.93, 1.07), (0, 293.2), (1, 3.07), (0, 0), (0, 7e5), (1e-4, 3e-4)]
)
def test_ticks_are_round_few_and_within_the_span(low, high):
    least, most = span([low, high])
    marks = ticks(least, most)
    assert least <= low + 1e-9
    assert most >= high - 1e-9
    assert 2 <= len(marks) <= 9
    assert all(least - 1e-9 <= mark <= most * (1 + 1e-9) + 1e-9 for mark in marks)
    assert len({f"{mark:.4g}" for mark in marks}) == len(marks)


def test_a_scale_keeps_proportions_or_ratios():
    assert [Scale(0, 4, 10, 90)(value) for value in (0, 1, 4)] == [10, 30, 90]
    assert [Scale(1, 16, 0, 4, log=True)(value) for value in (1, 2, 4, 16)] == pytest.approx([0, 1, 2, 4])
    assert Scale(3, 3, 0, 4)(3) == 0
