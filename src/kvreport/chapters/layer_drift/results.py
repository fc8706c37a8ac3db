"""The experiments of the chapter on layer drift."""

from kvreport.chapters.layer_drift import by_layer, greedy_paths, mitigations

EXPERIMENTS = (by_layer.EXPERIMENT, greedy_paths.EXPERIMENT, mitigations.EXPERIMENT, by_layer.LENGTHS)
