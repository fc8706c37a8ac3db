"""What the chapter on exact caches measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvbook.runs.records import Run
from kvreport.chapters.exact_caches import cost, ladder, lengths, paths, tables
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (paths.EXPERIMENT, ladder.EXPERIMENT, cost.EXPERIMENT, lengths.EXPERIMENT)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and their tables; figures and statements take them from here.

    Attributes
    ----------
    ways, ladder, cost, lengths : Run or None
        Of the experiments ``exact_ways``, ``exact_ladder``, ``exact_cost`` and ``exact_lengths``; None for one that is
        not there.
    """

    EXPERIMENTS = EXPERIMENTS

    ways: Run | None
    ladder: Run | None
    cost: Run | None
    lengths: Run | None = None

    @cached_property
    def shares(self) -> pd.DataFrame:
        """`tables.shares`."""
        return tables.shares(self.ways.rows)

    @cached_property
    def rungs(self) -> pd.DataFrame:
        """`tables.ladder_table`."""
        return tables.ladder_table(self.ladder.rows)

    @cached_property
    def errors(self) -> dict[str, pd.DataFrame]:
        """`tables.error_ratios`, by the column of the error."""
        return {error: tables.error_ratios(self.ladder.rows, error) for error in tables.ERRORS}

    @cached_property
    def costs(self) -> dict[str, Estimate]:
        """`tables.costs`."""
        return tables.costs(self.cost.rows)
