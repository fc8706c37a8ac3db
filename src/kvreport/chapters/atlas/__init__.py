"""The chapter on the atlas: what the cache of every causal architecture of transformers does."""
