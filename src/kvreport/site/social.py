"""The picture that stands beside a link to a page: its first one, or the book's first where it has none."""

from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

_NAME = 'property="og:image"'


def connect(app: Sphinx) -> None:
    """Join the build, after the extension that writes OpenGraph's tags."""
    app.connect("html-page-context", _add_the_books_picture, priority=900)


def first_picture(env: BuildEnvironment) -> str | None:
    """Give the file name, in the site, of a picture of the first page that has one; None where there is none."""
    found = [
        (min(docnames), name) for docnames, name in env.images.values() if docnames and Path(name).suffix == ".png"
    ]
    return min(found)[1] if found else None


def _add_the_books_picture(
    app: Sphinx, _pagename: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    tags = context.get("metatags", "")
    # Only with an address: others fetch the picture, so it must have one of its own. Without, opengraph writes no
    # picture.
    if not app.config.ogp_site_url or "og:title" not in tags or _NAME in tags:
        return
    if (name := first_picture(app.env)) is not None:
        address = urljoin(app.config.ogp_site_url, f"{app.builder.imagedir}/{name}")
        context["metatags"] = f'{tags}\n<meta {_NAME} content="{address}" />\n'
