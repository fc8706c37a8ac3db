"""An experiment: what it is called, what it takes, what its rows depend on, and how they are measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvbook import fingerprint
from kvbook.runs import machine, records, threads
from kvbook.runs.records import Writer
from kvbook.runs.work import Work, announced
from kvbook.settings import Settings

Asked = TypeVar("Asked", bound=Settings)
# What rows depend on besides settings.
Inputs = dict[str, Any]
# One measurement, by the names of its columns; and several, as they are made.
Row = dict[str, Any]
Rows = Iterator[Row]


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
