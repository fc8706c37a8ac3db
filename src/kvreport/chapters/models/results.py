"""The experiment of the page on the models."""

from kvreport.chapters.models import greedy_samples

EXPERIMENTS = (greedy_samples.EXPERIMENT,)
