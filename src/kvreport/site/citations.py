"""In ``_build/citations/<chapter>/``: a BibTeX file for every figure and table of the book's rows, and the verdicts."""

from collections.abc import Iterable
from pathlib import Path

from kvreport.publishing import citation, published
from kvreport.publishing.checkout import Origin
from kvreport.running.planning import Chapter


def folder(chapter: Chapter) -> Path:
    """Name the folder of a chapter's entries."""
    return chapter.folders.figures.with_name("citations") / chapter.stem


def write(chapters: Iterable[Chapter], book: Origin) -> None:
    """Write the entries of all chapters."""
    for chapter in chapters:
        place = folder(chapter)
        place.mkdir(parents=True, exist_ok=True)
        for item in published.of(chapter.executed, chapter.source):
            texts = {"bib": citation.of_published(item, book)} if item.citable else {}
            texts |= {"csv": item.rows} if item.judged else {}
            if not item.citable:
                (place / f"{item.name}.bib").unlink(missing_ok=True)
            for kind, text in texts.items():
                file = place / f"{item.name}.{kind}"
                # Only when it differs: Sphinx reads a page again when a file that it offers is newer.
                if not file.is_file() or file.read_text("utf-8") != text:
                    file.write_text(text, "utf-8")
