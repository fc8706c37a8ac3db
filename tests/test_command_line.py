from importlib import metadata

import pytest
import torch

from kvbook import __version__


@pytest.mark.parametrize("line", [
    "run nosuch", "run layer_drift n_samples=0", "run layer_drift colour=blue", "run layer_drift n_samples",
    "run layer_drift model=nosuch", "cite fig-layer-drift", "models fetch gpt2", "models cost nosuch",
    "models cost llama --dtypes fp8", "check gpt2 --weights package", "check /nowhere/model.gguf", "check /nowhere",
    "check llama --dtypes float8", "check llama --prefix alone",
    "models train-scratch --size nosuch", "models train-scratch --corpus /nowhere",
    "models train-scratch --corpus /nowhere --destination /tmp/nosuch",
])
def test_bad_input_is_one_line_and_status_2(refused, line):
    refused(*line.split())


def test_a_setting_that_is_given_twice_is_refused_by_name(refused):
    assert "n_samples is given twice" in refused("run", "layer_drift", "seed=1", "n_samples=1", "n_samples=0")


def test_cost_without_a_model_says_that_one_is_missing(kvbook_here):
    done = kvbook_here("models", "cost")
    assert done.returncode == 2
    assert "Missing argument 'model'" in " ".join(done.stderr.split())


def test_a_package_whose_commands_cannot_be_imported_is_named_and_left_out(monkeypatch, tmp_path, kvbook_here):
    package = tmp_path / "broken-1.dist-info"
    package.mkdir()
    (package / "entry_points.txt").write_text("[kvbook.commands]\nbroken = no_such_module:add\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = kvbook_here("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvbook ")
    assert done.stderr.startswith("kvbook: left out the commands of no_such_module:add (ModuleNotFoundError: ")
    assert done.stderr.count("\n") == 1


def test_the_versions_are_printed_with_those_of_the_libraries(kvbook_here):
    done = kvbook_here("--version")
    expected = f"kvbook {__version__}, torch {torch.__version__}, transformers {metadata.version('transformers')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_memory_and_minutes_are_predicted(kvbook_here, llama_folder):
    done = kvbook_here("models", "cost", llama_folder, "--tokens", "8")
    assert (done.returncode, done.stdout) == (0, "about 0.6 GB and 1 min\n"), done.stderr
