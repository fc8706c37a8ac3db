"""The one figure of the front page, with its values for a pointer, a finger or a keyboard.

Without JavaScript the figure leads to its chapter, and a table folded below it has the values of its bold lines.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbook import paths
from kvreport.publishing import published
from kvreport.publishing.wording import DTYPES, power_of_ten
from kvreport.site import gallery
from kvreport.site.context import Context

# What the front page shows: bugs flat, rounding sloped.
FIGURE = "fig-bug-planted"

Line = dict[str, Any]


def markdown(context: Context) -> str:
    """Write the figure, which leads to itself in its chapter, and its values."""
    for item in published.everything(context.executed):
        if item.name == FIGURE:
            file = paths.BUILD / "thumbnails" / f"{item.name}-whole.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(item.picture or b"")
            rows = paths.FIGURES / item.chapter / f"{item.name}.csv"
            found = lines(list(csv.DictReader(rows.read_text("utf-8").splitlines())), item.frame, item.models[:1])
            return gallery.linked(item, file, context, "dark-light kvbook-hero") + _values(found)
    return ""


def lines(rows: list[dict[str, str]], frame: Mapping[str, Any], bold: Sequence[str]) -> list[Line]:
    """List the lines, bold ones first: whose each is, and its points as dtype, value and place in per cent."""
    found: dict[tuple[str, str], Line] = {}
    # Stable: within a model clean first, and the rest as in the figure.
    for row in sorted(rows, key=lambda row: (row["model"] not in bold, row["model"], row["symptom"] != "clean")):
        line = {"model": row["model"], "line": row["symptom"], "points": []}
        line = found.setdefault((row["model"], row["symptom"]), line)
        drift = float(row["drift"])
        # What a logarithmic axis has no place for is not drawn.
        if frame and 0 < drift < float("inf"):
            x, y = (
                published.place(frame[axis], value) for axis, value in (("x", float(row["roundoff"])), ("y", drift))
            )
            line["points"].append([DTYPES[row["dtype"]], power_of_ten(drift), round(100 * x, 2), round(100 * y, 2)])
    return [line for line in found.values() if line["points"]]


def _values(found: list[Line]) -> str:
    if not found:
        return ""
    model = found[0]["model"]
    # No string of the data can end the element that holds it.
    data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'\n\n::::{{raw}} html\n<script type="application/json" id="kvbook-hero-values">{data}</script>\n::::\n\n'
        f"::::{{dropdown}} The values of {model}\n" + "\n".join(_table(found, model)) + "\n::::"
    )


def _table(found: list[Line], model: str) -> Iterator[str]:
    dtypes = [name for name in DTYPES.values() if any(name == point[0] for line in found for point in line["points"])]
    yield "| cached pass | " + " | ".join(dtypes) + " |"
    yield "|---" * (len(dtypes) + 1) + "|"
    for line in found:
        if line["model"] == model:
            values = {point[0]: point[1] for point in line["points"]}
            yield f"| {line['line']} | " + " | ".join(values.get(dtype, "0") for dtype in dtypes) + " |"
