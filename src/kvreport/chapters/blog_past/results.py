"""What the chapter on the blog post about past_key_values measured: its run, and each of its tables once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.blog_past import past_tables, tables
from kvreport.chapters.blog_past.settings import PastTablesSettings

EXPERIMENTS = (past_tables.EXPERIMENT,)


@dataclass(frozen=True)
class Results:
    """The chapter's run and its tables; figures, statements and claims take them from here.

    Attributes
    ----------
    past : Run
        Of the experiment ``past_tables``.
    """

    past: Run

    @classmethod
    def of(cls, settings: PastTablesSettings) -> "Results":
        """Measure, or read what these settings have measured."""
        return cls(past_tables.EXPERIMENT.run(settings))

    @classmethod
    def of_runs(cls, runs: Mapping[str, Run]) -> "Results":
        """Take the run by its experiment."""
        return cls(runs[past_tables.EXPERIMENT.name])

    @classmethod
    def of_book(cls) -> "Results":
        """Read what the book publishes."""
        return cls.of_runs(next(iter(evidence.published("blog_past", EXPERIMENTS).values())))

    @property
    def runs(self) -> dict[str, Run]:
        """The run by its experiment."""
        return {past_tables.EXPERIMENT.name: self.past}

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
        return tables.relative_apart(self.own)
