"""The last touches to each page: faults of this set of packages mended, pictures that wait, and one for links to it.

sphinx-thebe adds its scripts twice, so every page logs that THEBE_JS_URL is declared already;
sphinx-togglebutton gives a code toggle a name that differs from the text in it; sphinxcontrib-bibtex marks
references with a role that is not allowed in a list. docutils wraps the text of each cell and each word of code once
more than any style asks for, and counts rows as odd and even, which is a tenth of a page that is one long table.
sphinx-design draws an arrow at everything that unfolds; here it is drawn once, and pointed to from elsewhere.

Pictures load when a reader comes near them, and keep their place until then.  A first visit then brings what is seen
and not a megabyte of what is further down; and because every picture says how large it is, a link to a figure leads to
it and not to where it would be without the pictures above.

The picture that stands beside a link to a page is its first one, or the book's first where it has none.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urljoin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.images import get_image_size

from kvreport.site.repository import ask_for_an_issue

_ARROW = '<svg class="sd-octicon"'
_OF_LINKS = 'property="og:image"'


def finish(
    app: Sphinx, pagename: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Mend a page, ask below it for an issue, and name the picture that stands beside links to it."""
    context["script_files"] = _without_thebe_and_twins(context.get("script_files", []))
    if context.get("body"):
        files = {name: Path(app.srcdir) / source for source, name in app.builder.images.items()}
        context["body"] = marked(_cleaned(context["body"]), files) + ask_for_an_issue(app.kvbook_origin, pagename)
    tags = context.get("metatags", "")
    # Only with an address: others fetch the picture, so it must have one of its own. Without, opengraph writes no
    # picture.
    if app.config.ogp_site_url and "og:title" in tags and _OF_LINKS not in tags and (name := _first_picture(app.env)):
        address = urljoin(app.config.ogp_site_url, f"{app.builder.imagedir}/{name}")
        context["metatags"] = f'{tags}\n<meta {_OF_LINKS} content="{address}" />\n'


def _without_thebe_and_twins(scripts: list[Any]) -> list[Any]:
    kept: dict[str, Any] = {}
    for script in scripts:
        key = getattr(script, "attributes", {}).get("body") or str(getattr(script, "filename", script))
        if "thebe" not in key.lower():
            kept.setdefault(key, script)
    return list(kept.values())


def _cleaned(body: str) -> str:
    body = body.replace(' aria-label="Toggle hidden content"', "").replace('role="doc-biblioentry"', 'role="listitem"')
    # Names, operators and punctuation have the colour of all code, and what a link brings is no code.
    body = re.sub(r'<span class="(?:pre|n|o|p)">([^<]*)</span>', r"\1", body)
    body = re.sub(r'<code class="xref download[^>]*>([^<]*)</code>', r"\1", body)
    body = body.replace('class="reference download internal" download=""', "download")
    body = re.sub(r' class="row-(odd|even)"', "", body)
    body = body.replace("</tr>\n", "</tr>")
    body = re.sub(r' class="docutils literal|(card-body) docutils', lambda said: said[1] or ' class="literal', body)
    # A cell of several paragraphs keeps them.
    body = re.sub(r"(<t[dh][^>]*>)<p>((?:(?!<p[ >]|</p>).)*)</p>(</t[dh]>)", r"\1\2\3", body, flags=re.DOTALL)
    if arrow := re.search(r"<path( [^>]*></path>)", body):
        elsewhere = body[arrow.end() :].replace(arrow[0], '<use href="#arrow"></use>')
        body = f'{body[: arrow.start()]}<path id="arrow"{arrow[1]}{elsewhere}'
        # Of arrows the style sheet says how large they are.
        body = re.sub(r'<svg version="1.1" width="1.5em" height="1.5em" class="sd-octicon [^"]*"', _ARROW, body)
    return body


def marked(html: str, files: Mapping[str, Path]) -> str:
    """Say of every picture that it may wait, and of each PNG how large it is."""

    def one(match: re.Match[str]) -> str:
        file = files.get(PurePosixPath(match["source"]).name, Path())
        known = get_image_size(str(file)) if file.suffix == ".png" else None
        # As attributes, which only tell the shape; how wide it is shown is the style sheet's business.
        shape = f'width="{known[0]}" height="{known[1]}" ' if known and " height=" not in match["rest"] else ""
        return f'<img loading="lazy" {shape}{match["rest"]}>'

    return re.sub(r'<img (?P<rest>[^>]*?src="(?P<source>[^"]+)"[^>]*)>', one, html)


def _first_picture(env: BuildEnvironment) -> str | None:
    """Return the file name, in the site, of a picture of the first page that has one; None where there is none."""
    found = [(min(docnames), name) for docnames, name in env.images.values() if docnames and name.endswith(".png")]
    return min(found)[1] if found else None
