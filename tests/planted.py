"""Runs with rows that a test has made up, so that it can show what a table, a sentence or a verdict does with them."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from kvbook.runs.records import Run

Results = TypeVar("Results")

MACHINE = {"device": "cpu", "device_name": "a processor", "threads": 1, "torch": "2.13.0", "transformers": "5.23.0"}


def run_of(rows: pd.DataFrame, /, **about: Any) -> Run:
    """Give a finished run with these rows; `about` is laid over what its ``run.json`` would say."""
    run = Run({"settings": {}, "models": [], "corpus": {"name": "stdlib"}, "machine": MACHINE} | about, Path())
    run.__dict__["rows"] = rows
    return run


def changed(results: Results, **rows: pd.DataFrame) -> Results:
    """Give a chapter's results with other rows for some of its runs, which say of themselves what they said."""
    runs = {name: dataclasses.replace(getattr(results, name)) for name in rows}
    for name, run in runs.items():
        run.__dict__["rows"] = rows[name]
    return dataclasses.replace(results, **runs)
