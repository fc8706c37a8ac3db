"""Is the prefix cache of a running server right?  Asked over HTTP, by log-probabilities."""
