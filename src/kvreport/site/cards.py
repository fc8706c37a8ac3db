"""What each chapter would take on three common cards: predicted from shapes and published peaks, never measured."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from kvbook import paths
from kvbook.models import registry
from kvbook.runs.work import Work
from kvreport.running import planning
from kvreport.site.context import Context
from kvreport.site.overlay import table_directive

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
        layers, width = _shape(model)
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


def cards() -> dict[str, Card]:
    """Read the cards' peaks."""
    return {
        name: Card(**peaks) for name, peaks in yaml.safe_load((paths.DATA / "cards.yaml").read_text("utf-8")).items()
    }


def _shape(model: registry.Architecture) -> tuple[int, int]:
    config = model.config
    layers = config.get("num_hidden_layers", config.get("n_layer", config.get("n_layers")))
    return layers, config.get("hidden_size", config.get("n_embd", config.get("d_model")))


def bytes_of(model: registry.Architecture, work: Work) -> float:
    """Predict the bytes of weights that an experiment holds at a time."""
    widest = max(_BYTES[dtype] for dtype in work.dtypes)
    return model.parameters * (work.copies * widest + (8 if work.in_fp64 else 0))


def models_of(values: Mapping[str, Any]) -> list[registry.Architecture]:
    """List the registered models that a chapter's parameters name, by hub id or by family."""
    families = registry.families()
    known = {model.hub_id: model for family in families.values() for model in family.architectures}
    known |= {name: family.architectures[0] for name, family in families.items()}
    named = [
        name for key in _NAMING for name in ([values[key]] if isinstance(values.get(key), str) else values.get(key, []))
    ]
    return list({known[name].hub_id: known[name] for name in named if name in known}.values())


def _works(chapter: planning.Chapter) -> Iterator[Work]:
    # Imports torch, which pages without this table need not wait for.
    from kvreport.running import catalogue

    for experiment in catalogue.EXPERIMENTS.values():
        asked = experiment.settings.__module__.split(".")[2] == chapter.name and experiment.work is not None
        # What these settings leave out takes nothing.
        if asked and (work := experiment.work(experiment.settings.checked(**chapter.values()))):
            yield work


def markdown(_context: Context) -> str:
    """Write the table for the parameter set ``gpu``."""
    found = cards()
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["chapter", "largest model", "weights held, GB", *(f"{name}, min" for name in found)])
    for chapter in planning.plan("gpu"):
        models, works = models_of(chapter.values()), list(_works(chapter))
        if not models or not works:
            continue
        largest = max(models, key=lambda model: model.parameters)
        held = max(bytes_of(largest, work) for work in works) / 1e9
        times = [
            _time(card, held, sum(card.takes(model, work) for model in models for work in works))
            for card in found.values()
        ]
        writer.writerow([chapter.stem, f"`{largest.hub_id}`", f"{held:.1f}", *times])
    sources = ", ".join(dict.fromkeys(card.source for card in found.values()))
    caption = (
        "Predicted least minutes of a chapter with its parameter set gpu: every pass at the card's published peaks of "
        f"memory or arithmetic ({sources}); not measured. Loading, Python and short kernels come on top."
    )
    return table_directive({"caption": caption, "name": "tab-cards", "csv": lines.getvalue()})


def _time(card: Card, held_gb: float, seconds: float) -> str:
    if held_gb > card.memory_gb:
        return "does not fit"
    return f"{seconds / 60:.1f}" if seconds >= 6 else "under 0.1"
