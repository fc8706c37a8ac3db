"""Every experiment by its name, for the command line and for sweeps."""

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbook import fingerprint
from kvbook.errors import UserError
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.settings import Settings
from kvreport import chapters


@dataclass(frozen=True)
class _Unconverted:
    """An experiment of a chapter that has no results module yet."""

    settings: type[Settings]
    run: Callable[[Any], records.Run | None]

    @property
    def source(self) -> str:
        return fingerprint.of_source([self.run.__module__])


def _found() -> dict[str, Experiment]:
    """Collect the experiments that chapters list, each in its module ``results``."""
    found = {}
    for chapter in pkgutil.iter_modules(chapters.__path__, f"{chapters.__name__}."):
        if importlib.util.find_spec(f"{chapter.name}.results"):
            for experiment in importlib.import_module(f"{chapter.name}.results").EXPERIMENTS:
                found[experiment.name] = experiment
    return found


EXPERIMENTS: dict[str, Experiment | _Unconverted] = {
} | _found()


def run(name: str, values: Mapping[str, Any]) -> records.Run | None:
    """Run an experiment.

    Parameters
    ----------
    name : str
        One of `EXPERIMENTS`.
    values : mapping
        Its settings; strings are converted.

    Raises
    ------
    UserError
        For an unknown experiment or settings that cannot be run.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    return experiment.run(experiment.settings.checked(**values))
