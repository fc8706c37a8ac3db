"""The experiments of the chapter on exact caches."""

from kvreport.chapters.exact_caches import cost, ladder, lengths, paths

EXPERIMENTS = (paths.EXPERIMENT, ladder.EXPERIMENT, cost.EXPERIMENT, lengths.EXPERIMENT)
