"""What the chapter on where drift begins measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    gemm_map,
    length_sweep,
    operation_replay,
    tables,
)
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings

EXPERIMENTS = (
    operation_replay.EXPERIMENT,
    gemm_map.EXPERIMENT,
    length_sweep.EXPERIMENT,
    attention_forms.EXPERIMENT,
    cache_factorial.EXPERIMENT,
)

# The role of recorded runs that differ in the version of torch alone.
OLDER_TORCH = "an older torch"


@dataclass(frozen=True)
class Results:
    """The chapter's runs and their tables; figures and words take them from here.

    Attributes
    ----------
    replayed, mapped, swept, attention, factorial : Run
        Of the experiments ``operation_replay``, ``gemm_map``, ``length_sweep``, ``attention_forms``, ``cache_factorial``.
    """

    replayed: Run
    mapped: Run
    swept: Run
    attention: Run
    factorial: Run

    @classmethod
    def of(cls, settings: WhereDriftBeginsSettings) -> "Results":
        """Measure, or read what these settings have measured."""
        return cls(*(experiment.run(settings) for experiment in EXPERIMENTS))

    @staticmethod
    def by_torch() -> list[Run]:
        """Read the recorded replays of equal texts on several versions of torch, the oldest first."""
        return evidence.cited("where_drift_begins", OLDER_TORCH, [operation_replay.EXPERIMENT])["operation_replay"]

    @cached_property
    def states(self) -> pd.DataFrame:
        """`tables.operation_states`."""
        return tables.operation_states(self.replayed.rows)

    @cached_property
    def shares(self) -> pd.DataFrame:
        """`tables.kind_shares`."""
        return tables.kind_shares(self.replayed.rows)

    @cached_property
    def first(self) -> pd.DataFrame:
        """`tables.first_differences`."""
        return tables.first_differences(self.replayed.rows)

    @cached_property
    def unequal(self) -> pd.DataFrame:
        """`tables.inputs_unequal`."""
        return tables.inputs_unequal(self.replayed.rows)

    @cached_property
    def products(self) -> pd.DataFrame:
        """`tables.gemm_states`."""
        return tables.gemm_states(self.mapped.rows)

    @cached_property
    def lengths(self) -> pd.DataFrame:
        """`tables.sweep_states`."""
        return tables.sweep_states(self.swept.rows)

    @cached_property
    def identical(self) -> pd.DataFrame:
        """`tables.identical_lengths`."""
        return tables.identical_lengths(self.swept.rows)

    @cached_property
    def forms(self) -> pd.DataFrame:
        """`tables.form_shares`."""
        return tables.form_shares(self.attention.rows)

    @cached_property
    def equal(self) -> pd.Series:
        """`tables.equal_shares`."""
        return tables.equal_shares(self.attention.rows)

    @cached_property
    def drifts(self) -> pd.DataFrame:
        """`tables.factorial_table`."""
        return tables.factorial_table(self.factorial.rows)

    @cached_property
    def faults(self) -> pd.DataFrame:
        """`tables.whose_fault`."""
        return tables.whose_fault(self.drifts)
