"""Comparing cached with uncached computation in Transformer language models, honestly."""

__version__ = "0.1.0"
