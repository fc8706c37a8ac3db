"""Every page from a fresh run: what is stale is executed before Sphinx reads; outputs then join sources."""

import json
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from kvbook import fingerprint
from kvbook.errors import UserError
from kvbook.runs import evidence
from kvreport.benchmarks import growing
from kvreport.benchmarks import results as bench
from kvreport.publishing import checkout as origin
from kvreport.publishing import evaluated, published
from kvreport.running import execution, planning
from kvreport.site import citations, inserts, pdf, sentences
from kvreport.site.overlay import Files, overlay

_CHAPTERS = "kvbook_chapters"


def connect(app: Sphinx) -> None:
    """Join the build."""
    app.connect("builder-inited", _execute_what_is_stale)
    app.connect("env-get-outdated", _read_again_what_was_run_again)
    app.connect("source-read", _show_outputs)


def _execute_what_is_stale(app: Sphinx) -> None:
    # One way to run a chapter: after `make book` there is nothing left to do here, and a plain
    # `jupyter-book build .` gives the full book too.
    try:
        chapters = planning.plan()
        execution.bring_up_to_date(chapters)
    except UserError as error:
        # Not an exception of Sphinx: Jupyter Book would bury its one line under a trace of its own.
        raise SystemExit(f"kvbook: {error}") from None
    setattr(app, _CHAPTERS, {chapter.source.resolve(): chapter for chapter in chapters})
    citations.write(chapters, origin.of(Path(app.srcdir)))


def _chapter(app: Sphinx, docname: str) -> planning.Chapter | None:
    return getattr(app, _CHAPTERS).get(Path(app.env.doc2path(docname)).resolve())


def _read_again_what_was_run_again(
    app: Sphinx, env: BuildEnvironment, _added: set[str], _changed: set[str], _removed: set[str]
) -> list[str]:
    files = {docname: Path(env.doc2path(docname)) for docname in env.found_docs}
    sources = {docname: fingerprint.of_file(file) for docname, file in files.items()}
    executed = {docname: chapter.executed for docname in files if (chapter := _chapter(app, docname)) is not None}
    runs = {docname: json.loads(file.read_text("utf-8"))["metadata"]["kvbook"] for docname, file in executed.items()}
    # What a citation says of the book stands on every page too, and whether there are PDFs.
    now = {"book": f"{origin.of(Path(app.srcdir))} {pdf.wanted()}"}
    # What the chapters' statements and verdicts are evaluated from.
    books = (evaluated.published(chapter.name) for chapter in getattr(app, _CHAPTERS).values())
    now["evidence"] = fingerprint.of_values([evidence.manifest(), *(book["made_of"] for book in books if book)])
    # What writes tables and lists into pages.
    now["code"] = fingerprint.of_source(["kvreport.site.inserts", __name__])
    # The last benches, which pages show.
    now["bench"] = [run.hash for of in (bench.EXPERIMENT, growing.EXPERIMENT) for run in bench.latest(of).values()]
    before, env.kvbook_book = getattr(env, "kvbook_book", now), now
    runs_before, env.kvbook_runs = getattr(env, "kvbook_runs", runs), runs
    sources_before, env.kvbook_sources = getattr(env, "kvbook_sources", sources), sources
    if before != now:
        return sorted(files)
    # Sphinx goes by dates, and takes an edit for old that was made after the clock had been set back.
    again = {docname for docname in files if sources_before.get(docname) != sources[docname]}
    again |= {docname for docname in runs if runs_before.get(docname) != runs[docname]}
    if runs_before != runs:
        again |= {docname for docname, file in files.items() if inserts.shows_chapters(file.read_text("utf-8"))}
    return sorted(again)


def _show_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    if (chapter := _chapter(app, docname)) is None:
        return
    site = origin.site_address()
    files = Files(
        page=chapter.source.parent, figures=chapter.figures, made=citations.folder(chapter), executed=chapter.executed,
        address=f"{site}{docname}.html" if site else None,
        pdf=f"../{pdf.FOLDER}/{chapter.stem}.pdf" if pdf.wanted() else None,
    )
    try:
        notebook, ran = json.loads(source[0]), published.read(chapter.executed)
        said = sentences.say(notebook, ran, chapter)
        merged = overlay(said.notebook, ran, files, said.captions)
    except UserError as error:
        raise SystemExit(f"kvbook: chapter {chapter.stem}: {error}") from None
    source[0] = json.dumps(merged)
