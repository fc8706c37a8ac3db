"""What all chapters' results have in common: runs by experiment, measured here, given, or published."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

from kvbook.runs import evidence
from kvbook.runs.experiment import Experiment
from kvbook.runs.records import Run
from kvbook.settings import Settings


@dataclasses.dataclass(frozen=True)
class ChapterResults:
    """A chapter's runs, a field for each of its experiments in their order, None for one that is not there.

    A chapter derives a frozen dataclass from it and adds its tables, each computed once.
    """

    EXPERIMENTS: ClassVar[tuple[Experiment, ...]]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Measure, or read what these settings have measured."""
        return cls.of_runs({experiment.name: experiment.run(settings) for experiment in cls.EXPERIMENTS})

    @classmethod
    def of_runs(cls, runs: Mapping[str, Run | None]) -> Self:
        """Take runs by their experiment."""
        return cls(*(runs.get(experiment.name) for experiment in cls.EXPERIMENTS))

    @classmethod
    def of_book(cls) -> Self:
        """Read what the book prints: each experiment on the first processor that the manifest names for it."""
        return cls.of_runs(evidence.printed(cls._published()))

    @classmethod
    def of_each_processor(cls) -> list[Self]:
        """Read all that the book publishes, each processor's runs apart, in the manifest's order."""
        return [cls.of_runs(runs) for runs in cls._published().values()]

    @classmethod
    def _published(cls) -> dict[str, dict[str, Run]]:
        return evidence.published(cls.__module__.split(".")[-2], cls.EXPERIMENTS)

    @property
    def runs(self) -> dict[str, Run | None]:
        """The runs by their experiment."""
        names = (experiment.name for experiment in self.EXPERIMENTS)
        return {name: getattr(self, field.name) for name, field in zip(names, dataclasses.fields(self), strict=True)}

    def lack(self, error: AttributeError) -> bool:
        """Tell whether an error comes from reading a run that is not there."""
        return error.obj is None and None in self.runs.values()
