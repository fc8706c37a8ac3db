import subprocess
import sys

import pytest

from kvbook import paths


def kvbook(*arguments):
    return subprocess.run([sys.executable, "-m", "kvbook", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "nosuch"),
        ("run", "layer_drift", "n_samples=0"),
        ("run", "layer_drift", "colour=blue"),
        ("run", "layer_drift", "n_samples"),
        ("run", "layer_drift", "model=nosuch"),
        ("cite", "fig-layer-drift"),
        ("models", "train", "--family", "bert"),
        ("models", "fetch", "gpt2"),
        ("models", "cost", "nosuch"),
        ("models", "cost", "llama", "--dtypes", "fp8"),
        ("check", "gpt2", "--weights", "package"),
        ("check", "/nowhere/model.gguf"),
        ("models", "train-scratch", "--size", "nosuch"),
        ("models", "train-scratch", "--corpus", "/nowhere"),
        ("models", "train-scratch", "--corpus", "/nowhere", "--destination", "/tmp/nosuch"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments):
    done = kvbook(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvbook: ")
    assert done.stderr.count("\n") == 1


def test_an_experiment_runs_without_a_notebook(llama_folder, text_folder):
    done = kvbook(
        "run", "layer_drift", f"model={llama_folder}", f"reference_model={llama_folder}", f"corpus={text_folder}",
        "n_samples=2", "n_tokens=8", "dtypes=fp32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("16 rows in ")
    assert str(paths.RUNS) in done.stdout


def test_memory_and_minutes_are_predicted(llama_folder):
    done = kvbook("models", "cost", str(llama_folder), "--tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "about 0.6 GB and 1 min\n"


def test_the_families_are_listed_without_loading_one():
    done = kvbook("models", "list")
    assert done.returncode == 0, done.stderr
    assert "meta-llama/Llama-3.1-8B-Instruct 8,030,261,248" in done.stdout
