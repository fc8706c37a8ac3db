"""What the chapter on where drift begins measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    equal_shapes,
    gemm_map,
    length_sweep,
    operation_replay,
    tables,
)
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (
    operation_replay.EXPERIMENT,
    gemm_map.EXPERIMENT,
    length_sweep.EXPERIMENT,
    attention_forms.EXPERIMENT,
    cache_factorial.EXPERIMENT,
    equal_shapes.EXPERIMENT,
)

# The role of recorded runs that differ in the version of torch alone.
OLDER_TORCH = "an older torch"


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and their tables; figures and statements take them from here.

    Attributes
    ----------
    replayed, mapped, swept, attention, factorial, prefills : Run or None
        Of the experiments ``operation_replay``, ``gemm_map``, ``length_sweep``, ``attention_forms``,
        ``cache_factorial``, ``equal_shapes``; None for one that is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    replayed: Run | None
    mapped: Run | None
    swept: Run | None
    attention: Run | None
    factorial: Run | None
    prefills: Run | None = None

    @staticmethod
    def by_torch() -> list[Run]:
        """Read the recorded replays of equal texts on several versions of torch, the oldest first."""
        return evidence.cited("where_drift_begins", OLDER_TORCH, [operation_replay.EXPERIMENT])["operation_replay"]

    @property
    def model(self) -> str:
        """The first model, of which more is shown than of the others."""
        return self.replayed.about["models"][0]["name"]

    @cached_property
    def operations(self) -> pd.DataFrame:
        """`tables.operation_shares`."""
        return tables.operation_shares(self.replayed.rows)

    @cached_property
    def by_text(self) -> pd.DataFrame:
        """`tables.kinds_by_text`."""
        return tables.kinds_by_text(self.replayed.rows)

    @cached_property
    def shares(self) -> pd.DataFrame:
        """`tables.kind_shares`."""
        return tables.kind_shares(self.by_text)

    @cached_property
    def first_by_text(self) -> pd.DataFrame:
        """`tables.first_by_text`."""
        return tables.first_by_text(self.replayed.rows)

    @cached_property
    def first(self) -> pd.DataFrame:
        """`tables.first_differences`."""
        return tables.first_differences(self.first_by_text)

    @cached_property
    def products(self) -> pd.DataFrame:
        """`tables.gemm_states`."""
        return tables.gemm_states(self.mapped.rows)

    @cached_property
    def lengths(self) -> pd.DataFrame:
        """`tables.length_shares`."""
        return tables.length_shares(self.swept.rows)

    @cached_property
    def identical(self) -> pd.DataFrame:
        """`tables.identical_lengths`."""
        return tables.identical_lengths(self.swept.rows)

    @cached_property
    def forms(self) -> pd.DataFrame:
        """`tables.form_shares`."""
        return tables.form_shares(self.attention.rows)

    @cached_property
    def equal(self) -> pd.DataFrame:
        """`tables.equal_shares`."""
        return tables.equal_shares(self.attention.rows)

    @cached_property
    def drifts(self) -> pd.DataFrame:
        """`tables.factorial_table`."""
        return tables.factorial_table(self.factorial.rows)
