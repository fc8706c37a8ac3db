"""Environments of other releases of transformers."""

import subprocess
from importlib import metadata

import pytest

from kvbook import releases
from kvbook.errors import UserError


def _pip(tmp_path, monkeypatch, requires):
    """Let installing write a package that requires something; return what was asked for, one list a time."""
    asked = []

    def install(wanted, folder):
        asked.append(wanted)
        name = wanted[0].split("==")[0].split("<")[0]
        made = folder / f"{name}-1.0.dist-info"
        made.mkdir(parents=True)
        lines = [f"Requires-Dist: {line}" for line in requires.get(name, ())]
        (made / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *lines]))

    monkeypatch.setattr(releases, "_install", install)
    return asked


def test_an_environment_takes_only_what_the_running_one_does_not_satisfy(tmp_path, monkeypatch):
    held = metadata.version("numpy")
    requires = {"transformers": [f"numpy=={held}", "tokenizers==1.0", "torch==1.0; extra == 'torch'"]}
    asked = _pip(tmp_path, monkeypatch, requires)
    releases.environment("5.5.4", tmp_path)
    assert asked == [["transformers==5.5.4"], ["tokenizers==1.0"]]


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    asked = _pip(tmp_path, monkeypatch, {})
    assert releases.environment("5.5.4", tmp_path) == releases.environment("5.5.4", tmp_path)
    assert asked == [["transformers==5.5.4"]]


def test_an_installation_that_fails_leaves_nothing_and_says_so_in_one_line(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "warning\nERROR: No matching distribution found\n")
    monkeypatch.setattr(releases.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"^cannot install transformers==5.99.0: ERROR: No matching"):
        releases.environment("5.99.0", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", ["latest", "5", "../elsewhere", "5.5.4; rm"])
def test_what_is_no_release_and_no_checkout_is_refused(asked, tmp_path):
    with pytest.raises(UserError, match="neither a release"):
        releases.environment(asked, tmp_path)


def test_a_checkout_with_uncommitted_changes_is_refused(tmp_path):
    checkout = tmp_path / "checkout"
    (checkout / "src" / "transformers").mkdir(parents=True)
    subprocess.run(["git", "-C", str(checkout), "init", "-q"], check=True)
    with pytest.raises(UserError, match="commit"):
        releases.environment(str(checkout), tmp_path)


def test_a_release_is_found_before_the_running_one(tmp_path):
    assert releases.variables(tmp_path)["PYTHONPATH"].split(":")[0] == str(tmp_path)


@pytest.mark.parametrize(("options", "status", "stays"), [
    ([], 0, False), (["--keep"], 0, True), ([], 130, True),
])
def test_the_atlas_removes_an_environment_when_done_unless_it_is_kept(
    options, status, stays, tmp_path, monkeypatch, kvbook_here
):
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(releases, "environment", lambda *_: made)
    monkeypatch.setattr(releases, "run", lambda *_: status)
    assert kvbook_here("atlas", "--transformers", "5.5.4", *options).returncode == status
    assert made.exists() == stays


@pytest.mark.slow
def test_a_release_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('too old')")
    with pytest.raises(UserError, match="cannot be imported here: ImportError: too old"):
        releases.run(tmp_path, ["atlas"])
