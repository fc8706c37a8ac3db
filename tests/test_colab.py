"""The cells for Colab: in a fresh kernel whose folder holds the clone, they make a chapter's own cells run."""

import json
import shutil
import subprocess
import sys

import pytest

from kvbook import paths
from kvreport.site import running

STEM = "06_layer_drift"


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Make the folder in which Colab's kernels start, with the clone in it."""
    content = tmp_path_factory.mktemp("content")
    clone = content / "kv-cache-book"
    for part in ("src", "chapters"):
        shutil.copytree(paths.ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(paths.ROOT / "_toc.yml", clone)
    return content


def in_a_fresh_kernel(content, cells: list[str]) -> subprocess.CompletedProcess:
    """Run cells as a notebook does, without what clones and installs."""
    cells = ["\n".join(line for line in cell.splitlines() if not line.startswith("!")) for cell in cells]
    script = (
        "import json, sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in json.loads({json.dumps(json.dumps(cells))}):\n"
        "    shell.run_cell(cell).raise_error()\n"
    )
    # -I: without the folders of this process, and without those that the tests' own environment names.
    return subprocess.run([sys.executable, "-I", "-c", script], cwd=content, capture_output=True, text=True)


@pytest.mark.slow
def test_the_two_cells_make_a_chapter_run_from_the_clone_with_device_and_dtypes_set(content):
    notebook = json.loads((paths.CHAPTERS / f"{STEM}.ipynb").read_text())
    imports, parameters, *_ = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    told = (
        "import kvbook, kvreport\n"
        "print(kvbook.__file__, kvreport.__file__)\n"
        "asked = LayerDriftSettings.from_notebook(globals())\n"
        "print(asked.device, *asked.dtypes)"
    )
    setup = running.SETUP.format(address="https://example.org/book")
    done = in_a_fresh_kernel(content, [setup, imports, parameters, running.ON_THE_GPU, told])
    assert done.returncode == 0, done.stderr
    *_, files, settings = done.stdout.splitlines()
    assert all(str(content / "kv-cache-book" / "src") in file for file in files.split())
    assert settings.split()[0] in ("cpu", "cuda")
    assert "float32" in settings


@pytest.mark.parametrize(
    ("capability", "dtypes", "dtype"),
    [((7, 5), ["float32"], "float16"), ((8, 9), ["float32", "bfloat16"], "bfloat16")],
)
def test_a_card_without_bf16_is_not_asked_for_it(monkeypatch, capability, dtypes, dtype):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cell = {"dtypes": ["float32", "bfloat16"], "dtype": "bfloat16"}
    exec(running.ON_THE_GPU, cell)
    assert (cell["device"], cell["dtypes"], cell["dtype"]) == ("cuda", dtypes, dtype)


def test_the_page_gives_both_cells_with_the_address_that_the_citation_file_names(tmp_path, monkeypatch):
    about = (paths.ROOT / "CITATION.cff").read_text()
    (tmp_path / "CITATION.cff").write_text(f"{about}repository-code: https://github.com/somebody/book.git\n")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    text = running.colab()
    assert "!git clone -q https://github.com/somebody/book kv-cache-book" in text
    assert running.ON_THE_GPU in text
    assert "rocket" in text
