"""An experiment's share of the cores; what measures time has them all."""

import contextlib
import inspect
import sys

import pytest
import torch

from kvbook import fingerprint, paths
from kvbook.runs import threads
from kvbook.runs.experiment import Experiment
from kvbook.settings import Settings
from kvreport.running import catalogue


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "whole", "inside"), [("1", False, 1), ("1", True, 2), (None, False, 2), ("", False, 2), ("8", False, 2)]
)
def test_the_share_is_what_is_asked_for_never_more_than_there_is_and_given_back(
    two_threads, monkeypatch, asked, whole, inside
):
    monkeypatch.setenv(threads.THREADS_VARIABLE, asked or "")
    if asked is None:
        monkeypatch.delenv(threads.THREADS_VARIABLE)
    with contextlib.suppress(ZeroDivisionError), threads.share(whole=whole):
        assert torch.get_num_threads() == inside
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


def test_an_experiment_is_called_timed_where_it_uses_the_clock_and_has_the_machine_where_it_sets_threads():
    clock = "kvbook.measuring.timing"
    for name, experiment in catalogue.EXPERIMENTS.items():
        module = experiment.measure.__module__
        source = inspect.getsource(sys.modules[module])
        reached = fingerprint.reached(module) if experiment.timed else fingerprint.imports_of(source, module)
        assert (clock in reached) is experiment.timed, name
        # The atlas starts workers of its own.
        assert experiment.own_threads is ("threads.using(" in source or "_WORKERS" in source), name
        assert experiment.needs_the_machine is (experiment.timed or experiment.own_threads)
    timed = {name for name, experiment in catalogue.EXPERIMENTS.items() if experiment.timed}
    assert {"static_speed", "mitigations", "exact_cost", "scratch_speed"} <= timed
    assert not {"layer_drift", "exact_ways", "exact_ladder", "seams", "gemm_map"} & timed


@pytest.mark.parametrize(("timed", "used"), [(False, 1), (True, 2)])
def test_a_run_notes_the_threads_that_it_had(two_threads, monkeypatch, tmp_path, timed, used):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    monkeypatch.setenv(threads.THREADS_VARIABLE, "1")
    seen = []

    def measure(settings, made_of, writer):
        seen.append(torch.get_num_threads())
        writer.append("unit", [{"x": 1}])

    run = Experiment("named", Settings, lambda settings: {}, measure, timed=timed).run(Settings())
    assert (seen, run.about["machine"]["threads"]) == ([used], used)
