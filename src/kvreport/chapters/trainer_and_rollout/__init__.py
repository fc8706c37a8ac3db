"""The chapter on trainer and rollout: whether on-policy learning is on-policy."""
