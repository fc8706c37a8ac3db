"""Chapters run by hand, as a person with a checkpoint of their own runs them."""

import json
import subprocess
import sys

import pytest

from kvbook.paths import CHAPTERS, ROOT


def papermill(chapter, output, cwd, **parameters):
    command = [sys.executable, "-m", "papermill", "-k", "python3", str(chapter), str(output), "--no-progress-bar"]
    for name, value in parameters.items():
        command += ["-p", name, str(value)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


# From each place a chapter, what its second model and its texts are called, a figure of it, and parameters.
@pytest.mark.parametrize(("cwd", "chapter", "second", "texts", "figure", "parameters"), [
    (ROOT, "chapters/06_layer_drift.ipynb", "reference_model", "corpus", "fig-layer-drift",
     {"n_tokens": 12, "n_new_tokens": 4, "dtypes": "float32,bfloat16"}),
    (CHAPTERS, "09_blog_past.ipynb", "families", "corpus", "fig-past-variants", {"quantizations": "none"}),
    (ROOT, "chapters/13_trainer_and_rollout.ipynb", "model", "corpus", "fig-rollout-ways", {"new_tokens": 8}),
    (ROOT, "chapters/14_serving_engines.ipynb", "model", "populations", "fig-engine-ways", {"prompt_tokens": 34}),
], ids=["from the root", "from chapters/", "a rollout", "served"])
@pytest.mark.slow
def test_a_chapter_runs_on_a_folder_of_any_llama_checkpoint(
    cwd, chapter, second, texts, figure, parameters, llama_folder, gpt2_folder, text_folder, tmp_path
):
    parameters = parameters | {second: gpt2_folder, "model": llama_folder, texts: text_folder, "n_samples": 3}
    done = papermill(chapter, tmp_path / "out.ipynb", cwd, **parameters)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output["metadata"].get("image/png", {}) for output in outputs if "metadata" in output]
    assert figure in [picture.get("name") for picture in pictures]
    assert "small-llama" in json.dumps(cells)
    # No library's remark stands among the outputs.
    assert not [output for output in outputs if output["output_type"] == "stream"]


@pytest.mark.slow
def test_a_bad_parameter_ends_papermill_in_one_clear_line_and_leaves_no_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBOOK_BUILD", str(tmp_path / "build"))
    done = papermill("chapters/06_layer_drift.ipynb", tmp_path / "out.ipynb", ROOT, n_tokens=0)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("UserError: ")
    assert "n_tokens = 0: " in last
    assert not (tmp_path / "build" / "runs").exists()
