"""What the site adds to Jupyter Book, as one Sphinx extension: ``kvreport.site`` in ``_config.yml``.

:mod:`~kvreport.site.executed` executes what is not executed yet and shows outputs with the sources' prose,
:mod:`~kvreport.site.inserts` fills pages with what they gather from all chapters: verdicts, figures, runs,
:mod:`~kvreport.site.folds` folds away what most readers of a chapter pass over,
:mod:`~kvreport.site.repository` tells the pages who wrote the book and where it lives, if that is known,
:mod:`~kvreport.site.badges` lays the atlas's badges beside the pages,
:mod:`~kvreport.site.pdf` prints chapters where that is asked for, and
:mod:`~kvreport.site.finishing` gives each page its last touches: faults mended, pictures that wait.
"""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment

from kvbook.diagnosis import cores
from kvreport.site import badges, executed, finishing, folds, inserts, pdf, repository

STATIC = Path(__file__).parent / "static"


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect all parts; Sphinx calls this."""
    app.add_css_file("kvbook.css")
    for script in ("filter", "memory", "tables"):
        app.add_js_file(f"kvbook-{script}.js", loading_method="defer")
    app.add_transform(folds.Folds)
    app.add_post_transform(folds.TableNumbers)
    # Before the theme looks at its options.
    app.connect("config-inited", repository.tell_the_theme, priority=100)
    app.connect("config-inited", _add_static)
    app.connect("builder-inited", executed.execute_what_is_stale)
    app.connect("env-get-outdated", executed.read_again_what_was_run_again)
    app.connect("source-read", executed.show_outputs)
    app.connect("source-read", inserts.fill_page)
    app.connect("env-updated", _write_on_all_cores)
    # After all who add to a page.
    app.connect("html-page-context", finishing.finish, priority=901)
    app.connect("build-finished", badges.write)
    # Behind all who write pages.
    app.connect("build-finished", pdf.print_chapters, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}


def _write_on_all_cores(app: Sphinx, _env: BuildEnvironment) -> None:
    # Not before: an extension that numbers chapters does not allow pages to be read so.
    app.parallel = cores.as_torch_counts()


def _add_static(_app: Sphinx, config: Config) -> None:
    config.templates_path.append(str(STATIC.with_name("templates")))
    config.html_static_path.append(str(STATIC))
    # What a preview of a link names.
    config.ogp_site_name = config.html_title
    # Browsers ask for an icon in any case, and log an error where there is none.
    config.html_favicon = str(STATIC / "favicon.svg")
