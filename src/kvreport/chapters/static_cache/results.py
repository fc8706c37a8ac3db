"""What the chapter on static and dynamic caches measured: its runs, and each of its tables once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.static_cache import (
    beside_llama_cpp,
    memory,
    memory_bandwidth,
    shapes,
    speed,
    step_budget,
    step_tables,
    tables,
    texts,
    weights_or_cache,
)
from kvreport.publishing.chapter_results import ChapterResults

EXPERIMENTS = (
    speed.EXPERIMENT,
    memory_bandwidth.EXPERIMENT,
    memory.EXPERIMENT,
    shapes.EXPERIMENT,
    texts.EXPERIMENT,
    step_budget.EXPERIMENT,
    weights_or_cache.EXPERIMENT,
    beside_llama_cpp.EXPERIMENT,
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

    @property
    def fastest(self) -> tables.Way:
        """The way of the loop with the most tokens a second."""
        return max(self.per_repeat, key=lambda way: self.per_repeat[way].median())

    @cached_property
    def table(self) -> pd.DataFrame:
        """`tables.speeds`."""
        return tables.speeds(self.rows, self.per_repeat)


@dataclass(frozen=True)
class Results(ChapterResults):
    """The chapter's runs and tables; figures, statements and claims take them from here.

    Attributes
    ----------
    speed, bandwidth, memory, shapes, texts, budget, batches, beside : Run or None
        Of the experiments ``static_speed``, ``memory_bandwidth``, ``static_memory``, ``static_shapes``, ``static_texts``,
        ``step_budget``, ``weights_or_cache``, ``beside_llama_cpp``; None for one that is not there.
    """

    EXPERIMENTS = EXPERIMENTS

    speed: Run | None
    bandwidth: Run | None
    memory: Run | None
    shapes: Run | None
    texts: Run | None
    budget: Run | None
    batches: Run | None
    beside: Run | None

    @cached_property
    def speeds(self) -> Speeds:
        """Tables of the times."""
        return Speeds(self.speed)

    @cached_property
    def bound(self) -> tables.Limit:
        """`tables.limit`."""
        return tables.limit(self.bandwidth.rows, self.memory.rows)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """`step_tables.budget`."""
        return step_tables.budget(self.budget.rows, self.bound)

    @cached_property
    def contexts(self) -> pd.DataFrame:
        """`step_tables.by_context`."""
        return step_tables.by_context(self.batches.rows)

    @cached_property
    def beside_published(self) -> pd.DataFrame:
        """`tables.beside_published`, with the device and the threads for a name."""
        machine = self.speed.about["machine"]
        count = machine["threads"]
        threads = f", {count} thread{'s' * (count != 1)}" if machine["device"] == "cpu" else ""
        return tables.beside_published(self.speeds.table, f"ours: {machine['device'].upper()}{threads}")

    @cached_property
    def early_bytes(self) -> pd.Series:
        """Bytes of keys and values behind the document's five steps, by cache."""
        return self.shapes.rows.groupby("cache")["kv_bytes"].last()

    @property
    def kv_per_token(self) -> int:
        """Bytes of the keys and values of a token, from the configuration."""
        longest = self.memory.rows.loc[self.memory.rows["predicted_bytes"].idxmax()]
        return int(longest["predicted_bytes"] / longest["n_tokens"])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """`tables.decode_steps`."""
        return tables.decode_steps(self.speed.rows)

    @cached_property
    def partings(self) -> pd.DataFrame:
        """`tables.partings`."""
        return tables.partings(self.texts.rows)
