"""Verdicts on what the documents claim, computed from rows and never typed."""
