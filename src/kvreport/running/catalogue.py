"""Every experiment by its name, for the command line and for sweeps."""

import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any

from kvbook.errors import UserError
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport import chapters


def _found() -> dict[str, Experiment]:
    """Collect the experiments that chapters list, each in its module ``results``."""
    found = {}
    for chapter in pkgutil.iter_modules(chapters.__path__, f"{chapters.__name__}."):
        if importlib.util.find_spec(f"{chapter.name}.results"):
            experiments = importlib.import_module(f"{chapter.name}.results").EXPERIMENTS
            found |= {experiment.name: experiment for experiment in experiments}
    return found


EXPERIMENTS = _found()


def run(name: str, values: Mapping[str, Any]) -> records.Run | None:
    """Run an experiment."""
    if name not in EXPERIMENTS:
        raise UserError(f"no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    return experiment.run(experiment.settings.checked(**values))
