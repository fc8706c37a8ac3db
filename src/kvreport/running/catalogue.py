"""Every experiment by its name, for the command line and for sweeps."""

import pkgutil
from collections.abc import Mapping
from typing import Any

from kvbook import UserError
from kvbook.runs import Experiment, records
from kvreport import chapters
from kvreport.publishing import found

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for chapter in pkgutil.iter_modules(chapters.__path__, f"{chapters.__name__}.")
    for experiment in found.experiments(chapter.name)
}


def run(name: str, values: Mapping[str, Any]) -> records.Run | None:
    """Run an experiment."""
    if name not in EXPERIMENTS:
        raise UserError(f"no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    return experiment.run(experiment.settings.checked(**values))
