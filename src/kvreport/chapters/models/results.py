"""What the page on the models shows: its run, and each of its tables once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.models import greedy_samples, tables
from kvreport.chapters.models.settings import ModelsSettings

EXPERIMENTS = (greedy_samples.EXPERIMENT,)


@dataclass(frozen=True)
class Results:
    """The page's run and its tables; figures and statements take them from here.

    Attributes
    ----------
    greedy : Run
        Of the experiment ``greedy_samples``.
    """

    greedy: Run

    @classmethod
    def of(cls, settings: ModelsSettings) -> "Results":
        """Let the models write, or read what they wrote with these settings."""
        return cls(greedy_samples.EXPERIMENT.run(settings))

    @classmethod
    def of_runs(cls, runs: Mapping[str, Run]) -> "Results":
        """Take the run by its experiment."""
        return cls(runs[greedy_samples.EXPERIMENT.name])

    @classmethod
    def of_book(cls) -> "Results":
        """Read what the book publishes."""
        return cls.of_runs(next(iter(evidence.published("models", EXPERIMENTS).values())))

    @property
    def runs(self) -> dict[str, Run]:
        """The run by its experiment."""
        return {greedy_samples.EXPERIMENT.name: self.greedy}

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
