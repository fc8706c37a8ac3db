"""The atlas: a tiny random model of every causal architecture of transformers, and what its cache does."""
