"""What the chapter on reusing a prompt's cache measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.prompt_reuse import continuations, first_layer, split_keys, tables, tokenizer_boundaries
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (
    split_keys.EXPERIMENT,
    first_layer.EXPERIMENT,
    continuations.EXPERIMENT,
    tokenizer_boundaries.EXPERIMENT,
    continuations.REUSED_QUESTIONS,
)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and tables; figures, statements and claims take them from here.

    Attributes
    ----------
    split, layer, reuse, cuts, questions : Run or None
        Of the experiments ``split_keys``, ``first_layer``, ``prompt_reuse``, ``seams`` and ``reused_questions``; None
        for one that is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    split: Run | None
    layer: Run | None
    reuse: Run | None
    cuts: Run | None
    questions: Run | None = None

    @cached_property
    def counts(self) -> pd.DataFrame:
        """`tables.count_arithmetic`."""
        return tables.count_arithmetic(self.layer.rows, self.layer.about["shapes"])

    @cached_property
    def rows_fed(self) -> pd.DataFrame:
        """`tables.rows_fed_table`."""
        return tables.rows_fed_table(self.layer.rows)

    @cached_property
    def published_shares(self) -> pd.DataFrame:
        """`tables.published_response_shares`."""
        return tables.published_response_shares()

    @cached_property
    def at_published_rows(self) -> pd.DataFrame:
        """`tables.at_published_rows`."""
        return tables.at_published_rows(self.rows_fed, self.published_shares)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """`tables.by_layer`, as posted."""
        return tables.by_layer(self.split.rows)

    @cached_property
    def switches(self) -> pd.DataFrame:
        """`tables.switches`."""
        return tables.switches(self.split.rows)

    @cached_property
    def written(self) -> pd.DataFrame:
        """`tables.written`, of the thread's prompts, the corpus and the further questions."""
        return tables.written(pd.concat([run.rows for run in (self.reuse, self.questions) if run]))

    @cached_property
    def texts(self) -> pd.DataFrame:
        """`tables.side_by_side`, of the cases that the page shows."""
        return tables.side_by_side(
            self.written,
            (
                continuations.THREAD, continuations.DOCUMENTED, continuations.JOINED, continuations.CHAT,
                continuations.WHOLE,
            ),
        )

    @cached_property
    def seams(self) -> pd.DataFrame:
        """`tables.seam_table`."""
        return tables.seam_table(self.written)

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """`tables.outcomes`."""
        return tables.outcomes(self.written)

    @cached_property
    def cut_shares(self) -> pd.DataFrame:
        """`tables.cut_shares`."""
        return tables.cut_shares(self.cuts.rows)
