"""`kvbook evidence`: what chapters ask for is made once for each processor, recorded, cited, and joined over seeds."""

import functools
import gzip
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from refusing import refusal

from kvbook import paths
from kvbook.runs import Experiment, evidence, machine, recording, records
from kvbook.settings import Settings
from kvreport.publishing import evaluated
from kvreport.running import evidence as making
from kvreport.running import planning


class Asked(Settings):
    n_samples: int = 2


def measure(settings, _made_of, writer):
    for sample in range(settings.n_samples):
        writer.append(str(sample), [{"sample": sample, "source": f"file {sample}", "value": settings.seed}])


COUNTING = Experiment("counting", Asked, lambda _: {}, measure, fields=frozenset({"n_samples", "seed", "device"}))


@pytest.fixture
def asked(data, monkeypatch):
    """Let one chapter ask for evidence of two experiments; its groups."""
    monkeypatch.delenv(making.THREADS_VARIABLE, raising=False)
    groups = [{"experiments": ["counting", "timing"], "seeds": [0, 1], "parameters": {"n_samples": 3}}]

    def plan(profile):
        about, values = planning.About(evidence=groups), {"model": "gpt2", "n_samples": 9}
        return [SimpleNamespace(name="chapter", package="chapter", about=about, values=lambda: values)]

    monkeypatch.setattr(planning, "plan", plan)
    made = [COUNTING, replace(COUNTING, name="timing", timed=True)]
    monkeypatch.setattr(making.found, "experiments", lambda _package: made)
    return groups


def test_each_experiment_at_each_seed_is_recorded_and_cited_and_never_made_again(asked):
    assert making.make(timed=False) == 2
    cited = evidence.manifest()["chapter"][evidence.PUBLISHED]
    assert [name.partition("/")[0] for name in cited] == ["counting", "counting"]
    assert all((paths.RECORDED_RUNS / name / "rows.csv.gz").is_file() for name in cited)
    assert making.make(timed=False) == 0
    asked[0]["seeds"] = [0, 1, 5]
    assert making.make(timed=False) == 1


def test_what_measures_time_is_made_when_asked_for_and_refuses_a_busy_machine(asked, monkeypatch):
    load = [3.0]
    monkeypatch.setattr(making.os, "getloadavg", lambda: (*load, 0, 0))
    assert "busy (load 3.0" in refusal(making.make, timed=True)
    assert evidence.manifest() == {}
    load[0] = 0.1
    assert making.make(timed=True) == 2


def test_uncommitted_code_makes_no_evidence(asked, monkeypatch):
    monkeypatch.setattr(machine, "commit", lambda: "abc+")
    assert "commit first" in refusal(making.make, timed=False)
    assert not paths.RUNS.exists()


def test_a_run_of_another_processor_revision_or_size_is_no_reason_to_pass_a_cell_over(asked, monkeypatch):
    making.make(timed=False)
    cell = next(making.cells(timed=False))
    assert cell.is_recorded()
    assert not replace(cell, experiment=replace(COUNTING, revision=2)).is_recorded()
    larger = replace(cell, settings=cell.settings.model_copy(update={"n_samples": 4}))
    assert (larger.is_recorded(), larger.seconds(), cell.seconds() < 600) == (False, None, True)
    monkeypatch.setattr(machine, "describe", lambda device: {"processor": "another"})
    assert not cell.is_recorded()


def test_a_run_from_before_there_was_a_setting_was_made_with_its_default_and_control_with_no_other(asked):
    class Later(Asked):
        n_new_tokens: int = 50

    making.make(timed=False)
    cell = next(making.cells(timed=False))
    later = replace(COUNTING, settings=Later, fields=COUNTING.fields | {"n_new_tokens"})
    usual, other = (replace(cell, experiment=later, settings=Later(n_samples=3, n_new_tokens=n)) for n in (50, 4))
    assert (len(usual.cited()), len(other.cited())) == (1, 0)


def test_where_a_library_is_held_back_only_what_asks_for_that_is_made(asked, monkeypatch):
    stock = machine.describe
    monkeypatch.setattr(machine, "describe", lambda device: stock(device) | {"processor": "one, LIBRARY_MAX=OLD"})
    assert making.make(timed=False) == 0
    asked[0]["role"] = evidence.HELD_BACK
    assert making.make(timed=False) > 0
    # Control: elsewhere it is not made.
    monkeypatch.setattr(machine, "describe", stock)
    assert making.make(timed=False) == 0


