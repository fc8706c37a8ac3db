"""Pictures load when a reader comes near them, and keep their place until then.

A first visit then brings what is seen and not a megabyte of what is further down; and because every picture says how
large it is, a link to a figure leads to it and not to where it would be without the pictures above.
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_PICTURE = re.compile(r'<img (?P<rest>[^>]*?src="(?P<source>[^"]+)"[^>]*)>')
_PNG = b"\x89PNG\r\n\x1a\n"


def connect(app: Sphinx) -> None:
    """Join the build, after all who add pictures to a page."""
    app.connect("html-page-context", _mark, priority=901)


def size(file: Path) -> tuple[int, int] | None:
    """Read a PNG's width and height in pixels from its first bytes; None for any other file."""
    with file.open("rb") as stream:
        head = stream.read(24)
    return struct.unpack(">II", head[16:24]) if head.startswith(_PNG) else None


def marked(html: str, files: Mapping[str, Path]) -> str:
    """Say of every picture that it may wait, and how large it is."""

    def one(match: re.Match[str]) -> str:
        file = files.get(PurePosixPath(match["source"]).name)
        known = size(file) if file is not None and file.is_file() else None
        # As attributes, which only tell the shape; how wide it is shown is the style sheet's business.
        shape = f'width="{known[0]}" height="{known[1]}" ' if known and " height=" not in match["rest"] else ""
        return f'<img loading="lazy" {shape}{match["rest"]}>'

    return _PICTURE.sub(one, html)


def _mark(
    app: Sphinx, _pagename: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    if context.get("body"):
        files = {name: Path(app.srcdir) / source for source, name in app.builder.images.items()}
        context["body"] = marked(context["body"], files)
