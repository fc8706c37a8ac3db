"""An experiment's share of the cores; what measures time has them all."""

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


def test_an_experiment_is_called_timed_where_it_uses_the_clock_and_nowhere_else():
    clock = "kvbook.measuring.timing"
    for name, experiment in catalogue.EXPERIMENTS.items():
        module = experiment.measure.__module__
        if experiment.timed:
            assert clock in fingerprint.reached(module), name
        else:
            assert clock not in fingerprint.imports_of(inspect.getsource(sys.modules[module]), module), name
    timed = {name for name, experiment in catalogue.EXPERIMENTS.items() if experiment.timed}
    assert {"static_speed", "mitigations", "exact_cost", "scratch_speed"} <= timed
    assert not {"layer_drift", "exact_ways", "exact_ladder", "seams", "gemm_map"} & timed


def test_what_sets_its_own_threads_has_the_machine_to_itself():
    for name, experiment in catalogue.EXPERIMENTS.items():
        source = inspect.getsource(sys.modules[experiment.measure.__module__])
        # The atlas starts workers of its own.
        sets = "threads.using(" in source or "_WORKERS" in source
        assert experiment.own_threads is sets, name
        assert experiment.needs_the_machine is (experiment.timed or sets)


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
