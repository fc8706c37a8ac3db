"""What the chapter on the atlas measured, and the tables of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.atlas import survey, tables
from kvreport.chapters.atlas.settings import AtlasSettings

EXPERIMENTS = (survey.EXPERIMENT,)


@dataclass(frozen=True)
class Results:
    """The chapter's run and its tables; figures and statements take them from here.

    Attributes
    ----------
    run : Run
        Of the experiment ``atlas``.
    """

    run: Run

    @classmethod
    def of(cls, settings: AtlasSettings) -> "Results":
        """Measure what the settings name."""
        return cls(survey.EXPERIMENT.run(settings))

    @classmethod
    def of_runs(cls, runs: Mapping[str, Run]) -> "Results":
        """Take the run by its experiment."""
        return cls(runs[survey.EXPERIMENT.name])

    @classmethod
    def of_book(cls) -> "Results":
        """Read what the book publishes."""
        return cls.of_runs(next(iter(evidence.published("atlas", EXPERIMENTS).values())))

    @property
    def runs(self) -> dict[str, Run]:
        """The run by its experiment."""
        return {survey.EXPERIMENT.name: self.run}

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
    def operations(self) -> pd.DataFrame:
        """`tables.first_operations`."""
        return tables.first_operations(self.rows)