def test_seeds_are_joined_with_samples_numbered_on_and_counted_together(asked):
    making.make(timed=False)
    ((processor, found),) = evidence.published("chapter", {COUNTING.name: COUNTING.revision}).items()
    run = found["counting"]
    assert processor == machine.describe("cpu")["processor"]
    assert run.rows["sample"].tolist() == list(range(6))
    assert run.rows["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert run.about["settings"]["n_samples"] == 6
    assert run.about["seeds"] == [0, 1]


def test_a_documents_own_text_stands_once_among_joined_seeds_which_differ_in_nothing_else(asked):
    making.make(timed=False)
    runs = [records.load(paths.RECORDED_RUNS / name) for name in evidence.manifest()["chapter"][evidence.PUBLISHED]]
    for run in runs:
        run.rows["sample"] = ["posted", "0", "1"]
    assert evidence.joined(runs).rows["sample"].tolist() == ["posted", "0", "1", "2", "3"]
    other = records.Run(runs[1].about | {"machine": runs[1].about["machine"] | {"torch": "1.0"}}, runs[1].folder)
    assert "differ in more than their seed" in refusal(evidence.joined, [runs[0], other])
    for run, lengths in zip(runs, ([9, 9], [12]), strict=True):
        run.about["settings"]["text_lengths"] = lengths
    assert evidence.joined(runs).about["settings"]["text_lengths"] == [9, 12]


def test_each_experiment_is_printed_from_the_first_processor_that_has_it_or_the_one_that_is_cited_first(monkeypatch):
    drift, other, times = (SimpleNamespace(folder=paths.Path(of)) for of in ("drift/one", "drift/two", "times/two"))
    first, second = {"drift": drift}, {"drift": other, "times": times}
    assert evidence.printed({"one": first, "two": second}) == {"drift": drift, "times": times}
    monkeypatch.setattr(evidence, "folders", lambda *_: [other.folder, times.folder, drift.folder])
    assert evidence.printed({"one": first, "two": second}, "chapter") == second


def test_a_wrong_chapter_or_experiment_is_one_line(asked):
    assert "no chapter 'nosuch'" in refusal(making.make, timed=False, only=["nosuch"])
    asked[0]["experiments"] = ["nosuch"]
    assert "asks for evidence of 'nosuch'" in refusal(making.make, timed=False)


@pytest.mark.slow
def test_what_a_chapter_asks_for_is_what_is_published_and_control_another_length_is_not(monkeypatch):
    # Many cells are of one run: its rows are held against their digest once.
    monkeypatch.setattr(records, "rows_digest", functools.cache(records.rows_digest))
    cells = [cell for timed in (False, True) for cell in making.cells(timed)]
    assert [cell.label for cell in cells if not cell.cited()] == []
    one = next(cell for cell in cells if cell.experiment.name == "exact_ways")
    assert not replace(one, settings=one.settings.model_copy(update={"n_tokens": 19})).cited()


# The manifest: what is cited is there, whole, and of the experiment's revision.


@pytest.fixture
def folder(data):
    """Record a run and cite it."""
    recorded = recording.record(COUNTING.run(Asked()).folder)
    evidence.cite("chapter", "role", recorded)
    return recorded


def test_a_recorded_run_is_never_taken_for_a_run_of_this_machine_and_another_revision_is_another_run(folder):
    again = COUNTING.run(Asked())
    assert again.made
    assert again.folder.is_relative_to(paths.RUNS)
    assert again.hash == json.loads((folder / "run.json").read_text())["hash"]
    assert replace(COUNTING, revision=2).run(Asked()).hash != again.hash
    assert "is of revision 1, and counting is at 2" in refusal(evidence.cited, "chapter", "role", {"counting": 2})


@pytest.mark.parametrize("role", ["chat", "Zen 3", "Zen 4", "fewer instructions"])
def test_runs_on_other_texts_or_kinds_of_processor_stand_by_themselves_behind_the_first_ones(folder, role):
    other = recording.record(COUNTING.run(Asked(seed=1)).folder)
    roles = {role: [str(other.relative_to(paths.RECORDED_RUNS))], "published": evidence.manifest()["chapter"]["role"]}
    paths.EVIDENCE.write_text(yaml.safe_dump({"chapter": roles}))
    assert evidence.folders("chapter", role) == [other]
    found = evidence.published("chapter", {"counting": 1})
    (first, apart) = found
    assert apart == f"{first}, {role}"
    assert (evidence.beside_of(first), evidence.beside_of(apart)) == ("", role)
    assert evidence.texts_of(apart) == ("chat" if role == "chat" else "")
    assert evaluated.maker(apart) == role.replace(" ", "")
    assert [runs["counting"].folder for runs in found.values()] == [folder, other]
    assert evidence.printed(found)["counting"].folder == folder


def test_edited_missing_or_unknown_evidence_is_one_line_that_says_what_to_do(folder):
    said = refusal(evidence.cited, "chapter", "other", {"counting": 1})
    assert "names no runs for chapter chapter as 'other'" in said
    assert "has no experiment 'counting'" in refusal(evidence.cited, "chapter", "role", {})
    (folder / "rows.csv.gz").chmod(0o644)
    (folder / "rows.csv.gz").write_bytes(gzip.compress(b"x\n2\n"))
    assert "changed after the run" in refusal(evidence.cited, "chapter", "role", {"counting": 1})
    folder.rename(folder.with_name("elsewhere"))
    assert "restore it from git" in refusal(evidence.cited, "chapter", "role", {"counting": 1})


@pytest.mark.parametrize("content", ["- a", "chapter: [a]", "chapter: {role: [{a: b}]}", "{"])
def test_a_manifest_of_another_form_is_refused(data, content):
    paths.EVIDENCE.write_text(content)
    assert re.search("must hold <chapter>|not valid YAML", refusal(evidence.manifest))


def test_a_run_that_is_cited_twice_is_refused_and_citing_it_again_adds_nothing(folder):
    before = evidence.manifest()
    evidence.cite("chapter", "role", folder)
    assert evidence.manifest() == before
    paths.EVIDENCE.write_text(yaml.safe_dump({"chapter": {"role": 2 * before["chapter"]["role"]}}), "utf-8")
    assert "twice" in refusal(evidence.manifest)


def test_every_recorded_run_of_the_repository_is_cited():
    cited = {folder for roles in evidence.manifest().values() for folders in roles.values() for folder in folders}
    assert cited == {str(folder.relative_to(paths.RECORDED_RUNS)) for folder in recording.recorded()}
