"""Measuring words: passes, caches, agreement, errors, time and memory."""
