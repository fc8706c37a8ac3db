"""What the chapter on the blog post about past_key_values measured: its run, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.blog_past import past_tables, tables
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (past_tables.EXPERIMENT,)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's run and its tables; figures, statements and claims take them from here.

    Attributes
    ----------
    past : Run
        Of the experiment ``past_tables``.
    """

    EXPERIMENTS = EXPERIMENTS

    past: Run

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All rows, with their difference in ``roundoffs``."""
        return self.past.rows.assign(roundoffs=tables.roundoffs(self.past.rows))

    @cached_property
    def variants(self) -> pd.DataFrame:
        """`tables.by_variant`."""
        return tables.by_variant(self.rows)

    @cached_property
    def own(self) -> pd.DataFrame:
        """`tables.own_tables`, each family as it was in mid-2023."""
        return tables.own_tables(tables.as_in_2023(self.rows))

    @cached_property
    def beside(self) -> pd.DataFrame:
        """`tables.beside_published`."""
        return tables.beside_published(self.own)

    @cached_property
    def apart(self) -> pd.DataFrame:
        """`tables.relative_apart`."""
        return tables.relative_apart(self.beside)
