"""Runs: rows on disk with what made them, and the experiments that make them."""

from kvbook.runs.experiment import Experiment, Inputs, Row, Rows, Work, Writer

__all__ = ["Experiment", "Inputs", "Row", "Rows", "Work", "Writer"]
