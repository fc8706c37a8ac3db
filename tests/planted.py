"""Runs with rows that a test has made up, so that it can show what a table, a sentence or a verdict does with them."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from kvbook.runs.records import Run
from kvreport.publishing.found import Found
from kvreport.publishing.judging import Check, Verdict

Results = TypeVar("Results")

MACHINE = {"device": "cpu", "device_name": "a processor", "threads": 1, "torch": "2.13.0", "transformers": "5.23.0"}


def run_of(rows: pd.DataFrame, /, **about: Any) -> Run:
    """Give a finished run with these rows; `about` is laid over what its ``run.json`` would say."""
    run = Run({"settings": {}, "models": [], "corpus": {"name": "stdlib"}, "machine": MACHINE} | about, Path())
    run.__dict__["rows"] = rows
    return run


def with_runs(found: Found, **runs: Run | None) -> Found:
    """Give what a chapter found with other runs for some of its experiments."""
    return Found(found.frames, {**found.runs, **runs})


def with_rows(found: Found, **rows: pd.DataFrame) -> Found:
    """Give what a chapter found with other rows for some of its runs, which say of themselves what they said."""
    return with_runs(found, **{name: run_of(given, **found.runs[name].about) for name, given in rows.items()})


def on_processor(processor: str, found: Found) -> Found:
    """Give what a chapter found as if another processor had made its runs."""
    moved = {}
    for name, run in found.runs.items():
        if run:
            moved[name] = run_of(run.rows, **run.about | {"machine": run.about["machine"] | {"processor": processor}})
    return with_runs(found, **moved)


def changed(results: Results, **rows: pd.DataFrame) -> Results:
    """Give a chapter's results with other rows for some of its runs, which say of themselves what they said."""
    runs = {name: dataclasses.replace(getattr(results, name)) for name in rows}
    for name, run in runs.items():
        run.__dict__["rows"] = rows[name]
    return dataclasses.replace(results, **runs)


def moved_to(processor: str, results: Results) -> Results:
    """Give a chapter's results as if another processor had made them."""
    runs = {field.name: getattr(results, field.name) for field in dataclasses.fields(results)}
    moved = {name: dataclasses.replace(run) for name, run in runs.items() if run}
    for name, run in moved.items():
        object.__setattr__(run, "about", run.about | {"machine": run.about["machine"] | {"processor": processor}})
        run.__dict__["rows"] = runs[name].rows
    return dataclasses.replace(results, **moved)


class Judged(Mapping[str, Verdict]):
    """A chapter's claims by name, each judged when it is looked up: most tests look at one, and each draws its bootstrap."""

    def __init__(self, checks: Mapping[str, Check], results: Any) -> None:
        self._checks, self._results = checks, results

    def __getitem__(self, claim: str) -> Verdict:
        return self._checks[claim](self._results)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)
