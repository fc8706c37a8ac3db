"""Chapters run by hand, as a person with a checkpoint of their own runs them."""

import contextlib
import io
import json

import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from kvbook.paths import BUILD, CHAPTERS, ROOT
from kvreport.running.kernels import Build


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """Return a function that has papermill execute a chapter from the root, in a kernel that imports libraries once."""
    out = tmp_path_factory.mktemp("executed") / "out.ipynb"
    with contextlib.closing(Build(io.StringIO(), 1)) as build:

        def executed(chapter, parameters):
            with build.kernel({}, ROOT) as km:
                return papermill.execute_notebook(
                    CHAPTERS / f"{chapter}.ipynb", out, parameters, km=km, kernel_name="python3", progress_bar=False
                )

        yield executed


# A chapter, what its second model and its texts are called, a figure of it, and parameters.
@pytest.mark.parametrize(("chapter", "second", "texts", "figure", "parameters"), [
    ("06_layer_drift", "reference_model", "corpus", "fig-layer-drift",
     {"n_tokens": 12, "n_new_tokens": 4, "dtypes": "float32,bfloat16"}),
    ("13_trainer_and_rollout", "model", "corpus", "fig-rollout-ways", {"new_tokens": 8, "n_updates": 1}),
    ("14_serving_engines", "model", "populations", "fig-engine-ways", {"prompt_tokens": 34}),
])
@pytest.mark.slow
def test_a_chapter_runs_on_a_folder_of_any_llama_checkpoint(
    chapter, second, texts, figure, parameters, llama_folder, gpt2_folder, text_folder, execute
):
    parameters = parameters | {second: str(gpt2_folder), "model": str(llama_folder), texts: str(text_folder)}
    executed = execute(chapter, parameters | {"n_samples": 2})
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    pictures = [output["metadata"].get("image/png", {}) for output in outputs if "metadata" in output]
    assert figure in [picture.get("name") for picture in pictures]
    assert "small-llama" in json.dumps(executed.cells)
    # No library's remark stands among the outputs.
    assert not [output for output in outputs if output["output_type"] == "stream"]


@pytest.mark.slow
def test_a_bad_parameter_ends_papermill_in_one_clear_line_and_leaves_no_rows(execute):
    rows = set((BUILD / "runs").glob("*/*"))
    with pytest.raises(PapermillExecutionError) as ended:
        execute("06_layer_drift", {"n_tokens": 0})
    # What papermill's command prints last.
    *_, last = str(ended.value).strip().splitlines()
    assert last.startswith("UserError: ")
    assert "n_tokens = 0: " in last
    assert set((BUILD / "runs").glob("*/*")) == rows
