"""HTML from Python calls: `tag("p", text, class_="note")`. Used by the page's sections only.

Whatever is not Html is escaped, so a model's name can never become markup. Knows nothing of plans.
"""
import html
import json
from typing import Any

# Characters that could end the element around a JSON block, or its line, early
_JSON_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(element: str, *children: Any, **attributes: Any) -> Html:
    """`class_` → class, `data_x` → data-x. None leaves an attribute out, True writes its name alone."""
    written = "".join(_attribute(name, value) for name, value in attributes.items() if value is not None)
    return Html(f"<{element}{written}>{join(*children)}</{element}>")


def join(*children: Any) -> Html:
    """Pieces one after another; None and empty ones vanish, all but Html is escaped."""
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child))
                        for child in children if child is not None))


def json_block(identifier: str, data: Any) -> Html:
    """Data for the page's script, in an element that is never executed."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_JSON_ESCAPES)
    return Html(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


def bar(parts: list[tuple[str, float, str]], *, total: float, label: str) -> Html:
    """Stacked parts of `total` in proportion: (name with its figure, value, CSS colour)."""
    pieces = [tag("i", style=f"width:{100 * value / total:.3f}%;background:{colour}", title=name)
              for name, value, colour in parts if value > 0 and total > 0]
    return tag("span", *pieces, class_="bar", role="img", aria_label=label)


def key(parts: list[tuple[str, str, str]]) -> Html:
    """A legend: (name, figure, CSS colour)."""
    items = [tag("li", tag("i", style=f"background:{colour}"), tag("span", name), tag("b", figure))
             for name, figure, colour in parts]
    return tag("ul", *items, class_="key")


def table(head: list[str], rows: list[list[Any]], *, caption: str, numbers: set[int],
          marked: int | None = None) -> Html:
    """`numbers`: columns set right; `marked`: the row that is the plan's own. The first column heads its row."""
    def side(column: int) -> str | None:
        return "n" if column in numbers else None

    body = [tag("tr", *(tag("th" if column == 0 else "td", cell, class_=side(column),
                            scope="row" if column == 0 else None) for column, cell in enumerate(row)),
                class_="own" if index == marked else None) for index, row in enumerate(rows)]
    titles = [tag("th", title, scope="col", class_=side(column)) for column, title in enumerate(head)]
    return tag("div", tag("table", tag("caption", caption), tag("thead", tag("tr", *titles)), tag("tbody", *body)),
               class_="scroll", tabindex=0, role="region", aria_label=caption)


def _attribute(name: str, value: Any) -> str:
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
