"""What the chapter on which path is right measured: its run, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.which_path_is_right import path_errors, tables
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (path_errors.EXPERIMENT,)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's run and tables; figures, statements and claims take them from here.

    Attributes
    ----------
    errors : Run or None
        Of the experiment ``path_errors``; None where it is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    errors: Run | None

    @property
    def rows(self) -> pd.DataFrame:
        """All rows."""
        return self.errors.rows

    @cached_property
    def files(self) -> dict[str, int]:
        """How many files each model read; they are what intervals count."""
        return self.rows.groupby("model", sort=False)["source"].nunique().to_dict()

    @cached_property
    def layers(self) -> pd.DataFrame:
        """`tables.layer_table`, the reference's own paths included."""
        return tables.layer_table(self.rows)

    @cached_property
    def texts(self) -> pd.DataFrame:
        """`tables.by_sample` of the dtypes under test."""
        return tables.by_sample(tables.measured(self.rows))

    @cached_property
    def series(self) -> pd.DataFrame:
        """`tables.series_table`."""
        return tables.series_table(self.rows, self.texts)

    @cached_property
    def positions(self) -> pd.DataFrame:
        """`tables.position_table`."""
        return tables.position_table(self.rows)

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """`tables.slope_of_ratio`."""
        return tables.slope_of_ratio(self.rows)

    @cached_property
    def quality(self) -> pd.DataFrame:
        """`tables.quality_table`."""
        return tables.quality_table(self.rows)

    @cached_property
    def shift(self) -> pd.DataFrame:
        """`tables.shift_table`, without the control."""
        return tables.shift_table(self.rows, self.quality[self.quality["path"] != path_errors.OFF_BY_ONE])

    @cached_property
    def reference(self) -> pd.DataFrame:
        """`tables.reference_table`."""
        return tables.reference_table(self.rows)
