"""Faults that this set of packages puts into every page, taken out again.

sphinx-thebe adds its scripts twice, so every page logs that THEBE_JS_URL is declared already;
sphinx-togglebutton gives a code toggle a name that differs from the text in it; sphinxcontrib-bibtex marks
references with a role that is not allowed in a list. docutils wraps the text of each cell and each word of code once
more than any style asks for, which is a tenth of a page that is one long table.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def connect(app: Sphinx) -> None:
    """Join the build, after all who add to a page."""
    app.connect("html-page-context", _clean, priority=900)


def _clean(
    _app: Sphinx, _pagename: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    context["script_files"] = _without_thebe_and_twins(context.get("script_files", []))
    if context.get("body"):
        body = context["body"].replace(' aria-label="Toggle hidden content"', "")
        context["body"] = _without_wrappers(body.replace('role="doc-biblioentry"', 'role="listitem"'))


def _without_wrappers(body: str) -> str:
    body = re.sub(r'<span class="pre">([^<]*)</span>', r"\1", body)
    # A cell of several paragraphs keeps them.
    return re.sub(r"(<t[dh][^>]*>)<p>((?:(?!<p[ >]|</p>).)*)</p>(</t[dh]>)", r"\1\2\3", body, flags=re.DOTALL)


def _without_thebe_and_twins(scripts: list[Any]) -> list[Any]:
    seen: set[str] = set()
    kept = []
    for script in scripts:
        key = getattr(script, "attributes", {}).get("body") or str(getattr(script, "filename", script))
        if key not in seen and "thebe" not in key.lower():
            seen.add(key)
            kept.append(script)
    return kept
