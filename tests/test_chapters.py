"""Chapters run by hand, as a person with a checkpoint of their own runs them."""

import contextlib
import io
import json
import subprocess
import sys

import papermill
import pytest

from kvbook.paths import CHAPTERS, ROOT
from kvreport.running.kernels import Build


@pytest.fixture(scope="module")
def kernel():
    """The kernel that executes one chapter after the other, from the root: it imports the libraries once."""
    with contextlib.closing(Build(io.StringIO(), 1)) as build:
        yield lambda: build.kernel({}, ROOT)


# A chapter, what its second model and its texts are called, a figure of it, and parameters.
@pytest.mark.parametrize(("chapter", "second", "texts", "figure", "parameters"), [
    ("06_layer_drift", "reference_model", "corpus", "fig-layer-drift",
     {"n_tokens": 12, "n_new_tokens": 4, "dtypes": "float32,bfloat16"}),
    ("09_blog_past", "families", "corpus", "fig-past-variants", {"quantizations": "none"}),
    ("13_trainer_and_rollout", "model", "corpus", "fig-rollout-ways", {"new_tokens": 8, "n_updates": 1}),
    ("14_serving_engines", "model", "populations", "fig-engine-ways", {"prompt_tokens": 34}),
])
@pytest.mark.slow
def test_a_chapter_runs_on_a_folder_of_any_llama_checkpoint(
    chapter, second, texts, figure, parameters, llama_folder, gpt2_folder, text_folder, tmp_path, kernel
):
    parameters = parameters | {second: str(gpt2_folder), "model": str(llama_folder), texts: str(text_folder)}
    with kernel() as km:
        executed = papermill.execute_notebook(
            CHAPTERS / f"{chapter}.ipynb", tmp_path / "out.ipynb", parameters | {"n_samples": 2}, km=km,
            kernel_name="python3", progress_bar=False,
        )
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    pictures = [output["metadata"].get("image/png", {}) for output in outputs if "metadata" in output]
    assert figure in [picture.get("name") for picture in pictures]
    assert "small-llama" in json.dumps(executed.cells)
    # No library's remark stands among the outputs.
    assert not [output for output in outputs if output["output_type"] == "stream"]


@pytest.mark.slow
def test_a_bad_parameter_ends_papermill_in_one_clear_line_and_leaves_no_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOK_BUILD", str(tmp_path / "build"))
    asked = f"papermill -k python3 chapters/06_layer_drift.ipynb {tmp_path}/out.ipynb --no-progress-bar -p n_tokens 0"
    done = subprocess.run([sys.executable, "-m", *asked.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("UserError: ")
    assert "n_tokens = 0: " in last
    assert not (tmp_path / "build" / "runs").exists()
