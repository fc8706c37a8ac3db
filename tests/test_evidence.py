"""The manifest of published evidence: what is cited is there, whole, and of the experiment's revision."""

import gzip
import json
from dataclasses import replace

import pytest
import yaml

from kvbook import paths
from kvbook.errors import UserError
from kvbook.runs import evidence, recording
from kvbook.runs.experiment import Experiment
from kvbook.settings import Settings

COUNTING = Experiment("counting", Settings, lambda settings: {}, lambda settings, made_of, w: w.append("u", [{"x": 1}]))


@pytest.fixture
def folder(data):
    """Record a run and cite it."""
    recorded = recording.record(COUNTING.run(Settings()).folder)
    named = str(recorded.relative_to(paths.RECORDED_RUNS))
    paths.EVIDENCE.write_text(yaml.safe_dump({"chapter": {"role": [named]}}))
    return recorded


def test_what_a_chapter_cites_is_found_by_role_and_experiment(folder):
    found = evidence.cited("chapter", "role", {"counting": 1})
    assert [run.folder for run in found["counting"]] == [folder]
    assert evidence.folders("chapter") == [folder]
    assert evidence.folders("another") == []


def test_a_recorded_run_is_never_taken_for_a_run_of_this_machine_and_another_revision_is_another_run(folder):
    again = COUNTING.run(Settings())
    assert again.made
    assert again.folder.is_relative_to(paths.RUNS)
    assert again.hash == json.loads((folder / "run.json").read_text())["hash"]
    newer = replace(COUNTING, revision=2)
    assert newer.run(Settings()).hash != again.hash
    with pytest.raises(UserError, match="is of revision 1, and counting is at 2"):
        evidence.cited("chapter", "role", {"counting": 2})


def test_runs_on_other_texts_stand_by_themselves_behind_the_first_ones(folder):
    other = recording.record(COUNTING.run(Settings(seed=1)).folder)
    roles = {"chat": [str(other.relative_to(paths.RECORDED_RUNS))], "published": evidence.manifest()["chapter"]["role"]}
    paths.EVIDENCE.write_text(yaml.safe_dump({"chapter": roles}))
    found = evidence.published("chapter", {"counting": 1})
    (first, chat) = found
    assert chat == f"{first}, chat"
    assert (evidence.texts_of(first), evidence.texts_of(chat)) == ("", "chat")
    assert [runs["counting"].folder for runs in found.values()] == [folder, other]
    assert evidence.printed(found)["counting"].folder == folder


def test_edited_missing_or_unknown_evidence_is_one_line_that_says_what_to_do(folder):
    with pytest.raises(UserError, match="names no runs for chapter chapter as 'other'"):
        evidence.cited("chapter", "other", {"counting": 1})
    with pytest.raises(UserError, match="has no experiment 'counting'"):
        evidence.cited("chapter", "role", {})
    (folder / "rows.csv.gz").chmod(0o644)
    (folder / "rows.csv.gz").write_bytes(gzip.compress(b"x\n2\n"))
    with pytest.raises(UserError, match="changed after the run"):
        evidence.cited("chapter", "role", {"counting": 1})
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(UserError, match="restore it from git"):
        evidence.cited("chapter", "role", {"counting": 1})


@pytest.mark.parametrize("content", ["- a", "chapter: [a]", "chapter: {role: [{a: b}]}", "{"])
def test_a_manifest_of_another_form_is_refused(data, content):
    paths.EVIDENCE.write_text(content)
    with pytest.raises(UserError, match=r"must hold <chapter>|not valid YAML"):
        evidence.manifest()


def test_a_run_that_is_cited_twice_is_refused_and_citing_it_again_adds_nothing(folder):
    before = evidence.manifest()
    evidence.cite("chapter", "role", folder)
    assert evidence.manifest() == before
    paths.EVIDENCE.write_text(yaml.safe_dump({"chapter": {"role": 2 * before["chapter"]["role"]}}), "utf-8")
    with pytest.raises(UserError, match="twice"):
        evidence.manifest()


def test_every_recorded_run_of_the_repository_is_cited():
    cited = {folder for roles in evidence.manifest().values() for folders in roles.values() for folder in folders}
    assert cited == {str(folder.relative_to(paths.RECORDED_RUNS)) for folder in recording.recorded()}
