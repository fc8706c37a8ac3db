"""What the chapter on static and dynamic caches measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.static_cache import memory, memory_bandwidth, shapes, speed, tables, texts
from kvreport.chapters.static_cache.settings import StaticCacheSettings

EXPERIMENTS = (
    speed.EXPERIMENT,
    memory_bandwidth.EXPERIMENT,
    memory.EXPERIMENT,
    shapes.EXPERIMENT,
    texts.EXPERIMENT,
)


@dataclass(frozen=True)
class Speeds:
    """What is tabulated of a run of ``static_speed``, this machine's or a recorded one.

    Attributes
    ----------
    run : Run
        Of the experiment ``static_speed``.
    """

    run: Run

    @property
    def rows(self) -> pd.DataFrame:
        """All rows."""
        return self.run.rows

    @cached_property
    def per_repeat(self) -> dict[tables.Way, pd.Series]:
        """`tables.per_repeat`."""
        return tables.per_repeat(self.rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """`tables.speeds`."""
        return tables.speeds(self.rows, self.per_repeat)


@dataclass(frozen=True)
class Results:
    """The chapter's runs and tables; figures, words and claims take them from here.

    Attributes
    ----------
    speed, bandwidth, memory, shapes, texts : Run
        Of the experiments ``static_speed``, ``memory_bandwidth``, ``static_memory``, ``static_shapes``, ``static_texts``.
    """

    speed: Run
    bandwidth: Run
    memory: Run
    shapes: Run
    texts: Run

    @classmethod
    def of(cls, settings: StaticCacheSettings) -> "Results":
        """Measure, or read what these settings have measured."""
        return cls(*(experiment.run(settings) for experiment in EXPERIMENTS))

    @cached_property
    def speeds(self) -> Speeds:
        """Tables of this machine's times."""
        return Speeds(self.speed)

    @cached_property
    def recorded(self) -> Speeds:
        """Tables of the recorded times, of as many tokens as the document's."""
        cited = evidence.cited("static_cache", "the notebook's 200 tokens", [speed.EXPERIMENT])
        return Speeds(cited[speed.EXPERIMENT.name][0])

    @cached_property
    def bound(self) -> tables.Limit:
        """`tables.limit`."""
        return tables.limit(self.bandwidth.rows, self.memory.rows)

    @cached_property
    def beside_published(self) -> pd.DataFrame:
        """`tables.beside_published`."""
        return tables.beside_published(self.speeds.table, "this run")

    @cached_property
    def growths(self) -> dict[str, Estimate]:
        """`tables.growths`."""
        return tables.growths(self.speed.rows)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """`tables.decode_steps`."""
        return tables.decode_steps(self.speed.rows)

    @cached_property
    def partings(self) -> pd.DataFrame:
        """`tables.partings`."""
        return tables.partings(self.texts.rows)
