"""Which computed numbers of a chapter the book quotes."""

import json
import re

from kvbook.paths import CHAPTERS, ROOT


def quoted(stem: str) -> set[str]:
    """Name the glue keys of a chapter that its own prose quotes, or another page."""
    own = json.loads((CHAPTERS / f"{stem}.ipynb").read_text("utf-8"))
    prose = "".join("".join(cell["source"]) for cell in own["cells"] if cell["cell_type"] == "markdown")
    found = set(re.findall(r"\{glue:text\}`(\w+)`", prose))
    for page in (ROOT / "index.md", *(ROOT / "pages").rglob("*.md"), *CHAPTERS.glob("*.ipynb")):
        found |= set(re.findall(rf"{stem}\.ipynb::(\w+)", page.read_text("utf-8")))
    return found
