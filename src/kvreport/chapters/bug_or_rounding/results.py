"""What the chapter on bug or rounding measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.bug_or_rounding import first_bad_layer, symptoms, tables
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings

EXPERIMENTS = (symptoms.EXPERIMENT, first_bad_layer.EXPERIMENT)


@dataclass(frozen=True)
class Results:
    """The chapter's runs and their tables; figures and words take them from here.

    Attributes
    ----------
    drifts, by_layer : Run
        Of the experiments ``bug_or_rounding`` and ``first_bad_layer``.
    """

    drifts: Run
    by_layer: Run

    @classmethod
    def of(cls, settings: BugOrRoundingSettings) -> "Results":
        """Measure, or read what these settings have measured."""
        return cls(*(experiment.run(settings) for experiment in EXPERIMENTS))

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
    def layers(self) -> pd.DataFrame:
        """`tables.layers`."""
        return tables.layers(self.by_layer.rows)
