"""An experiment's share of the cores; what measures time has them all."""

import notebook_rules
import pytest
import torch

from kvbook.runs import experiment as frame
from kvbook.runs import threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "whole", "inside"), [("1", False, 1), ("1", True, 2), (None, False, 2), ("", False, 2), ("8", False, 2)]
)
def test_the_share_is_what_is_asked_for_and_never_more_than_there_is(two_threads, monkeypatch, asked, whole, inside):
    if asked is None:
        monkeypatch.delenv(threads.THREADS_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(threads.THREADS_VARIABLE, asked)
    with threads.share(whole=whole):
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == 2


def test_an_error_gives_the_threads_back(two_threads, monkeypatch):
    monkeypatch.setenv(threads.THREADS_VARIABLE, "1")
    with pytest.raises(ZeroDivisionError), threads.share(whole=False):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("experiment", "timed"),
    [
        ("static_cache.speed", True),
        ("layer_drift.mitigations", True),
        ("layer_drift.by_layer", False),
        ("exact_caches.paths", False),
        ("prompt_reuse.tokenizer_boundaries", False),
    ],
)
def test_what_imports_the_clock_measures_time(experiment, timed):
    assert frame.measures_time(f"kvreport.chapters.{experiment}") is timed
    assert notebook_rules.needs_the_machine(f"kvreport.chapters.{experiment}") is timed


def test_what_sets_its_own_threads_needs_the_machine_and_measures_no_time():
    assert notebook_rules.needs_the_machine("kvreport.chapters.where_drift_begins.gemm_map")
    assert not frame.measures_time("kvreport.chapters.where_drift_begins.gemm_map")


@pytest.mark.parametrize(("module", "used"), [("layer_drift.by_layer", 1), ("static_cache.speed", 2)])
def test_a_run_notes_the_threads_that_it_had(two_threads, monkeypatch, tmp_path, module, used):
    from kvbook import paths
    from kvbook.settings import Settings

    monkeypatch.setattr(paths, "RUNS", tmp_path)
    monkeypatch.setenv(threads.THREADS_VARIABLE, "1")
    seen = []

    def measure(writer):
        seen.append(torch.get_num_threads())
        writer.append("unit", [{"x": 1}])

    run = frame.recorded("named", f"kvreport.chapters.{module}", Settings(), measure)
    assert (seen, run.about["machine"]["threads"]) == ([used], used)
