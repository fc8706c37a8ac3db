"""What the chapter on the thread about a model from scratch measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvbook.runs.records import Run
from kvreport.chapters.from_scratch import logits, loss, speed, tables, texts
from kvreport.chapters.from_scratch.gpt.paths import refill_name
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (logits.EXPERIMENT, loss.EXPERIMENT, loss.HELD, texts.EXPERIMENT, speed.EXPERIMENT)


@dataclass(frozen=True)
class Results(ChapterResults):
    """Runs of the chapter and their tables; figures, statements and claims take them from here.

    Attributes
    ----------
    logits, loss, held, texts, speed : Run or None
        Of the experiments ``scratch_logits``, ``scratch_loss``, ``scratch_held``, ``scratch_texts``, ``scratch_speed``;
        None for one that is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    logits: Run | None
    loss: Run | None
    held: Run | None
    texts: Run | None
    speed: Run | None

    @property
    def model(self) -> dict[str, Any]:
        """What the runs say of their model."""
        run = self.loss or next(run for run in self.runs.values() if run is not None)
        return run.about["models"][0]

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
        return tables.cost_table(self.gaps, self.times, self.speed.rows)

    @cached_property
    def times(self) -> dict[str, Estimate]:
        """`tables.times`."""
        return tables.times(self.speed.rows)
