"""Runs with rows that a test has made up, so that it can show what a table, a sentence or a verdict does with them."""

from pathlib import Path
from typing import Any

import pandas as pd

from kvbook.runs.records import Run

MACHINE = {"device": "cpu", "device_name": "a processor", "threads": 1, "torch": "2.13.0", "transformers": "5.23.0"}


def run_of(rows: pd.DataFrame, **about: Any) -> Run:
    """Give a finished run with these rows; `about` is laid over what its ``run.json`` would say."""
    run = Run({"settings": {}, "models": [], "corpus": {"name": "stdlib"}, "machine": MACHINE} | about, Path())
    run.__dict__["rows"] = rows
    return run
