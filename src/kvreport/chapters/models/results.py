"""What the page on the models shows: its run, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.models import greedy_samples, tables
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (greedy_samples.EXPERIMENT,)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The page's run and its tables; figures and statements take them from here.

    Attributes
    ----------
    greedy : Run
        Of the experiment ``greedy_samples``.
    """

    EXPERIMENTS = EXPERIMENTS

    greedy: Run

    @cached_property
    def architectures(self) -> pd.DataFrame:
        """`tables.architectures`."""
        return tables.architectures()

    @cached_property
    def memory(self) -> pd.DataFrame:
        """`tables.memory`."""
        return tables.memory()

    @cached_property
    def scores(self) -> pd.DataFrame:
        """`tables.stand_ins`."""
        return tables.stand_ins()

    @cached_property
    def curves(self) -> pd.DataFrame:
        """`tables.curves`, with as many points as a figure can show."""
        return tables.thinned(tables.curves())

    @cached_property
    def samples(self) -> pd.DataFrame:
        """`tables.samples`."""
        return tables.samples(self.greedy.rows)
