"""What the chapter on layer drift measured: its runs, and each of its tables once."""

from dataclasses import dataclass, replace
from functools import cached_property

import pandas as pd

from kvbook.measuring.estimates import Resampled
from kvbook.runs.records import Run
from kvreport.chapters.layer_drift import by_layer, by_length, greedy_paths, mitigations, tables
from kvreport.publishing import documents
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (
    by_layer.EXPERIMENT, greedy_paths.EXPERIMENT, mitigations.EXPERIMENT, by_layer.TRAINED, by_layer.LENGTHS,
)  # fmt: skip


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and tables; figures, statements and claims take them from here.

    Attributes
    ----------
    drift, greedy, mitigated, trained, lengths : Run or None
        Of the experiments ``layer_drift``, ``greedy_paths``, ``mitigations``, ``layer_drift_trained`` and
        ``layer_drift_lengths``; None for one that is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    drift: Run | None
    greedy: Run | None
    mitigated: Run | None
    trained: Run | None = None
    lengths: Run | None = None

    @property
    def comparable(self) -> "Results":
        """The same with the trained model's drift in the place of a stand-in's, where it was measured."""
        return self if self.trained is None else replace(self, drift=self.trained)

    @property
    def of_lengths(self) -> list[Run]:
        """The run at the fixed length, if there is one, and that at drawn lengths."""
        return [run for run in (self.drift, self.lengths) if run]

    @cached_property
    def by_length(self) -> pd.DataFrame:
        """`by_length.table`."""
        return by_length.table(self.of_lengths)

    @cached_property
    def published(self) -> pd.DataFrame:
        """`documents.published_drift`."""
        return documents.published_drift()

    @cached_property
    def published_fits(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """`tables.published_fits`: growth and ratios."""
        return tables.published_fits(self.published)

    @cached_property
    def means(self) -> pd.DataFrame:
        """`tables.layer_means`."""
        return tables.layer_means(self.drift.rows)

    @cached_property
    def drawn(self) -> pd.DataFrame:
        """`tables.with_published`."""
        return tables.with_published(self.means, self.published)

    @cached_property
    def fittable(self) -> dict[tuple[str, str], Resampled]:
        """`tables.fittable`."""
        return tables.fittable(self.drift.rows)

    @cached_property
    def growth(self) -> pd.DataFrame:
        """`tables.growth_table`."""
        return tables.growth_table(self.fittable)

    @cached_property
    def relative_growth(self) -> pd.DataFrame:
        """`tables.growth_table` of the drift relative to the states' size."""
        return tables.growth_table(tables.fittable(self.drift.rows, "relative_rms"))

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """`tables.ratio_table`."""
        return tables.ratio_table(self.fittable)

    @cached_property
    def laws(self) -> pd.DataFrame:
        """`tables.laws_table`."""
        return tables.laws_table((self.growth, self.ratios), self.published_fits)

    @cached_property
    def divergence(self) -> pd.DataFrame:
        """`tables.divergence_table`."""
        return tables.divergence_table(self.greedy.rows)

    @cached_property
    def effects(self) -> pd.DataFrame:
        """`tables.mitigation_table`; empty where no mitigation was measured."""
        return tables.mitigation_table(self.mitigated.rows if self.mitigated else pd.DataFrame({"dtype": []}))
