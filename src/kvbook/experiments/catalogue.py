"""Every experiment by its name, for the command line and for sweeps."""

from collections.abc import Callable, Mapping
from typing import Any

from kvbook import records
from kvbook.errors import UserError
from kvbook.experiments import (
    after_divergence,
    attention_forms,
    bug_or_rounding,
    cache_factorial,
    drift_by_position,
    exact_cost,
    exact_ladder,
    exact_ways,
    first_bad_layer,
    first_divergence,
    first_layer,
    gemm_map,
    greedy_paths,
    greedy_samples,
    layer_drift,
    length_sweep,
    memory_bandwidth,
    mitigations,
    operation_replay,
    past_tables,
    path_errors,
    prompt_reuse,
    scratch_held,
    scratch_logits,
    scratch_loss,
    scratch_speed,
    scratch_texts,
    seams,
    split_keys,
    static_memory,
    static_shapes,
    static_speed,
    static_texts,
    teacher_forced,
)
from kvbook.settings import (
    BugOrRoundingSettings,
    DoesItMatterSettings,
    ExactCachesSettings,
    LayerDriftSettings,
    ModelsSettings,
    PastTablesSettings,
    PromptReuseSettings,
    ScratchSettings,
    Settings,
    StaticCacheSettings,
    WhereDriftBeginsSettings,
    WhichPathSettings,
)

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
