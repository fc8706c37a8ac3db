"""Every page from a fresh run: what is stale is executed before Sphinx reads; outputs then join sources."""

import json
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from kvbook import UserError, fingerprint
from kvbook.runs import evidence
from kvreport.benchmarks import results
from kvreport.publishing import evaluated, published
from kvreport.running import execution, planning
from kvreport.site import inserts, pdf, sentences
from kvreport.site.overlay import overlay, write_citations


def execute_what_is_stale(app: Sphinx) -> None:
    """Execute the chapters whose copies are not fresh."""
    # One way to run a chapter: after `make book` there is nothing left to do here, and a plain
    # `jupyter-book build .` gives the full book too.
    try:
        chapters = planning.plan()
        execution.bring_up_to_date(chapters)
    except UserError as error:
        # Not an exception of Sphinx: Jupyter Book would bury its one line under a trace of its own.
        raise SystemExit(f"kvbook: {error}") from None
    app.kvbook_chapters = {f"chapters/{chapter.stem}": chapter for chapter in chapters}
    write_citations(chapters, app.kvbook_origin)


def read_again_what_was_run_again(
    app: Sphinx, env: BuildEnvironment, _added: set[str], _changed: set[str], _removed: set[str]
) -> list[str]:
    """Name the pages that are to be read again: what they show has changed."""
    runs = {docname: planning.run_of(chapter.executed) for docname, chapter in app.kvbook_chapters.items()}
    books = (evaluated.published(chapter.name) for chapter in app.kvbook_chapters.values())
    on_every_page = fingerprint.of_values([
        # What a citation says of the book, and whether there are PDFs.
        f"{app.kvbook_origin} {pdf.wanted()}",
        # What the chapters' statements and verdicts are evaluated from.
        [evidence.manifest(), *(book["made_of"] for book in books)],
        # What writes tables and lists into pages.
        fingerprint.of_source(["kvreport.site.inserts", __name__]),
        # The last benches, which pages show.
        [run.hash for of in (results.EXPERIMENT, results.GROWTH) for run in results.latest(of).values()],
    ])
    now = {}
    for docname in env.found_docs:
        # Sphinx goes by dates, and takes an edit for old that was made after the clock had been set back.
        text = Path(env.doc2path(docname)).read_text("utf-8")
        shown = runs if inserts.shows_chapters(text) else runs.get(docname)
        now[docname] = fingerprint.of_values([on_every_page, text, shown])
    before, env.kvbook_made_of = getattr(env, "kvbook_made_of", {}), now
    return sorted(docname for docname in now if before.get(docname) != now[docname])


def show_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Join a chapter's source with its outputs."""
    if (chapter := app.kvbook_chapters.get(docname)) is None:
        return
    try:
        notebook, ran = json.loads(source[0]), published.read(chapter.executed)
        said, captions = sentences.say(notebook, ran, chapter)
        merged = overlay(said, ran, chapter, captions, app.kvbook_origin.site)
    except UserError as error:
        raise SystemExit(f"kvbook: chapter {chapter.stem}: {error}") from None
    source[0] = json.dumps(merged)
