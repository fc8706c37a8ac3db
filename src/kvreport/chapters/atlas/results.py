"""What the chapter on the atlas measured: its run and the published one, and their tables."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.atlas import survey, tables
from kvreport.chapters.atlas.settings import AtlasSettings

EXPERIMENTS = (survey.EXPERIMENT,)
ROLE = "every architecture"


def recorded() -> Run:
    """Read the run of every architecture that the book cites."""
    return evidence.cited("atlas", ROLE, EXPERIMENTS)[survey.EXPERIMENT.name][0]


@dataclass(frozen=True)
class Results:
    """The chapter's runs and their tables; figures and words take them from here.

    Attributes
    ----------
    own, published : Run
        Of the experiment ``atlas``: this machine's, and the one that the book cites.
    """

    own: Run
    published: Run

    @classmethod
    def of(cls, settings: AtlasSettings) -> "Results":
        """Measure what the settings name, and read what the book cites."""
        return cls(survey.EXPERIMENT.run(settings), recorded())

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The published rows, by architecture."""
        return tables.rows(self.published)

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

    @cached_property
    def compared(self) -> pd.DataFrame:
        """`tables.compared`."""
        return tables.compared(tables.rows(self.own), self.rows)
