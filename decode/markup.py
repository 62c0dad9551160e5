"""HTML and SVG as trees of elements: what goes in as text comes out escaped."""

import html
import re
from xml.etree.ElementTree import Element, tostring

# characters that neither XML nor HTML may hold; a byte-level tokenizer can write any of them
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    return FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def node(tag: str, *inside: "Element | str | None", **attributes: object) -> Element:
    """An element; `class_` and `stroke_width` mean class and stroke-width, and None is left out."""
    made = Element(tag, {_name(key): _value(value) for key, value in attributes.items() if value is not None})
    for part in inside:
        if isinstance(part, Element):
            made.append(part)
        elif part is not None and len(made):
            made[-1].tail = (made[-1].tail or "") + clean(part)
        elif part is not None:
            made.text = (made.text or "") + clean(part)
    return made


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else clean(str(value))


def table(rows: list[list[str]], **attributes: object) -> Element:
    """Rows, headings first; what stands in the first column names its row. Wide tables scroll by themselves."""
    head = node("tr", *(node("th", text, scope="col") for text in rows[0]))
    body = [node("tr", node("th", row[0], scope="row"), *(node("td", text) for text in row[1:])) for row in rows[1:]]
    return node("div", node("table", node("thead", head), node("tbody", *body), **attributes), class_="wide")


def fold(summary: str, *inside: Element | None, opened: bool = False) -> Element:
    return node("details", node("summary", summary), *inside, open="open" if opened else None)


def document(title: str, style: str, body: Element) -> str:
    """A whole page, well-formed as XML too."""
    head = (
        f'<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f'<meta name="color-scheme" content="light dark"/>\n<title>{html.escape(clean(title))}</title>\n'
        f"<style>{style}</style>"
    )
    written = tostring(body, encoding="unicode", short_empty_elements=False)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n{written}\n</html>\n'
