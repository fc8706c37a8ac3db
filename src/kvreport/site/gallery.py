"""All figures on one page: a small picture of each, which leads to the figure in its chapter."""

import hashlib
import os
import string
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from kvbook import UserError, paths
from kvreport.publishing import citation, published
from kvreport.publishing.pictures import reduced
from kvreport.publishing.published import Published
from kvreport.running.planning import Chapter

_FOLDER = paths.BUILD / "thumbnails"
# In Markdown a backslash before any of these makes it a letter.
_MARKS = str.maketrans({mark: "\\" + mark for mark in string.punctuation})


def markdown(chapters: Iterable[Chapter], page: Path) -> str:
    """Write the gallery."""
    everything = published.everything(chapter.executed for chapter in chapters)
    figures = [item for item in everything if item.kind == "figure"]
    sections = []
    for title, items in groupby(figures, key=lambda item: item.title):
        # Twice the width at which the page shows it, for screens with fine pixels.
        shown = (_linked(item, _small(item), page) for item in items)
        tiles = "\n\n".join(f":::::{{container}} kvbook-tile\n{one}\n:::::" for one in shown)
        sections.append(f"## {title}\n\n::::::{{container}} kvbook-gallery\n{tiles}\n::::::")
    return "\n\n".join(sections) or "No chapter has published a figure yet."


def whole(name: str, chapters: Sequence[Chapter], page: Path) -> str:
    """Write one figure as wide as the text; nothing before its chapter is executed."""
    for item in published.everything(chapter.executed for chapter in chapters):
        if item.name == name:
            return _linked(item, paths.keep(_FOLDER / item.chapter / f"{name}-whole.png", item.picture), page)
    if chapters:
        raise UserError(f"no chapter publishes the figure {name}")
    return ""


def _small(item: Published) -> Path:
    """Keep a figure's small picture, drawn once for each large one: sixty take seconds."""
    file = _FOLDER / item.chapter / f"{item.name}-{hashlib.sha256(item.picture).hexdigest()[:8]}.png"
    return file if file.is_file() else paths.keep(file, reduced(item.picture, colours=64, width=520))


def _linked(item: Published, file: Path, page: Path) -> str:
    """Write a picture as one that leads to its figure, with the first sentence of the caption."""
    # A space in an address is left out, unless it is marked as belonging there.
    picture, top = (Path(os.path.relpath(path, page)).as_posix().replace(" ", "\\ ") for path in (file, paths.ROOT))
    sentence = citation.heading(item)
    return (
        # An option is taken to the letter; in Markdown's own picture an escaped mark would be lost.
        f"::::{{image}} {picture}\n:alt: {' '.join(item.alt.split())}\n:class: dark-light\n"
        f":target: {top}/{item.place}\n::::\n\n"
        f"{{numref}}`{item.name}`: {sentence.translate(_MARKS)}."
    )
