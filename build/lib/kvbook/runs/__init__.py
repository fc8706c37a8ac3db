"""Runs: rows on disk with what made them, and the experiments that make them."""
