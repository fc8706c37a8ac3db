"""A badge of one line per architecture, as an SVG that a model card can show."""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from kvbook.atlas import PATHS, table

LABEL = "KV cache"
# White text on each has a contrast of at least 4.5 : 1.
_COLOURS = {table.EXACT: "#00714f", table.ROUNDING: "#005f94", table.BUG: "#a84300", table.RAISES: "#7a5200"}
_OTHER, _LABEL_COLOUR = "#595959", "#333333"
# Pixels of a character of Verdana at 11 px, about, and on both sides of a text.
_CHARACTER, _ROOM = 6.6, 6


def words(row: dict[str, Any]) -> str:
    """Say in a few words what an architecture's cache is, and what row-invariant arithmetic makes of it."""
    kind = table.verdict(row)
    at_fault = [path for path in PATHS if row.get(path) == kind]
    if kind in (table.BUG, table.RAISES) and not any(table.is_declared(row, path) for path in at_fault):
        kind += " (static cache, not declared)"
    said = [kind]
    if "row_invariant" in row:
        said.append(f"row-invariant: {row['row_invariant'].split(':')[0]}")
    return " · ".join([*said, f"transformers {row['transformers']}"])


def svg(row: dict[str, Any]) -> str:
    """Draw a row's badge."""
    said = words(row)
    left, right = (round(_CHARACTER * len(text) + 2 * _ROOM) for text in (LABEL, said))
    colour = _COLOURS.get(table.verdict(row), _OTHER)
    title = escape(f"{row['architecture']}: {LABEL}: {said}")
    texts = "".join(
        f'<text x="{x + width / 2:g}" y="14" textLength="{width - 2 * _ROOM}">{escape(text)}</text>'
        for text, x, width in ((LABEL, 0, left), (said, left, right))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<rect width="{left}" height="20" fill="{_LABEL_COLOUR}"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )


def write(rows: Iterable[dict[str, Any]], folder: Path) -> None:
    """Write the badges of rows to a folder, each as ``<architecture>.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / f"{row['architecture']}.svg").write_text(svg(row), encoding="utf-8")
