"""The reports to transformers: each test fails as the class is, and passes with the report's diff."""

import importlib.util
import re
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from kvbook import paths

REPORTS = paths.ROOT / "data" / "upstream"
DIFFS = sorted(REPORTS.glob("*.diff"))
# By report, whose class its diff mends.
MODELS = {diff.stem: re.search(r"/modeling_(\w+)\.py", diff.read_text("utf-8"))[1] for diff in DIFFS}


def loaded(name, file):
    """Import a module from a file, whatever else has its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def outcome(model):
    """Run a report's test, and return whether it passes and what it said."""
    tests = loaded("tests_of_the_reports", REPORTS / "test_caches.py").CacheMatchesTheFullPassTest
    (name,) = (name for name in dir(tests) if name.startswith(f"test_{model}_"))
    result = unittest.TestResult()
    tests(name).run(result)
    return result.wasSuccessful(), "".join(text for _, text in [*result.failures, *result.errors])


def mend(report, model, monkeypatch, tmp_path):
    """Put a model's module in place with a report's diff applied."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    source = tmp_path / "src" / "transformers" / "models" / model / f"modeling_{model}.py"
    source.parent.mkdir(parents=True)
    source.write_text(Path(module.__file__).read_text())
    subprocess.run(["git", "apply", str(REPORTS / f"{report}.diff")], cwd=tmp_path, check=True)
    # What is there now is put back after the test.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    changed = loaded(module.__name__, source)
    # Not a name of this module: the package takes its own place anew when one of its modules is read again.
    package = importlib.import_module("transformers")
    for name in changed.__all__:
        monkeypatch.setattr(package, name, getattr(changed, name))


@pytest.mark.parametrize(("report", "model"), MODELS.items())
def test_a_reports_test_fails_as_the_class_is_and_passes_with_its_diff(report, model, monkeypatch, tmp_path):
    passes, said = outcome(model)
    assert not passes
    assert "not close" in said
    mend(report, model, monkeypatch, tmp_path)
    assert outcome(model) == (True, "")


def test_every_report_with_a_script_has_a_diff_and_a_test():
    assert {script.stem for script in REPORTS.glob("*.py")} - {"test_caches"} == set(MODELS)
