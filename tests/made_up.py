"""Runs with rows that a test has made up, so that it can show what a table, a sentence or a verdict does with them."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import paths
from kvbook.measuring.estimates import Estimate
from kvbook.runs import Experiment
from kvbook.runs.records import Run
from kvreport.publishing import evaluated
from kvreport.publishing import found as found_in
from kvreport.publishing.found import Found
from kvreport.publishing.judging import Measured
from kvreport.running import planning

MACHINE = {"device": "cpu", "device_name": "a processor", "threads": 1, "torch": "2.13.0", "transformers": "5.23.0"}


def fact(value: float) -> Measured:
    """Make a number that is counted and not sampled."""
    return Measured("", Estimate(value, value, value, "range"))


def run_of(rows: pd.DataFrame, /, folder: Path = Path(), **about: Any) -> Run:
    """Make a finished run with these rows; `about` is laid over what its ``run.json`` would say."""
    run = Run({"settings": {}, "models": [], "corpus": {"name": "stdlib"}, "machine": MACHINE} | about, folder)
    run.__dict__["rows"] = rows
    return run


def with_runs(found: Found, **runs: Run | None) -> Found:
    """Return what a chapter found with other runs for some of its experiments."""
    return Found(found.frames, {**found.runs, **runs})


def with_rows(found: Found, **rows: pd.DataFrame) -> Found:
    """Return what a chapter found with other rows for some of its runs, whose records stay as they are."""
    return with_runs(found, **{name: run_of(given, **found.runs[name].about) for name, given in rows.items()})


def on(found: Found, machine: Mapping[str, str]) -> Found:
    """Return what was found as if on another machine, and asked for its device."""
    runs = {name: run for name, run in found.runs.items() if run is not None}
    for name, run in runs.items():
        runs[name] = run_of(run.rows, **run.about | {key: run.about[key] | machine for key in ("machine", "settings")})
    return with_runs(found, **runs)


def changed(found: Found, experiment: str, where: str = "", **values: Any) -> Found:
    """Return what was found with other values in some rows of a run; a text is an expression of pandas, as `where`."""
    rows = found[experiment].copy()
    here = rows.eval(where) if where else rows.index == rows.index
    for column, value in values.items():
        new = rows.eval(value) if isinstance(value, str) else value(rows) if callable(value) else value
        rows[column] = rows[column].mask(here, new)
    return with_rows(found, **{experiment: rows})


# Only those of the chapter at hand: some are large.
published = functools.lru_cache(1)(found_in.published)


def against_the_book(name: str, experiment: Experiment, **other: Any) -> dict[str, str]:
    """Run a chapter's experiment as a default build does, or with other settings, and compare as a page does."""
    (chapter,) = (one for one in planning.plan() if one.name == name)
    run = experiment.run(experiment.settings.checked(**chapter.values() | other))
    folders = {experiment.name: str(run.folder.relative_to(paths.RUNS))}
    found = evaluated._own(name, evaluated.published(name), folders)["statements"]
    return {statement: one["comparison"] for statement, one in found.items()}
