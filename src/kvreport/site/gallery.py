"""All figures on one page: a small picture of each, which leads to the figure in its chapter."""

import io
import os
import string
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from kvbook import paths
from kvbook.errors import UserError
from kvreport.publishing import citation, keep, published
from kvreport.publishing.published import Published
from kvreport.running.planning import Chapter

# Twice the width at which a page shows it, for screens with fine pixels.
THUMBNAIL_PIXELS = 520
_COLOURS = 64

# In Markdown a backslash before any of these makes it a letter.
_MARKS = str.maketrans({mark: "\\" + mark for mark in string.punctuation})


def markdown(chapters: Iterable[Chapter], page: Path) -> str:
    """Write the gallery."""
    everything = published.everything(chapter.executed for chapter in chapters)
    figures = [item for item in everything if item.kind == "figure"]
    sections = []
    for title, items in groupby(figures, key=lambda item: item.title):
        shown = (linked(item, _thumbnail(item), page) for item in items)
        tiles = "\n\n".join(f":::::{{container}} kvbook-tile\n{one}\n:::::" for one in shown)
        sections.append(f"## {title}\n\n::::::{{container}} kvbook-gallery\n{tiles}\n::::::")
    return "\n\n".join(sections) or "No chapter has published a figure yet."


def whole(name: str, chapters: Sequence[Chapter], page: Path) -> str:
    """Write one figure as wide as the text; nothing before its chapter is executed."""
    for item in published.everything(chapter.executed for chapter in chapters):
        if item.name == name:
            return linked(item, keep(_thumbnails(item) / f"{name}-whole.png", item.picture), page)
    if chapters:
        raise UserError(f"no chapter publishes the figure {name}")
    return ""


def linked(item: Published, file: Path, page: Path) -> str:
    """Write a picture that leads to its figure, and the first sentence of the caption."""
    picture, top = (Path(os.path.relpath(path, page)).as_posix() for path in (file, paths.ROOT))
    sentence = citation.heading(item)
    return (
        # An option is taken to the letter; in Markdown's own picture an escaped mark would be lost.
        f"::::{{image}} {picture}\n:alt: {' '.join(item.alt.split())}\n:class: dark-light\n"
        f":target: {top}/{item.place}\n::::\n\n"
        f"{{numref}}`{item.name}`: {sentence.translate(_MARKS)}."
    )


def _thumbnail(item: Published) -> Path:
    from PIL import Image

    full = Image.open(io.BytesIO(item.picture)).convert("RGB")
    small = full.resize(
        (THUMBNAIL_PIXELS, round(full.height * THUMBNAIL_PIXELS / full.width)), Image.Resampling.LANCZOS
    )
    content = io.BytesIO()
    small.quantize(_COLOURS, dither=Image.Dither.NONE).save(content, format="png", optimize=True)
    return keep(_thumbnails(item) / f"{item.name}.png", content.getvalue())


def _thumbnails(item: Published) -> Path:
    return paths.BUILD / "thumbnails" / item.chapter
