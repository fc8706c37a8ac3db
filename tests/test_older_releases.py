"""Releases of transformers older than this environment's."""

import pytest
import transformers

from kvbook.exact import TRIED, NotInvariant, row_invariant
from kvbook.runs import evidence, records


def test_the_releases_that_the_switch_was_tried_on_are_those_of_recorded_runs_of_the_atlas():
    recorded = [records.load(folder) for folder in evidence.folders("atlas")]
    assert all(any("row-invariant" in column for column in run.rows) for run in recorded)
    assert {run.about["machine"]["transformers"] for run in recorded} == set(TRIED)


def test_the_switch_refuses_a_release_that_was_never_tried(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.24.0")
    with pytest.raises(NotInvariant, match=r"never tried on transformers 5\.24\.0.*untried=True"), row_invariant():
        pass
    with row_invariant(untried=True):
        pass
    monkeypatch.undo()
    with row_invariant():
        pass
