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
from kvreport.chapters.static_cache import bytes as static_memory
from kvreport.chapters.static_cache import memory_bandwidth
from kvreport.chapters.static_cache import shapes as static_shapes
from kvreport.chapters.static_cache import speed as static_speed
from kvreport.chapters.static_cache import texts as static_texts
from kvreport.chapters.static_cache.settings import StaticCacheSettings


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
    "static_speed": _Unconverted(StaticCacheSettings, static_speed.run),
    "memory_bandwidth": _Unconverted(StaticCacheSettings, memory_bandwidth.run),
    "static_memory": _Unconverted(StaticCacheSettings, static_memory.run),
    "static_shapes": _Unconverted(StaticCacheSettings, static_shapes.run),
    "static_texts": _Unconverted(StaticCacheSettings, static_texts.run),
} | _found()


def run(name: str, values: Mapping[str, Any]) -> records.Run | None:
    """Run an experiment."""
    if name not in EXPERIMENTS:
        raise UserError(f"no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    return experiment.run(experiment.settings.checked(**values))
