"""The cells for Colab, in a fresh kernel whose folder holds the clone, and what cards can run."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from kvbook import paths
from kvbook.models import registry
from kvreport.site import inserts, running

# The cell that goes after the one with the parameters, whose defaults are a processor's.
ON_THE_GPU = re.search(r"```text\n(import torch\n[^`]*)```", (paths.ROOT / "pages/running.md").read_text("utf-8"))[1]


@pytest.mark.slow
def test_the_two_cells_make_a_chapter_run_from_the_clone_with_device_and_dtypes_set(tmp_path):
    # The folder in which Colab's kernels start, with the clone in it.
    clone = tmp_path / "kv-cache-book"
    for part in ("src", "chapters"):
        shutil.copytree(paths.ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(paths.ROOT / "_toc.yml", clone)
    notebook = json.loads((paths.CHAPTERS / "06_layer_drift.ipynb").read_text())
    imports, parameters, *_ = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    told = "import kvbook, kvreport\nprint(kvbook.__file__, kvreport.__file__)\n"
    told += "asked = LayerDriftSettings.from_notebook(globals())\nprint(asked.device, *asked.dtypes)"
    cells = [running.SETUP.format(address="https://example.org/book"), imports, parameters, ON_THE_GPU, told]
    # As a notebook runs them, without what clones and installs.
    cells = ["\n".join(line for line in cell.splitlines() if not line.startswith("!")) for cell in cells]
    (tmp_path / "cells.ipy").write_text("\n".join(cells))
    # -I: without the folders of this process, and without those that the tests' own environment names.
    command = [sys.executable, "-I", "-m", "IPython", "cells.ipy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, files, settings = done.stdout.splitlines()
    assert all(str(clone / "src") in file for file in files.split())
    assert settings.split()[0] in ("cpu", "cuda")
    assert "float32" in settings


@pytest.mark.parametrize(("capability", "dtypes", "dtype"), [
    ((7, 5), ["float32"], "float16"), ((8, 9), ["float32", "bfloat16"], "bfloat16"),
])
def test_a_card_without_bf16_is_not_asked_for_it(monkeypatch, capability, dtypes, dtype):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cell = {"dtypes": ["float32", "bfloat16"], "dtype": "bfloat16"}
    exec(ON_THE_GPU, cell)
    assert (cell["device"], cell["dtypes"], cell["dtype"]) == ("cuda", dtypes, dtype)


# The least time of a token on a card, by its bandwidth, and no model that does not fit.

SMALL, LARGE = (registry.families()[name].architectures[0] for name in ("smollm2", "llama"))


def told(of_t4: dict, tmp_path, monkeypatch) -> dict[str, str]:
    (tmp_path / "cards.yaml").write_text(yaml.safe_dump({"T4": of_t4 | {"source": "made up"}}))
    monkeypatch.setattr(running.places, "DATA", tmp_path)
    lines = [line.replace('"', "").split(",") for line in inserts.PARTS["cards"]().splitlines() if "`" in line]
    return {line[0].strip("`"): line[1] for line in lines if len(line) == 2}


def test_a_token_takes_as_long_as_reading_the_weights_and_what_does_not_fit_is_said_not_to(tmp_path, monkeypatch):
    card = {"memory_gb": 16, "bandwidth_gb_s": 100}
    assert 2 * SMALL.parameters < 1e9 < 2 * LARGE.parameters
    assert float(told(card, tmp_path, monkeypatch)[SMALL.hub_id]) == round(2 * SMALL.parameters / 100e6, 1)
    # Control: at half the bandwidth it takes twice as long, and a smaller card holds no large model.
    slower = told(card | {"bandwidth_gb_s": 50, "memory_gb": 1}, tmp_path, monkeypatch)
    assert float(slower[SMALL.hub_id]) == round(2 * SMALL.parameters / 50e6, 1)
    assert slower[LARGE.hub_id] == "does not fit"
