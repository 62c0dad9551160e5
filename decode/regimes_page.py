"""The pictures of decode.regimes, as one HTML page: speed-up measured and foretold, and what a pass over n nodes costs."""

from pathlib import Path
from xml.etree.ElementTree import Element

from decode.markup import document, node
from decode.page import how_taken, picture
from decode.pictures import Series, legend, lines
from decode.style import STYLE
from decode.words import Told, figure, number
from models.files import write_whole

BY_LOG = ("batch", "context", "nodes of a tree")


def write_page(file: Path, drafter: str, figures: Told, knee: float) -> Path:
    """The page of `figures`, as regimes.json holds them, in `file`, which is never seen half written."""
    pictures = [sweep(name, spots, figures["crossings"][name]) for name, spots in figures["sweeps"].items()]
    title = f"{figures['settings']['target']}: where {drafter} pays"
    body = node(
        "body",
        node("header", node("h1", title)),
        node("main", node("div", *pictures, passes(figures["cost"], knee), class_="pictures"), how_taken(figures)),
        node("footer", node("p", "Written by Outrider from its regimes.json. The page needs nothing but itself.")),
    )  # fmt: skip
    return write_whole(file, document(title, STYLE, body))


def sweep(name: str, spots: list[Told], crossing: float | None) -> Element:
    """Speed-up against what one sweep varies."""
    measured = Series("measured", [(spot["at"], spot["speedup"]["value"]) for spot in spots], 0)
    foretold = Series("foretold", [(spot["at"], spot["foretold"]) for spot in spots], 1, dashed=True)
    end = "It pays throughout." if crossing is None else f"From {crossing:.3g} on plain decoding is as fast or faster."
    says = f"Speed-up over plain decoding against {name}. {end}"
    rows = [[name, "speed-up (95 %)", "foretold", "tau"]]
    rows += [
        [str(spot["at"]), figure(spot["speedup"]), number(spot["foretold"]), number(spot["tau"])] for spot in spots
    ]
    title, axes = f"Speed-up by {name}", (name, "speed-up")
    drawn = lines(title, says, [measured, foretold], axes, (1,), log=name in BY_LOG)
    return picture(title, drawn, legend([("measured", 0, "dot"), ("foretold", 1, "line")]), says, rows)


def passes(cost: Told, knee: float) -> Element:
    """A pass over n nodes, between its two bounds: the weights are read once, and every node is computed."""
    nodes, ms = cost["nodes"], cost["ms"]
    measured = Series("measured", [(n, each / ms[0]) for n, each in zip(nodes, ms, strict=True)], 0)
    bounds = Series("bounds", [(n, max(1.0, n / knee)) for n in nodes], 1, dashed=True)
    title = "What a pass over n nodes costs"
    says = (
        f"T(n) / T(1) on this machine. Where reading the weights takes longest a pass costs what one node's does; where "
        f"arithmetic does, every node costs the same. The bounds meet at {knee:.0f} nodes."
    )
    rows = [["n", "ms", "T(n) / T(1)"]]
    rows += [[str(n), number(each, 1), number(each / ms[0])] for n, each in zip(nodes, ms, strict=True)]
    drawn = lines(title, says, [measured, bounds], ("nodes", "T(n) / T(1)"), (1,), log=True)
    return picture(title, drawn, legend([("measured", 0, "dot"), ("bounds", 1, "line")]), says, rows)
