"""Old addresses lead on: chapters were once numbered by their documents, and are now in the order of a reader's questions."""

import html
from pathlib import Path

from sphinx.application import Sphinx

# By the name without number: the number that it had.
FORMERLY = {
    "layer_drift": "01", "prompt_reuse": "02", "from_scratch": "03", "blog_past": "04", "static_cache": "05",
    "where_drift_begins": "06", "exact_caches": "07", "which_path_is_right": "08", "bug_or_rounding": "09",
    "does_it_matter": "10",
}  # fmt: skip
# A fragment is kept by the script alone; without it the page is reached all the same.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<meta name="robots" content="noindex">
<link rel="canonical" href="{to}">
<script>location.replace("{to}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={to}">
<p>This chapter has moved: <a href="{to}">{to}</a>.</p>
</html>
"""


def connect(app: Sphinx) -> None:
    """Join the build, when all pages are written."""
    app.connect("build-finished", _write)


def _write(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for docname in app.env.found_docs:
        folder, _, stem = docname.rpartition("/")
        number, _, name = stem.partition("_")
        if folder == "chapters" and FORMERLY.get(name, number) != number:
            file = Path(app.outdir, folder, f"{FORMERLY[name]}_{name}.html")
            file.write_text(_PAGE.format(to=html.escape(f"{stem}.html")), "utf-8")
