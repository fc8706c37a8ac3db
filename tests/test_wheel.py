"""The library's wheel by itself: in an empty folder, with its dependencies and nothing of this checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import mini_book
import pytest

from kvbook.paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install the library into an environment with this one's other packages; the folder of its packages."""
    folder = tmp_path_factory.mktemp("environment")
    # In a copy: building leaves its own files beside the sources.
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    venv.create(folder, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    site = folder / "lib" / here.parent.name / "site-packages"
    for entry in here.iterdir():
        if not entry.name.startswith(("kvbook", "kvreport", "__editable__")) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    # What builds it is here: torch needs it, too.
    how = ["--no-deps", "--no-build-isolation", "--no-index"]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", *how, str(source)], check=True, capture_output=True)
    return site


@pytest.fixture
def run(site, tmp_path):
    """Return a function that runs a command of the environment in an empty folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVBOOK_", "PYTHON"))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(site.parents[2] / "bin" / command[0]), *command[1:]],
            cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
        )

    return run


def test_the_wheel_holds_the_library_and_nothing_of_the_report(site, run):
    assert {entry.name.partition("-")[0] for entry in site.iterdir() if not entry.is_symlink()} == {"kvbook"}
    assert (site / "kvbook" / "models" / "registry.yaml").is_file()
    # What trains the stand-ins is for this checkout alone.
    assert not [file for file in (site / "kvbook").rglob("*") if "train" in file.name or "baselines" in file.name]
    # The control: this environment has the report.
    code = "import importlib.util as u; print(u.find_spec('kvreport') is None)"
    assert run("python", "-c", code).stdout == "True\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_command_begins_in_an_empty_folder_and_offers_the_librarys_commands_alone(run, tmp_path):
    shown = run("kvbook", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "check" in shown.stdout
    # The report's own commands are not there.
    assert "sweep" not in shown.stdout
    assert list(tmp_path.iterdir()) == []


MODEL_TESTS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2)).eval()


def test_sound(assert_cache_matches):
    assert_cache_matches(model())


def test_faulty(assert_cache_matches):
    faulty = model()
    stock = faulty.forward
    faulty.forward = lambda ids, past_key_values=None, **options: stock(ids, **options)
    assert_cache_matches(faulty)


def test_loop(assert_step_matches):
    table = torch.randn(20, 9)
    step = lambda ids, state: (table[ids[0]].cumsum(0) + (0 if state is None else state), state)
    assert_step_matches(step, range(8))
"""


def test_in_one_process_models_are_listed_a_folder_checked_kernels_compiled_and_pytest_finds_its_fixtures(
    run, llama_folder, tmp_path
):
    (tmp_path / "test_mine.py").write_text(MODEL_TESTS)
    then = (
        "from kvbook.exact import row_invariant, verify, fp32_products; import kvbook, torch, pytest;"
        "print('imported', kvbook.__file__, fp32_products.kernel(torch.float32));"
        "pytest.main(['-q', '-p', 'no:cacheprovider', 'test_mine.py'])"
    )
    commands = ("models list", f"check {llama_folder} --samples 1 --tokens 12")
    done = run("python", "-c", mini_book.COMMANDS, *commands, then)
    assert done.returncode == 0, done.stderr
    assert "HuggingFaceTB/SmolLM2-135M" in done.stdout
    assert "verdict   rounding" in done.stdout or "verdict   exact" in done.stdout
    (imported,) = (line for line in done.stdout.splitlines() if line.startswith("imported "))
    assert "site-packages" in imported
    assert "None" not in imported
    assert str(ROOT) not in imported
    assert all(said in done.stdout for said in ("1 passed", "2 failed"))
    # Of the two faults, a cache that is not used and a loop that forgets.
    assert all(said in done.stdout for said in ("the cache held", "what was fed before has no effect"))
