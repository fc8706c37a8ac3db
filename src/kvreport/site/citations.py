"""In ``_build/citations/<chapter>/``: a BibTeX file for every figure and table of the book's rows, and the verdicts."""

from collections.abc import Iterable
from pathlib import Path

from kvreport.publishing import citation, keep, published
from kvreport.publishing.checkout import Origin
from kvreport.running.planning import Chapter


def folder(chapter: Chapter) -> Path:
    """Name the folder of a chapter's entries."""
    return chapter.folders.figures.with_name("citations") / chapter.stem


def write(chapters: Iterable[Chapter], book: Origin) -> None:
    """Write the entries of all chapters."""
    for chapter in chapters:
        for item in published.of(chapter.executed, chapter.source):
            entry = folder(chapter) / f"{item.name}.bib"
            # What is the same stays: Sphinx reads a page again when a file that it offers is newer.
            if item.citable:
                keep(entry, citation.of_published(item, book).encode())
            else:
                entry.unlink(missing_ok=True)
            if item.judged:
                keep(entry.with_suffix(".csv"), item.rows.encode())
