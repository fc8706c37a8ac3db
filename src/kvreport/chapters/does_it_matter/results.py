"""The experiments of the chapter on whether the difference matters."""

from kvreport.chapters.does_it_matter import (
    after_divergence,
    drift_by_position,
    first_divergence,
    long_contexts,
    quantized_caches,
    sliding_windows,
    teacher_forced,
    usage_factorial,
)

EXPERIMENTS = (
    teacher_forced.EXPERIMENT, drift_by_position.EXPERIMENT, first_divergence.EXPERIMENT, after_divergence.EXPERIMENT,
    usage_factorial.EXPERIMENT, long_contexts.EXPERIMENT, sliding_windows.EXPERIMENT, quantized_caches.EXPERIMENT,
)
