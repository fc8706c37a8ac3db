"""What the chapter on whether the difference matters measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.measuring.survival import Survival
from kvbook.runs.records import Run
from kvreport.chapters.does_it_matter import (
    after_divergence,
    drift_by_position,
    first_divergence,
    tables,
    teacher_forced,
)
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (
    teacher_forced.EXPERIMENT, drift_by_position.EXPERIMENT, first_divergence.EXPERIMENT, after_divergence.EXPERIMENT,
)  # fmt: skip


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and their tables; figures and statements take them from here.

    Attributes
    ----------
    forced, positions, parting, behind : Run or None
        Of the experiments ``teacher_forced``, ``drift_by_position``, ``first_divergence`` and ``after_divergence``; None for
        one that is not there, such as the last one where no text diverged.
    """

    EXPERIMENTS = EXPERIMENTS

    forced: Run | None
    positions: Run | None
    parting: Run | None
    behind: Run | None

    @property
    def written(self) -> int:
        """Tokens that are written to each prompt."""
        n_tokens = self.parting.about["settings"]["n_tokens"]
        return n_tokens - n_tokens // 4

    @cached_property
    def published(self) -> pd.DataFrame:
        """`tables.elsewhere`."""
        return tables.elsewhere()

    @cached_property
    def axes(self) -> pd.DataFrame:
        """`tables.axes_table`."""
        return tables.axes_table(self.forced.rows)

    @cached_property
    def margins(self) -> pd.DataFrame:
        """`tables.margins_table`."""
        return tables.margins_table(self.forced.rows)

    @cached_property
    def flips_by_rounding(self) -> pd.DataFrame:
        """Rows in which nothing but rounding has flipped the top-1 token."""
        rows = self.forced.rows
        return rows[(rows["flip"] > 0) & rows["way"].isin(tables.ROUNDING)]

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], Survival]:
        """`tables.partings`."""
        return tables.partings(self.parting.rows)

    @cached_property
    def partings(self) -> pd.DataFrame:
        """`tables.partings_table`."""
        return tables.partings_table(self.curves, self.parting.rows, self.axes, self.written)

    @cached_property
    def along(self) -> pd.DataFrame:
        """`tables.positions_table`."""
        return tables.positions_table(self.positions.rows)

    @cached_property
    def growth(self) -> pd.DataFrame:
        """`tables.growth`."""
        return tables.growth(self.positions.rows)

    @cached_property
    def snowball(self) -> pd.DataFrame | None:
        """`tables.snowball`; None where no text parted."""
        return None if self.behind is None else tables.snowball(self.behind.rows)
