"""Pictures of figures, as SVG: lines, dots with whiskers, stacked bars, bars.

All are 480 wide and scale with the page. Colours come from its style sheet, by class; what a colour says, a shape, a dash or
a number says too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from decode.markup import node
from decode.words import known

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 54, 14, 12, 46
COLOURS = 7  # c0 to c6 in the style sheet
HEIGHT = 280
ROW, HEADER = 19, 22
CHART_END = 336  # where dots end and their numbers begin


@dataclass(frozen=True)
class Series:
    """One line: what it is called, where it goes, and the colour and shape it has everywhere on the page."""

    name: str
    points: list[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """One figure with its interval, and how it is written beside the picture."""

    name: str
    value: float
    low: float
    high: float
    text: str
    colour: int


@dataclass(frozen=True)
class Scale:
    """Values to places, in proportion or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / ((high - low) or 1) * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    rough = max(high - low, 1e-9) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
    return [step * at for at in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]


def span(values: Iterable[float], about: int = 5) -> tuple[float, float]:
    """The range of `values`, widened to round numbers."""
    found = list(values)
    low, high = min(found), max(found)
    step = ticks(low, high if high > low else low + 1, about)
    gap = step[1] - step[0] if len(step) > 1 else max(high - low, 0.1)
    first, last = math.floor(low / gap + 1e-6), math.ceil(high / gap - 1e-6)
    return first * gap, max(last, first + 1) * gap


def brief(value: float) -> str:
    """A tick's number, as short as it can be."""
    return f"{value:.4g}" if value else "0"


def svg(title: str, says: str, height: float, *inside: Element | None) -> Element:
    """A picture with a title and a description for those who do not see it."""
    told = (node("title", title), node("desc", says))
    return node("svg", *told, *inside, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=f"{title}. {says}")


