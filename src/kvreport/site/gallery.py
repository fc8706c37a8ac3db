"""All figures on one page: a small picture of each, which leads to the figure in its chapter."""

import io
import os
import string
from itertools import groupby
from pathlib import Path

from kvbook import paths
from kvbook.errors import UserError
from kvreport.publishing import citation, published
from kvreport.publishing.published import Published
from kvreport.site.context import Context

# Twice the width at which a page shows it, for screens with fine pixels.
THUMBNAIL_PIXELS = 520
_COLOURS = 64

# In Markdown a backslash before any of these makes it a letter.
_MARKS = str.maketrans({mark: "\\" + mark for mark in string.punctuation})


def markdown(context: Context) -> str:
    """Write the gallery."""
    figures = [item for item in published.everything(context.executed) if item.kind == "figure"]
    sections = []
    for title, items in groupby(figures, key=lambda item: item.title):
        tiles = "\n\n".join(_tile(item, context) for item in items)
        sections.append(f"## {title}\n\n::::::{{container}} kvbook-gallery\n{tiles}\n::::::")
    return "\n\n".join(sections) or "No chapter has published a figure yet."


def whole(name: str, context: Context) -> str:
    """Write one figure as wide as the text; nothing before its chapter is executed."""
    for item in published.everything(context.executed):
        if item.name == name:
            return linked(item, _kept(item, f"{name}-whole.png", item.picture or b""), context)
    if context.executed:
        raise UserError(f"no chapter publishes the figure {name}")
    return ""


def _tile(item: Published, context: Context) -> str:
    return f":::::{{container}} kvbook-tile\n{linked(item, _thumbnail(item), context)}\n:::::"


def linked(item: Published, file: Path, context: Context) -> str:
    """Write a picture that leads to its figure, and the first sentence of the caption."""
    picture, top = (Path(os.path.relpath(path, context.page)).as_posix() for path in (file, context.root))
    sentence = citation.heading(item)
    end = "" if sentence.endswith("…") else "."
    return (
        # An option is taken to the letter; in Markdown's own picture an escaped mark would be lost.
        f"::::{{image}} {picture}\n:alt: {' '.join((item.alt or '').split())}\n:class: dark-light\n"
        f":target: {top}/{item.place}\n::::\n\n"
        f"{{numref}}`{item.name}`: {sentence.translate(_MARKS)}{end}"
    )


def _thumbnail(item: Published) -> Path:
    from PIL import Image

    full = Image.open(io.BytesIO(item.picture or b"")).convert("RGB")
    small = full.resize(
        (THUMBNAIL_PIXELS, round(full.height * THUMBNAIL_PIXELS / full.width)), Image.Resampling.LANCZOS
    )
    content = io.BytesIO()
    small.quantize(_COLOURS, dither=Image.Dither.NONE).save(content, format="png", optimize=True)
    return _kept(item, f"{item.name}.png", content.getvalue())


def _kept(item: Published, name: str, content: bytes) -> Path:
    """Write a picture where it is not there yet, so that nothing is rendered again."""
    file = paths.BUILD / "thumbnails" / item.chapter / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_bytes() != content:
        file.write_bytes(content)
    return file
