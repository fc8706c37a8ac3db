"""What the chapter on the thread about a model from scratch measured: its runs, and each of its tables once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.from_scratch import logits, loss, speed, tables, texts
from kvreport.chapters.from_scratch.gpt.paths import refill_name
from kvreport.chapters.from_scratch.settings import ScratchSettings

EXPERIMENTS = (logits.EXPERIMENT, loss.EXPERIMENT, loss.HELD, texts.EXPERIMENT, speed.EXPERIMENT)


@dataclass(frozen=True)
class Results:
    """Runs of the chapter and their tables; figures, statements and claims take them from here.

    Attributes
    ----------
    logits, loss, held, texts, speed : Run
        Of the experiments ``scratch_logits``, ``scratch_loss``, ``scratch_held``, ``scratch_texts``, ``scratch_speed``.
    """

    logits: Run
    loss: Run
    held: Run
    texts: Run
    speed: Run

    @classmethod
    def of(cls, settings: ScratchSettings) -> "Results":
        """Measure, or read what these settings have measured."""
        return cls.of_runs({experiment.name: experiment.run(settings) for experiment in EXPERIMENTS})

    @classmethod
    def of_runs(cls, runs: Mapping[str, Run]) -> "Results":
        """Take runs by their experiment."""
        return cls(*(runs[experiment.name] for experiment in EXPERIMENTS))

    @classmethod
    def of_book(cls) -> "Results":
        """Read what the book publishes, which is of the thread's own size."""
        return cls.of_runs(next(iter(evidence.published("from_scratch", EXPERIMENTS).values())))

    @property
    def runs(self) -> dict[str, Run]:
        """The runs by their experiment."""
        found = (self.logits, self.loss, self.held, self.texts, self.speed)
        return {experiment.name: run for experiment, run in zip(EXPERIMENTS, found, strict=True)}

    @property
    def model(self) -> dict[str, Any]:
        """What the runs say of their model."""
        return self.loss.about["models"][0]

    @property
    def block(self) -> int:
        """The model's block, in characters."""
        return self.model["shape"]["block"]

    @property
    def half(self) -> str:
        """Name of the cache that is refilled at every half block."""
        return refill_name(max(1, self.block // 2))

    @cached_property
    def finest(self) -> str | None:
        """`tables.finest`."""
        return tables.finest(self.logits.rows)

    @cached_property
    def largest(self) -> pd.DataFrame:
        """`tables.largest`."""
        return tables.largest(self.logits.rows)

    @cached_property
    def equal(self) -> pd.DataFrame:
        """`tables.equal_table`."""
        return tables.equal_table(self.logits.rows)

    @cached_property
    def buckets(self) -> pd.DataFrame:
        """`tables.bucket_table`."""
        return tables.bucket_table(self.loss.rows)

    @cached_property
    def behind(self) -> pd.DataFrame:
        """`tables.behind_table`."""
        return tables.behind_table(self.loss.rows)

    @cached_property
    def gaps(self) -> dict[tuple[str, str], Estimate]:
        """`tables.gap_table`."""
        return tables.gap_table(self.behind, self.block)

    @cached_property
    def closed(self) -> dict[str, Estimate | None]:
        """`tables.closed_table`."""
        return tables.closed_table(self.behind, self.gaps)

    @cached_property
    def window_loss(self) -> Estimate:
        """`tables.window_loss`."""
        return tables.window_loss(self.behind)

    @cached_property
    def causes(self) -> pd.DataFrame:
        """`tables.causes_table`."""
        return tables.causes_table(self.gaps, self.block)

    @cached_property
    def held_gap(self) -> Estimate:
        """`tables.held_gap`."""
        return tables.held_gap(self.held.rows)

    @cached_property
    def best_held(self) -> tuple[int, Estimate]:
        """`tables.best_held`."""
        return tables.best_held(self.held.rows)

    @cached_property
    def partings(self) -> pd.DataFrame:
        """`tables.divergence` of the reply's cache from its own window."""
        return tables.divergence(self.texts.rows, tables.REPLY, texts.REPLYS_WINDOW)

    @cached_property
    def excerpts(self) -> pd.DataFrame:
        """`tables.excerpts`."""
        return tables.excerpts(self.texts.rows)

    @cached_property
    def speeds(self) -> pd.DataFrame:
        """`tables.speed_table`."""
        return tables.speed_table(self.speed.rows)

    @cached_property
    def run_ratios(self) -> dict[str, Estimate]:
        """`tables.run_ratios`."""
        return tables.run_ratios(self.speed.rows)

    @cached_property
    def costs(self) -> pd.DataFrame:
        """`tables.cost_table`."""
        return tables.cost_table(self.gaps, self.speed.rows)