def write(x: float, y: float, text: str, anchor: str = "start", class_: str | None = None) -> Element:
    return node("text", text, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def stroke(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    return node("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def marker(x: float, y: float, colour: int, says: str) -> Element:
    """A dot whose shape tells what its colour tells."""
    class_ = f"dot c{colour % COLOURS}"
    title = node("title", says)
    corners = [
        "",
        f"{x - 4.4:.1f},{y - 4.4:.1f} {x + 4.4:.1f},{y - 4.4:.1f} {x + 4.4:.1f},{y + 4.4:.1f} {x - 4.4:.1f},{y + 4.4:.1f}",
        f"{x:.1f},{y - 5.6:.1f} {x + 5.4:.1f},{y + 4.4:.1f} {x - 5.4:.1f},{y + 4.4:.1f}",
        f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}",
    ][colour % 4]
    if not corners:
        return node("circle", title, cx=float(x), cy=float(y), r=5, class_=class_)
    return node("polygon", title, points=corners, class_=class_)


def lines(
    title: str, says: str, series: Sequence[Series], axes: tuple[str, str], holds: Sequence[float], log: bool = False
) -> Element:
    """Lines with a mark at every point. The upright axis holds at least the values `holds`."""
    points = [point for one in series for point in one.points]
    across = sorted({x for x, _ in points})
    x = Scale(across[0], across[-1], LEFT + 14, WIDTH - RIGHT - 14, log)
    low, high = span([*holds, *(y for _, y in points)])
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    frame = [*rulers(y, low, high), *feet(x, across), *names(axes)]
    drawn = [part for one in series for part in path(one, x, y)]
    return svg(title, says, HEIGHT, *frame, *drawn)


def rulers(y: Scale, low: float, high: float) -> list[Element]:
    """The upright axis: a line across at every tick, and its number."""
    return [
        part
        for tick in ticks(low, high)
        for part in (
            stroke(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid"),
            write(LEFT - 6, y(tick) + 4, brief(tick), "end"),
        )
    ]


def feet(x: Scale, across: Sequence[float]) -> list[Element]:
    """The numbers below; where they would touch, some are left out."""
    shown: list[float] = []
    for at in across:
        if not shown or x(at) - x(shown[-1]) >= 26:
            shown.append(at)
    return [write(x(at), HEIGHT - BOTTOM + 18, brief(at), "middle") for at in shown]


def names(axes: tuple[str, str]) -> list[Element]:
    """What the two axes hold; the upright one's name is turned."""
    below, beside = axes
    turned = node("text", beside, transform=f"translate(12 {(HEIGHT - BOTTOM + TOP) / 2:.0f}) rotate(-90)")
    turned.set("text-anchor", "middle")
    return [write((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, below, "middle"), turned]


def path(series: Series, x: Scale, y: Scale) -> list[Element]:
    joined = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in series.points)
    class_ = f"line c{series.colour % COLOURS}" + " dashed" * series.dashed
    line = node("polyline", points=joined, class_=class_)
    if series.dashed:
        return [line]
    return [line, *(marker(x(a), y(b), series.colour, f"{series.name}, {a:g}: {b:.2f}") for a, b in series.points)]


def dots(title: str, says: str, groups: Sequence[tuple[str, Sequence[Dot]]], at_one: bool = False) -> Element:
    """For each group a heading and a row a dot: whiskers for its interval, its number at the right."""
    every = [dot for _, group in groups for dot in group]
    ends = [value for dot in every for value in (dot.value, dot.low, dot.high) if known(value)]
    low, high = span([*ends, 1.0] if at_one else ends)
    x = Scale(low, high, 14, CHART_END)
    height = 26 + sum(HEADER + ROW * len(group) for _, group in groups)
    inside = [*uprights(x, low, high, height), stroke(x(1), 4, x(1), height - 22, "one") if at_one else None]
    y = 0.0
    for name, group in groups:
        inside.append(write(2, y + 15, name, class_="group"))
        for number, dot in enumerate(group):
            inside += whisker(dot, x, y + HEADER + ROW * number + 8)
        y += HEADER + ROW * len(group)
    return svg(title, says, height, *inside)


def uprights(x: Scale, low: float, high: float, height: float) -> list[Element]:
    return [
        part
        for tick in ticks(low, high)
        for part in (
            stroke(x(tick), 4, x(tick), height - 22, "grid"),
            write(x(tick), height - 6, brief(tick), "middle"),
        )
    ]


def whisker(dot: Dot, x: Scale, y: float) -> list[Element]:
    """A dot, its interval and its number; a figure that is not known is only written."""
    text = write(WIDTH - 4, y + 4, dot.text, "end", class_="value")
    if not known(dot.value):
        return [text]
    ends = (stroke(x(end), y - 4, x(end), y + 4, f"line c{dot.colour % COLOURS}") for end in {dot.low, dot.high})
    bar = stroke(x(dot.low), y, x(dot.high), y, f"line c{dot.colour % COLOURS}")
    mark = marker(x(dot.value), y, dot.colour, f"{dot.name}: {dot.text}")
    return [bar, *ends, mark, text] if dot.low < dot.high else [mark, text]


def stack(title: str, says: str, rows: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> Element:
    """For each row its name and sum above a bar of coloured parts, all on one scale that starts at nothing."""
    longest = max(sum(size for _, size in parts) for _, parts in rows)
    x = Scale(0, longest, 2, WIDTH - 4)
    inside: list[Element] = []
    for number, (name, parts) in enumerate(rows):
        y = 50.0 * number
        inside.append(write(2, y + 15, name, class_="group"))
        inside.append(write(WIDTH - 4, y + 15, f"{sum(size for _, size in parts):.1f} ms", "end", class_="value"))
        start = 0.0
        for colour, size in parts:
            inside.append(block(x(start), y + 21, x(start + size) - x(start), 20, colour, f"{size:.1f} ms"))
            start += size
    return svg(title, says, 50 * len(rows), *inside)


def block(x: float, y: float, width: float, height: float, colour: int, says: str) -> Element:
    size = {"x": float(x), "y": float(y), "width": float(max(width, 0)), "height": float(max(height, 0))}
    return node("rect", node("title", says), class_=f"block c{colour % COLOURS}", **size)


def bars(title: str, says: str, values: Sequence[float], colour: int, axes: tuple[str, str]) -> Element:
    """One upright bar a value, numbered from one."""
    low, high = span([0.0, *values])
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    wide = (WIDTH - LEFT - RIGHT) / len(values)
    x = Scale(1, len(values), LEFT + wide / 2, WIDTH - RIGHT - wide / 2)
    drawn = [
        block(
            x(at) - wide * 0.38, y(value), wide * 0.76, HEIGHT - BOTTOM - y(value), colour, f"node {at}: {brief(value)}"
        )
        for at, value in enumerate(values, start=1)
    ]
    frame = [*rulers(y, low, high), *feet(x, range(1, len(values) + 1)), *names(axes)]
    return svg(title, says, HEIGHT, *frame, *drawn)


def swatch(colour: int, shape: str = "dot") -> Element:
    """What a legend shows before a name."""
    marks = {
        "dot": lambda: marker(9, 8, colour, ""),
        "line": lambda: stroke(0, 8, 18, 8, f"line c{colour % COLOURS}"),
        "dashed": lambda: stroke(0, 8, 18, 8, "line dashed plain"),
        "block": lambda: node("rect", x=2, y=2, width=13, height=13, class_=f"block c{colour % COLOURS}"),
    }
    return node("svg", marks[shape](), viewBox="0 0 18 16", class_="swatch", aria_hidden="true")


def legend(entries: Sequence[tuple[str, int, str]]) -> Element:
    """Names with the colour and shape that stand for them."""
    return node("ul", *(node("li", swatch(colour, shape), name) for name, colour, shape in entries), class_="legend")
