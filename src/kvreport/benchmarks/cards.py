"""What each chapter would take on three common cards: predicted from shapes and published peaks, never measured."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from kvbook import paths
from kvbook.models import registry
from kvbook.runs.work import Work
from kvreport.running import planning

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# The parameters of chapters that name models.
_NAMING = ("model", "reference_model", "second_model", "text_model", "families")


@dataclass(frozen=True)
class Card:
    """Published peaks: GB of memory, GB/s, TFLOP/s by dtype."""

    memory_gb: float
    bandwidth_gb_s: float
    tflops: Mapping[str, float]
    source: str

    def seconds(self, model: registry.Architecture, dtype: str, n_tokens: int) -> float:
        """Predict a pass: the longer of reading the weights and of the arithmetic, both at their peaks."""
        shape = model.config
        layers = shape.get("num_hidden_layers", shape.get("n_layer", shape.get("n_layers")))
        width = shape.get("hidden_size", shape.get("n_embd", shape.get("d_model")))
        operations = 2 * n_tokens * model.parameters + 4 * n_tokens**2 * layers * width
        read = model.parameters * _BYTES[dtype]
        return max(operations / (self.tflops[dtype] * 1e12), read / (self.bandwidth_gb_s * 1e9))

    def takes(self, model: registry.Architecture, work: Work) -> float:
        """Predict the seconds of an experiment on one model."""
        in_fp64 = len(work.dtypes) * work.in_fp64 * self.seconds(model, "float64", work.n_tokens)
        return in_fp64 + sum(
            work.passes * self.seconds(model, dtype, work.n_tokens) + work.steps * self.seconds(model, dtype, 1)
            for dtype in work.dtypes
        )

    def minutes(self, models: Iterable[registry.Architecture], works: Iterable[Work], held_gb: float) -> str:
        """Write the least minutes of a chapter that holds so many GB of weights."""
        if held_gb > self.memory_gb:
            return "does not fit"
        minutes = sum(self.takes(model, work) for model in models for work in works) / 60
        return f"{minutes:.1f}" if minutes >= 0.1 else "under 0.1"


def cards() -> dict[str, Card]:
    """Read the cards' peaks."""
    known = yaml.safe_load((paths.DATA / "cards.yaml").read_text("utf-8"))
    return {name: Card(**peaks) for name, peaks in known.items()}


def bytes_of(model: registry.Architecture, work: Work) -> float:
    """Predict the bytes of weights that an experiment holds at a time."""
    widest = max(_BYTES[dtype] for dtype in work.dtypes)
    return model.parameters * (work.copies * widest + (8 if work.in_fp64 else 0))


def _models(values: Mapping[str, Any]) -> list[registry.Architecture]:
    """List the registered models that a chapter's parameters name, by hub id or by family."""
    families = registry.families()
    known = {model.hub_id: model for family in families.values() for model in family.architectures}
    known |= {name: family.architectures[0] for name, family in families.items()}
    given = [values.get(key, []) for key in _NAMING]
    named = [name for one in given for name in ([one] if isinstance(one, str) else one)]
    return list({known[name].hub_id: known[name] for name in named if name in known}.values())


def _works(chapter: planning.Chapter) -> Iterator[Work]:
    # Imports torch, which pages without this table need not wait for.
    for experiment in importlib.import_module(chapter.module("results")).EXPERIMENTS:
        # What these settings leave out takes nothing.
        if experiment.work and (work := experiment.work(experiment.settings.checked(**chapter.values()))):
            yield work


def predicted() -> list[list[str]]:
    """Predict what each chapter takes on each card with the parameter set ``gpu``: a header and rows."""
    found = cards()
    rows = [["chapter", "largest model", "weights held, GB", *(f"{name}, min" for name in found)]]
    for chapter in planning.plan("gpu"):
        models, works = _models(chapter.values()), list(_works(chapter))
        if models and works:
            largest = max(models, key=lambda model: model.parameters)
            held = max(bytes_of(largest, work) for work in works) / 1e9
            minutes = [card.minutes(models, works, held) for card in found.values()]
            rows.append([chapter.stem, f"`{largest.hub_id}`", f"{held:.1f}", *minutes])
    return rows
