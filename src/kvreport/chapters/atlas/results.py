"""What the chapter on the atlas measured, and the tables of it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.atlas import survey, tables
from kvreport.publishing import processors
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (survey.EXPERIMENT,)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's run and its tables; figures and statements take them from here.

    Attributes
    ----------
    run : Run
        Of the experiment ``atlas``.
    """

    EXPERIMENTS = EXPERIMENTS

    run: Run

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """`tables.rows`."""
        return tables.rows(self.run)

    @cached_property
    def survey(self) -> pd.DataFrame:
        """`tables.survey`."""
        return tables.survey(self.rows)

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """`tables.outcomes`."""
        return tables.outcomes(self.rows)

    @cached_property
    def paths(self) -> pd.DataFrame:
        """`tables.by_path`."""
        return tables.by_path(self.rows)

    @cached_property
    def by_processor(self) -> pd.DataFrame:
        """`tables.by_processor`, of every processor that the book has rows of."""
        return tables.by_processor(
            {processors.label([of.run.about["machine"]]): of.rows for of in self.of_each_processor()}
        )

    @cached_property
    def operations(self) -> pd.DataFrame:
        """`tables.first_operations`."""
        return tables.first_operations(self.rows)
