"""An experiment: what it is called, what it takes, what its rows depend on, and how they are measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvbook import fingerprint, lengths, progress
from kvbook.runs import machine, records, threads
from kvbook.runs.records import Writer
from kvbook.settings import Settings, TextSettings, memory_of

if TYPE_CHECKING:
    from kvbook.measuring import costs

Asked = TypeVar("Asked", bound=Settings)
# What rows depend on besides settings.
Inputs = dict[str, Any]
# One measurement, by the names of its columns; and several, as they are made.
Row = dict[str, Any]
Rows = Iterator[Row]
# Parameters from which on an experiment takes long enough to be announced.
LARGE = 50_000_000


class Work(NamedTuple):
    """Passes of each model in each dtype.

    Attributes
    ----------
    n_tokens : int
        Tokens of a pass.
    passes : float
        How many passes of so many tokens.
    steps : float
        How many passes of a single token.
    dtypes : tuple of str
        In each of which all this is done.
    in_fp64 : float
        Further passes of `n_tokens` in double precision, for each dtype, of a copy that is loaded beside the model.
    copies : int
        How many copies of the model are held in the dtype at a time.
    """

    n_tokens: int
    passes: float
    steps: float = 0
    dtypes: tuple[str, ...] = ("float32",)
    in_fp64: float = 0
    copies: int = 1

    @staticmethod
    def per_text(passes: float, steps: float = 0) -> "Callable[[TextSettings], Work]":
        """Make the `work` of an experiment that does as much with each of its texts."""
        return lambda settings: Work(
            lengths.middle(settings.n_tokens), passes * settings.n_samples, steps * settings.n_samples, settings.dtypes
        )


@dataclass(frozen=True)
class Experiment(Generic[Asked]):
    """One experiment of a chapter; it knows its runs by what made them.

    Attributes
    ----------
    name : str
        What its runs are called.  It never changes, wherever the code moves.
    settings : type of Settings
        What it takes.
    inputs : callable
        Refuses settings that cannot be run, and gives whatever else the rows depend on: ``models``, ``corpus``, ...;
        None where these settings leave nothing to measure.  Nothing is left behind when it raises.
    measure : callable
        Takes settings, inputs and a `Writer`, and appends every unit that ``writer.done`` does not hold yet.  The
        source of the module that defines it, and of what that imports, is one of the inputs.
    fields : frozenset of str or None
        The settings on which the rows depend; None for all of them.
    timed : bool
        Whether it measures time: then it has all cores, and nothing else may run meanwhile.
    own_threads : bool
        Whether it sets the number of threads itself, or starts processes of its own: then nothing else may run
        either.
    revision : int
        Raised by hand when the rows change meaning; recorded evidence of another revision is refused.
    work : callable or None
        Says how much these settings run each model, for the line that predicts memory and minutes; None where that is
        little, or not the model's doing.
    """

    name: str
    settings: type[Asked]
    inputs: Callable[[Asked], Inputs | None]
    measure: Callable[[Asked, Inputs, Writer], None]
    fields: frozenset[str] | None = None
    timed: bool = False
    own_threads: bool = False
    revision: int = 1
    work: Callable[[Asked], Work] | None = None

    @property
    def needs_the_machine(self) -> bool:
        """Whether nothing else may run meanwhile."""
        return self.timed or self.own_threads

    @property
    def source(self) -> str:
        """Digest of the source that makes the rows."""
        return fingerprint.of_source([self.measure.__module__])

    def run(self, settings: Asked) -> records.Run | None:
        """Read the run that these settings make on this machine, or make it, or finish it.

        It has its share of the cores (`kvbook.runs.threads`), and all of them when it measures time.
        """
        inputs = self.inputs(settings)
        if inputs is None:
            return None

        def measure(writer: Writer) -> None:
            with announced(self.work and self.work(settings), settings, inputs.get("models", ())):
                self.measure(settings, inputs, writer)

        with threads.share(whole=self.timed):
            made_of = {
                "settings": settings.model_dump(mode="json", include=None if self.fields is None else set(self.fields)),
                "revision": self.revision, "source": self.source, **inputs,
                "machine": machine.describe(settings.device),
            }
            return records.run(self.name, made_of, measure, note={"commit": machine.commit()})


def predict(work: Work, settings: Settings, models: Iterable[Mapping[str, Any]]) -> "costs.Cost | None":
    """Predict what an experiment takes, by its large models that are trained; None where it has none."""
    # Imports torch, which whoever only lists experiments need not wait for.
    from kvbook.measuring import costs
    from kvbook.models import kept, loading, sources

    found = []
    for model in models:
        if model.get("parameters", 0) < LARGE or model["weights"] in sources.DRAWN:
            continue
        config = loading.config_of(model.get("asked_for", settings.model), model["weights"])
        cost = costs.predict(
            config, work.dtypes, work.n_tokens, n_passes=work.passes, n_steps=work.steps, device=settings.device,
            n_copies=work.copies,
        )
        # What takes more than a limit is streamed.
        limit = memory_of(settings) or float("inf")
        n_bytes = min(limit, cost.n_bytes + kept.beside(loading.parameter_count(config), work.dtypes))
        found.append(costs.Cost(n_bytes, cost.seconds))
        if work.in_fp64:
            n_passes = work.in_fp64 * len(work.dtypes)
            more = costs.predict(config, ["float64"], work.n_tokens, n_passes=n_passes, device=settings.device)
            found[-1] = costs.Cost(n_bytes + more.n_bytes, cost.seconds + more.seconds)
    return costs.Cost(max(cost.n_bytes for cost in found), sum(cost.seconds for cost in found)) if found else None


def announced(
    work: Work | None, settings: Settings, models: Iterable[Mapping[str, Any]]
) -> AbstractContextManager[None]:
    """Say, while this is open, what an experiment was predicted to take; nothing where it is small."""
    cost = work and predict(work, settings, models)
    return progress.headed(f"predicted: {cost.line()}") if cost else nullcontext()
