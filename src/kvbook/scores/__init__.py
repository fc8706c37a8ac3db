"""Two tables of log-probabilities of the same tokens, such as a trainer's and a rollout engine's: rounding or fault."""
