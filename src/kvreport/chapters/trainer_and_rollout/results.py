"""What the chapter on trainer and rollout measures."""

from kvreport.chapters.trainer_and_rollout import rollouts, ways

EXPERIMENTS = (rollouts.EXPERIMENT, ways.EXPERIMENT)
