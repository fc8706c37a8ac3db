"""The experiments of the chapter on bug or rounding."""

from kvreport.chapters.bug_or_rounding import first_bad_layer, symptoms

EXPERIMENTS = (symptoms.EXPERIMENT, first_bad_layer.EXPERIMENT)
