"""What the chapter on bug or rounding measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.bug_or_rounding import first_bad_layer, symptoms, tables
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (symptoms.EXPERIMENT, first_bad_layer.EXPERIMENT)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and their tables; figures and statements take them from here.

    Attributes
    ----------
    drifts, by_layer : Run or None
        Of the experiments ``bug_or_rounding`` and ``first_bad_layer``; None for one that is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    drifts: Run | None
    by_layer: Run | None

    @property
    def model(self) -> str:
        """The first model: the one that is drawn boldly."""
        return self.drifts.about["models"][0]["name"]

    @cached_property
    def judged(self) -> pd.DataFrame:
        """`tables.judged`."""
        return tables.judged(self.drifts.rows)

    @cached_property
    def planted(self) -> pd.DataFrame:
        """Of `judged` what was planted, and the clean families."""
        return tables.planted(self.judged)

    @cached_property
    def symptoms(self) -> pd.DataFrame:
        """Of `judged` the documents' symptoms."""
        return tables.of_documents(self.judged)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """`tables.lines`."""
        return tables.lines(self.drifts.rows)

    @cached_property
    def in_fp64(self) -> pd.DataFrame:
        """`tables.in_fp64`."""
        return tables.in_fp64(self.drifts.rows)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """`tables.layers`."""
        return tables.layers(self.by_layer.rows)

    @cached_property
    def first_layers(self) -> pd.DataFrame:
        """`tables.first_layers`."""
        return tables.first_layers(self.by_layer.rows)
