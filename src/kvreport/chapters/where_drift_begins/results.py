"""The experiments of the chapter on where drift begins."""

from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    equal_shapes,
    gemm_map,
    kernels,
    length_sweep,
    operation_replay,
    summation,
)

EXPERIMENTS = (
    operation_replay.EXPERIMENT, gemm_map.EXPERIMENT, length_sweep.EXPERIMENT, attention_forms.EXPERIMENT,
    cache_factorial.EXPERIMENT, equal_shapes.EXPERIMENT, kernels.EXPERIMENT, summation.EXPERIMENT,
)
