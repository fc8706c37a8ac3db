"""Every experiment by its name, for the command line and for sweeps."""

from collections.abc import Callable, Mapping
from typing import Any

from kvbook.errors import UserError
from kvbook.runs import records
from kvbook.settings import Settings
from kvreport.chapters.blog_past import past_tables
from kvreport.chapters.blog_past.settings import PastTablesSettings
from kvreport.chapters.bug_or_rounding import first_bad_layer
from kvreport.chapters.bug_or_rounding import symptoms as bug_or_rounding
from kvreport.chapters.bug_or_rounding.settings import BugOrRoundingSettings
from kvreport.chapters.does_it_matter import after_divergence, drift_by_position, first_divergence, teacher_forced
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings
from kvreport.chapters.exact_caches import cost as exact_cost
from kvreport.chapters.exact_caches import ladder as exact_ladder
from kvreport.chapters.exact_caches import paths as exact_ways
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.chapters.from_scratch import held_out as scratch_held
from kvreport.chapters.from_scratch import logits as scratch_logits
from kvreport.chapters.from_scratch import loss as scratch_loss
from kvreport.chapters.from_scratch import speed as scratch_speed
from kvreport.chapters.from_scratch import texts as scratch_texts
from kvreport.chapters.from_scratch.settings import ScratchSettings
from kvreport.chapters.layer_drift import by_layer as layer_drift
from kvreport.chapters.layer_drift import greedy_paths, mitigations
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.chapters.models import greedy_samples
from kvreport.chapters.models.settings import ModelsSettings
from kvreport.chapters.prompt_reuse import continuations as prompt_reuse
from kvreport.chapters.prompt_reuse import first_layer, split_keys
from kvreport.chapters.prompt_reuse import tokenizer_boundaries as seams
from kvreport.chapters.prompt_reuse.settings import PromptReuseSettings
from kvreport.chapters.static_cache import bytes as static_memory
from kvreport.chapters.static_cache import memory_bandwidth
from kvreport.chapters.static_cache import shapes as static_shapes
from kvreport.chapters.static_cache import speed as static_speed
from kvreport.chapters.static_cache import texts as static_texts
from kvreport.chapters.static_cache.settings import StaticCacheSettings
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    gemm_map,
    length_sweep,
    operation_replay,
)
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings
from kvreport.chapters.which_path_is_right import path_errors
from kvreport.chapters.which_path_is_right.settings import WhichPathSettings

EXPERIMENTS: dict[str, tuple[type[Settings], Callable[[Any], records.Run | None]]] = {
    "bug_or_rounding": (BugOrRoundingSettings, bug_or_rounding.run),
    "first_bad_layer": (BugOrRoundingSettings, first_bad_layer.run),
    "layer_drift": (LayerDriftSettings, layer_drift.run),
    "greedy_paths": (LayerDriftSettings, greedy_paths.run),
    "mitigations": (LayerDriftSettings, mitigations.run),
    "greedy_samples": (ModelsSettings, greedy_samples.run),
    "split_keys": (PromptReuseSettings, split_keys.run),
    "first_layer": (PromptReuseSettings, first_layer.run),
    "prompt_reuse": (PromptReuseSettings, prompt_reuse.run),
    "exact_ways": (ExactCachesSettings, exact_ways.run),
    "exact_ladder": (ExactCachesSettings, exact_ladder.run),
    "exact_cost": (ExactCachesSettings, exact_cost.run),
    "seams": (PromptReuseSettings, seams.run),
    "operation_replay": (WhereDriftBeginsSettings, operation_replay.run),
    "gemm_map": (WhereDriftBeginsSettings, gemm_map.run),
    "length_sweep": (WhereDriftBeginsSettings, length_sweep.run),
    "attention_forms": (WhereDriftBeginsSettings, attention_forms.run),
    "cache_factorial": (WhereDriftBeginsSettings, cache_factorial.run),
    "path_errors": (WhichPathSettings, path_errors.run),
    "scratch_logits": (ScratchSettings, scratch_logits.run),
    "scratch_loss": (ScratchSettings, scratch_loss.run),
    "scratch_held": (ScratchSettings, scratch_held.run),
    "scratch_texts": (ScratchSettings, scratch_texts.run),
    "scratch_speed": (ScratchSettings, scratch_speed.run),
    "past_tables": (PastTablesSettings, past_tables.run),
    "static_speed": (StaticCacheSettings, static_speed.run),
    "memory_bandwidth": (StaticCacheSettings, memory_bandwidth.run),
    "static_memory": (StaticCacheSettings, static_memory.run),
    "static_shapes": (StaticCacheSettings, static_shapes.run),
    "static_texts": (StaticCacheSettings, static_texts.run),
    "teacher_forced": (DoesItMatterSettings, teacher_forced.run),
    "drift_by_position": (DoesItMatterSettings, drift_by_position.run),
    "first_divergence": (DoesItMatterSettings, first_divergence.run),
    "after_divergence": (DoesItMatterSettings, after_divergence.run),
}


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
    settings, measure = EXPERIMENTS[name]
    return measure(settings.checked(**values))
