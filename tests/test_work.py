"""What an experiment takes: what is said before one on a large trained model starts, and its share of the cores."""

import contextlib
import inspect
import sys

import pytest
import torch

from kvbook import fingerprint, progress
from kvbook.measuring import costs
from kvbook.models import loading
from kvbook.runs import Experiment, Work, threads
from kvbook.runs import experiment as work
from kvbook.settings import Settings
from kvreport.running import catalogue, planning

# What loads no model that is named in the settings, or is over in seconds.
SMALL = {
    "atlas", "attention_forms", "engine_rollout", "exact_cost", "first_layer", "gemm_map", "kernels",
    "memory_bandwidth", "policy_gradient", "scratch_held", "scratch_logits", "scratch_loss", "scratch_speed",
    "scratch_texts", "seams", "served_llama_cpp", "served_llama_cpp_bf16", "served_openvino", "served_vllm",
    "served_vllm_bf16", "static_shapes", "summation",
}
REAL = {"weights": "package", "parameters": 134_515_008, "asked_for": "smollm2"}


@pytest.fixture
def counted(monkeypatch):
    """Make a pass take as many seconds as it has tokens, of a model whose configuration is a stand-in's."""
    monkeypatch.setattr(costs, "pass_seconds", lambda config, dtype, n_tokens, device: float(n_tokens))
    given = loading.config_of("smollm2")
    monkeypatch.setattr(loading, "config_of", lambda model, weights: given)
    # A loop that another test has left by an error is under way as long as something holds the error.
    monkeypatch.setattr(progress, "_running", [])


def test_every_experiment_that_takes_long_on_a_trained_model_says_how_much_it_does_and_fewer_texts_are_less(real_model):
    default = {chapter.name: chapter.parameters for chapter in planning.plan()}
    for chapter in planning.plan("trained"):
        values = chapter.values()
        for name, experiment in catalogue.EXPERIMENTS.items():
            if experiment.settings.__module__.split(".")[2] != chapter.name:
                continue
            if experiment.work is None:
                # A chapter without a set of parameters for it says nothing of it.
                assert name in SMALL or chapter.parameters == default[chapter.name], name
                continue
            depends = set(values) if experiment.fields is None else set(values) & experiment.fields
            fewer = {name: values[name] // 4 for name in {"n_samples", "n_new_tokens"} & depends}
            all_of_it, less = (experiment.work(experiment.settings.checked(**values | some)) for some in ({}, fewer))
            assert size(less) > 0, name
            assert (size(less) < size(all_of_it)) == bool(fewer), name
    assert not {name for name in SMALL if catalogue.EXPERIMENTS[name].work}


def size(done: Work) -> float:
    return done.n_tokens * done.passes + done.steps


def test_models_and_dtypes_add_up_and_the_reference_lies_beside(counted):
    asked = Work(10, passes=2, steps=3, dtypes=("float32", "bfloat16"))
    one = work.predict(asked, Settings(), [REAL])
    assert one.seconds == 2 * (2 * 10 + 3)
    two = work.predict(asked, Settings(), [REAL, REAL])
    assert (two.seconds, two.n_bytes) == (2 * one.seconds, one.n_bytes)
    with_fp64 = work.predict(asked._replace(in_fp64=1), Settings(), [REAL])
    assert with_fp64.seconds == one.seconds + 2 * 10
    assert with_fp64.n_bytes > 2 * one.n_bytes
    assert work.predict(asked._replace(copies=3), Settings(), [REAL]).n_bytes > one.n_bytes


@pytest.mark.parametrize(
    "model", [REAL | {"parameters": 2_800_000}, REAL | {"weights": "random"}, {"weights": "stand-in", "shape": {}}]
)
def test_small_models_and_drawn_weights_are_not_announced(model, counted, capfd):
    for asked, of in ((Work(10, passes=2), model), (None, REAL)):
        with work.announced(asked, Settings(), [of]):
            pass
    assert capfd.readouterr().err == ""


def test_the_prediction_is_said_once_and_stands_before_every_line_of_progress(counted, monkeypatch, tmp_path, capfd):
    line = tmp_path / "line"
    monkeypatch.setenv(progress.PROGRESS_VARIABLE, str(line))
    with work.announced(Work(10, passes=30), Settings(), [REAL]):
        said = line.read_text()
        assert said.startswith("predicted: about ")
        assert said.endswith(" and 5 min")
        for _ in progress.track([1], label="texts: sample"):
            assert line.read_text() == f"{said} · texts: sample 0/1"
    for _ in progress.track([1], label="texts: sample"):
        assert line.read_text() == "texts: sample 0/1"
    # An experiment announces itself, and not when its run is there.
    monkeypatch.setattr(work, "LARGE", 0)
    monkeypatch.delenv(progress.PROGRESS_VARIABLE)
    experiment = catalogue.EXPERIMENTS["greedy_samples"]
    asked = experiment.settings.checked(model="gpt2", n_new_tokens=2, prompt="def announced")
    for expected in (True, False):
        experiment.run(asked)
        assert ("predicted: about " in capfd.readouterr().err) is expected


# An experiment's share of the cores; what measures time has them all.

@pytest.fixture
def two_threads():
    with threads.using(2):
        yield


@pytest.mark.parametrize(("asked", "held"), [("1", 1), ("", 2), ("8", 2)])
def test_a_process_is_held_to_its_share_but_not_what_measures_time(two_threads, monkeypatch, asked, held):
    monkeypatch.setenv(threads.THREADS_VARIABLE, asked)
    # What a notebook computes after its experiments is held to it too.
    threads.share(whole=False)
    assert torch.get_num_threads() == held
    with contextlib.suppress(ZeroDivisionError), threads.share(whole=True):
        assert torch.get_num_threads() == 2
        raise ZeroDivisionError
    assert torch.get_num_threads() == held


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
def test_a_run_notes_the_threads_that_it_had(two_threads, monkeypatch, runs, timed, used):
    monkeypatch.setenv(threads.THREADS_VARIABLE, "1")
    seen = []

    def measure(settings, made_of, writer):
        seen.append(torch.get_num_threads())
        writer.append("unit", [{"x": 1}])

    run = Experiment("named", Settings, lambda settings: {}, measure, timed=timed).run(Settings())
    assert (seen, run.about["machine"]["threads"]) == ([used], used)
