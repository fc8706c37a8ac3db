"""What the chapter on trainer and rollout measures."""

from kvreport.chapters.trainer_and_rollout import engine, policy_gradient, rollouts, ways

EXPERIMENTS = (rollouts.EXPERIMENT, ways.EXPERIMENT, engine.EXPERIMENT, policy_gradient.EXPERIMENT)
