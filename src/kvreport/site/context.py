"""What a part of a page is written from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvreport.running.planning import Chapter


@dataclass(frozen=True)
class Context:
    """The book as it stands when its pages are read.

    Attributes
    ----------
    chapters : sequence of Chapter
        Executed, in the book's order.
    page : Path
        The folder of the page's source; links are written relative to it.
    root : Path
        The book's folder.
    """

    chapters: Sequence[Chapter]
    page: Path
    root: Path

    @property
    def executed(self) -> list[Path]:
        """The chapters' executed copies."""
        return [chapter.executed for chapter in self.chapters]
