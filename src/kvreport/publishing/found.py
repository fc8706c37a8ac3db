"""What a chapter found on one machine: its runs by experiment, and the rows that are made of them by name."""

import functools
import importlib.util
import inspect
import json
import operator
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvbook import UserError
from kvbook.paths import RUNS
from kvbook.runs import evidence, records
from kvbook.runs.records import Run
from kvbook.settings import Settings
from kvreport.publishing import LEFT_OUT_VARIABLE, MEASURED_VARIABLE

if TYPE_CHECKING:
    from kvbook.runs import Experiment

# Makes rows of what its parameters name: other rows, or an experiment's; of one that is annotated so, the run itself.
# Where something is not there, there are no rows either, unless the parameter has a default.
Frame = Callable[..., pd.DataFrame | None]


def frames_of(module: ModuleType) -> dict[str, Frame]:
    """List what a chapter's ``rows.py`` makes: its public functions that give a table, each by its name in words."""
    made = [one for one in vars(module).values() if inspect.isfunction(one) and one.__module__ == module.__name__]
    tables = (one for one in made if "DataFrame" in str(inspect.signature(one).return_annotation))
    return {one.__name__.replace("_", " "): one for one in tables if not one.__name__.startswith("_")}


class Found:
    """What a chapter found on one machine: runs by experiment, and frames, each made once.

    Parameters
    ----------
    frames : mapping of str to callable
        What the chapter makes of them, as `frames_of` lists it.
    runs : mapping of str to Run or None
        By experiment; None for one that was not run.
    """

    def __init__(self, frames: Mapping[str, Frame], runs: Mapping[str, Run | None]) -> None:
        self.frames, self.runs = frames, runs
        self._made: dict[Hashable, Any] = {}

    def __getitem__(self, name: str) -> pd.DataFrame | None:
        """Return the rows of a frame or an experiment; None where a run behind them is not there."""
        return self.once(name, lambda: self._make(name))

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made before under a key, or make it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _make(self, name: str) -> pd.DataFrame | None:
        if (make := self.frames.get(name)) is None:
            run = self.runs.get(name)
            return None if run is None else run.rows
        given = {}
        for name, one in inspect.signature(make).parameters.items():
            found = self.runs.get(name) if one.annotation is Run else self[self._known_as(name)]
            if found is not None:
                given[name] = found
            elif one.default is one.empty:
                return None
        return make(**given)

    def behind(self, *names: str) -> list[Run]:
        """List the runs that rows are made of."""
        experiments = dict.fromkeys(one for name in names for one in self._experiments(name))
        return [run for name in experiments if (run := self.runs.get(name)) is not None]

    def noted(self, experiment: str, *path: str | int) -> Any:
        """Read a run's record; None where the run is not there."""
        if (run := self.runs.get(experiment)) is None:
            return None
        return functools.reduce(operator.getitem, path, run.about)

    def _experiments(self, name: str) -> list[str]:
        if (make := self.frames.get(name)) is None:
            return [name]
        of = map(self._known_as, inspect.signature(make).parameters)
        return [experiment for name in of for experiment in self._experiments(name)]

    def _known_as(self, parameter: str) -> str:
        """Find the rows that a parameter names, or the experiment."""
        words = parameter.replace("_", " ")
        return words if words in self.frames else parameter


def measuring(chapter: str) -> list[str]:
    """Name the modules of a chapter's package that make experiments; to import them takes torch."""
    package = importlib.util.find_spec(chapter)
    # A notebook without a package measures nothing.
    files = sorted(Path(package.origin).parent.glob("*.py")) if package else []
    return [f"{chapter}.{file.stem}" for file in files if " Experiment(" in file.read_text("utf-8")]


def experiments(chapter: str) -> "list[Experiment]":
    """Import what a chapter's package measures, in the order in which its ``rows.py`` names it."""
    from kvbook.runs import Experiment

    values = [value for module in measuring(chapter) for value in vars(importlib.import_module(module)).values()]
    each = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    made = {one.name: one for one in each if isinstance(one, Experiment)}
    named = importlib.import_module(f"{chapter}.rows").EXPERIMENTS
    if differing := sorted(made.keys() ^ named.keys()):
        one = differing[0]
        wrong = "makes no such experiment" if one in named else "does not name it with its revision"
        raise UserError(f"experiment {one!r}: {chapter + ('' if one in named else '.rows')} {wrong}")
    return [made[name] for name in named]


def of_runs(chapter: str, runs: Mapping[str, Run | None]) -> Found:
    """Name the rows that a chapter makes of runs."""
    return Found(frames_of(_rows(chapter)), runs)


def measured(chapter: str, settings: Settings) -> Found:
    """Measure, or read what these settings have measured; what a build leaves out is not measured."""
    if (kept := _kept(settings)) is not None:
        return of_runs(chapter, kept)
    made = experiments(f"kvreport.chapters.{chapter}")
    left_out = os.environ.get(LEFT_OUT_VARIABLE, "").split(",")
    return of_runs(chapter, {one.name: None if one.name in left_out else one.run(settings) for one in made})


def _kept(settings: Settings) -> dict[str, Run] | None:
    """Read the runs that the build names, if they are of these settings: that takes no torch."""
    if not (named := os.environ.get(MEASURED_VARIABLE)):
        return None
    runs = {name: records.load(RUNS / folder) for name, folder in json.loads(named).items()}
    asked = settings.model_dump(mode="json")
    return runs if all(asked | run.about["settings"] == asked for run in runs.values()) else None


def published(chapter: str) -> dict[str, Found]:
    """Read what the book publishes, by processor, in the manifest's order."""
    return {name: of_runs(chapter, runs) for name, runs in published_runs(chapter).items()}


def printed(chapter: str) -> Found:
    """Read what the book prints: each experiment on the first processor that the manifest names for it."""
    return of_runs(chapter, evidence.printed(published_runs(chapter), chapter))


def behind(each: Iterable[Found], *names: str) -> list[Run]:
    """List the runs that rows are made of on several processors."""
    return [run for one in each for run in one.behind(*names)]


def published_runs(chapter: str) -> dict[str, dict[str, Run]]:
    """Read the runs behind what the book publishes, by processor and experiment."""
    return evidence.published(chapter, _rows(chapter).EXPERIMENTS)


def _rows(chapter: str) -> ModuleType:
    return importlib.import_module(f"kvreport.chapters.{chapter}.rows")


def has_measures(chapter: str) -> bool:
    """Tell whether a chapter says anything of rows, without importing what computes."""
    package = f"kvreport.chapters.{chapter}"
    return all(map(importlib.util.find_spec, (package, f"{package}.measures")))


def measures_of(chapter: str) -> ModuleType | None:
    """Import what a chapter says of rows; None where it says nothing.

    By a computed name, so that another bound makes no notebook stale.
    """
    return importlib.import_module(f"kvreport.chapters.{chapter}.measures") if has_measures(chapter) else None
