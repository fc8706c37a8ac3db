"""What makes a chapter stale and a run another one: what it shows and measures, and nothing of another chapter."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import mini_book
import papermill
import pytest
from refusing import refusal

from kvbook import UserError, fingerprint, paths
from kvbook.runs import records
from kvreport import commands
from kvreport.chapters.does_it_matter import teacher_forced
from kvreport.chapters.layer_drift import LayerDriftSettings
from kvreport.chapters.which_path_is_right import WhichPathSettings, path_errors, rows
from kvreport.publishing import LEFT_OUT_VARIABLE, MEASURED_VARIABLE, found
from kvreport.running import catalogue, execution, planning

ABOUT = "parameters: {default: {n: 5}, few: {n: 2}}\ndata: [numbers.csv]\n"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Two chapters with folders of code, and a manifest that cites nothing yet."""
    root = mini_book.create(tmp_path / "book")
    shutil.copy(root / "chapters" / f"{mini_book.STEM}.ipynb", root / "chapters" / "02_cubes.ipynb")
    for name in ("squares", "cubes"):
        (root / "code" / name).mkdir(parents=True)
        (root / "code" / name / "chapter.yaml").write_text(ABOUT)
    monkeypatch.setattr(paths, "EVIDENCE", root / "data" / "evidence.yaml")
    monkeypatch.setattr(paths, "RECORDED_RUNS", root / "data" / "runs")
    paths.EVIDENCE.write_text("{}\n")
    return root


def plan(root, profile: str = "default") -> list[planning.Chapter]:
    return planning.plan(profile, replace(mini_book.folders(root), code=root / "code"))


def digests(root) -> list[str]:
    return [chapter.inputs_sha256() for chapter in plan(root)]


def alike(now, then) -> list[bool]:
    return [one == other for one, other in zip(now, then, strict=True)]


def test_parameters_come_from_the_notebook_the_chapters_folder_and_a_file_of_ones_own(book):
    assert [chapter.values()["n"] for chapter in plan(book)] == [5, 5]
    assert plan(book)[0].values()["label"] == "squares"
    # What is wrong with a file that this build does not take, it does not read.
    (book / "parameters" / "broken.yaml").write_text("- [")
    # few.yaml in parameters/ is laid over the set of that name in the chapter's own folder.
    assert [chapter.values()["n"] for chapter in plan(book, "few")] == [3, 2]


def test_an_unknown_parameter_is_answered_with_all_that_the_chapters_settings_hold():
    (chapter,) = (chapter for chapter in planning.plan() if chapter.name == "layer_drift")
    said = refusal(execution._values, replace(chapter, parameters={"n_smaples": 3})).partition("it has: ")[2]
    assert set(said.split(", ")) == set(LayerDriftSettings.model_fields)


@pytest.mark.parametrize(("state", "asked", "n"), [
    ("0" * 64, "default", 9), (None, "default", 5), ("0" * 64, "few", 3), (None, "real", 9),
])
def test_a_default_build_takes_the_trained_model_where_it_is_there(book, monkeypatch, state, asked, n):
    (book / "code" / "squares" / "chapter.yaml").write_text(ABOUT.replace("few: {n: 2}", "real: {n: 9}"))
    monkeypatch.setattr(planning.packages, "state", lambda: {"smollm2": state})
    assert plan(book, asked)[0].values()["n"] == n


def test_data_recorded_runs_and_packaged_models_make_stale_what_names_or_cites_them_alone(book, monkeypatch):
    (book / "code" / "cubes" / "chapter.yaml").write_text(f"{ABOUT}packages: [smollm2]\n")
    monkeypatch.setattr(planning.packages, "state", lambda: {"smollm2": None})
    before, run = digests(book), "counting/any__none__00000000"
    (paths.RECORDED_RUNS / run).mkdir(parents=True)
    (paths.RECORDED_RUNS / run / "run.json").write_text("{}")
    (book / "data" / "other.csv").write_text("y\n1\n")
    assert digests(book) == before
    monkeypatch.setattr(planning.packages, "state", lambda: {"smollm2": "0" * 64})
    there = digests(book)
    assert alike(there, before) == [True, False]
    paths.EVIDENCE.write_text(json.dumps({"squares": {"role": [run]}}))
    cited = digests(book)
    assert alike(cited, there) == [False, True]
    (book / "data" / "numbers.csv").write_text("x\n9\n")
    assert alike(digests(book), cited) == [False, False]


@pytest.mark.parametrize("content", [
    "data: [nosuch.csv]", "data: numbers.csv", "parameters: [n]", "parameters: {default: 3}", "colour: 3", "- a", "{",
    "evidence: [{seeds: [1]}]", "evidence: [{experiments: one}]", "evidence: [{experiments: [], n: 1}]",
])
def test_a_chapters_own_file_that_is_none_is_one_line_that_names_it(book, content):
    (book / "code" / "squares" / "chapter.yaml").write_text(content)
    messages = {"data: [nosuch.csv]": "names data/nosuch.csv, which does not exist", "{": "not valid YAML"}
    assert messages.get(content, 'must hold parameters') in refusal(digests, book)


def test_a_run_is_renamed_by_an_edit_of_what_measures_it_and_by_nothing_else(edit):
    def sources() -> tuple[str, str]:
        return path_errors.EXPERIMENT.source, teacher_forced.EXPERIMENT.source

    before, chapter = sources(), "kvreport/chapters/which_path_is_right"
    # What a chapter draws or says, and another chapter's settings.
    edit(*(f"{chapter}/{name}" for name in ("figures", "measures", "tables", "results")))
    assert sources() == before
    edit("kvreport/chapters/does_it_matter/__init__")
    assert alike(sources(), before) == [True, False]
    edit("kvbook/measuring/fp64_reference")
    assert sources()[0] != before[0]


def test_code_that_draws_leaves_rows_as_they_were_measured_and_control_code_and_parameters_that_measure_do_not(edit):
    def digests(profile="smoke"):
        (chapter,) = (chapter for chapter in planning.plan(profile) if chapter.name == "layer_drift")
        return chapter.inputs_sha256(), chapter.measured_sha256()

    before = digests()
    for module in ("figures", "tables", "by_layer"):
        edit(f"kvreport/chapters/layer_drift/{module}")
        now = digests()
        assert now[0] != before[0]
        assert (now[1] == before[1]) is (module != "by_layer")
        before = now
    assert digests("default")[1] != before[1]


def test_runs_of_a_copy_are_kept_while_they_are_there_and_measuring_would_give_the_same(book, runs):
    chapter, other = plan(book)[0], plan(book, "few")[0]
    assert chapter.runs_kept() is None, "not executed yet"
    kept = {"counting": "counting/0123456789abcdef"}
    measured = {"sha256": chapter.measured_sha256(), "runs": kept}
    chapter.executed.parent.mkdir(parents=True, exist_ok=True)
    chapter.executed.write_text(json.dumps({"metadata": {"kvbook": {"measured": measured}}}))
    assert chapter.runs_kept() is None, "the folder is gone"
    (runs / kept["counting"]).mkdir(parents=True)
    assert chapter.runs_kept() == kept
    assert other.runs_kept() is None, "other parameters"


def test_a_notebook_reads_the_runs_that_its_build_names_and_measures_with_settings_of_its_own(monkeypatch, runs):
    monkeypatch.setattr(found, "RUNS", runs)
    asked = WhichPathSettings(n_samples=3)
    made_of = {"settings": asked.model_dump(mode="json"), "machine": {}}
    run = records.run("path_errors", made_of, lambda writer: writer.append("one", [{"x": 1}]))
    anew = SimpleNamespace(name="path_errors", run=lambda _settings: None)
    monkeypatch.setattr(found, "experiments", lambda _chapter: [anew])
    monkeypatch.setenv(MEASURED_VARIABLE, json.dumps({"path_errors": f"path_errors/{run.hash}"}))
    assert found.measured("which_path_is_right", asked).runs["path_errors"].hash == run.hash
    assert found.measured("which_path_is_right", WhichPathSettings(n_samples=4)).runs == {"path_errors": None}
    monkeypatch.delenv(MEASURED_VARIABLE)
    assert found.measured("which_path_is_right", asked).runs == {"path_errors": None}


def test_a_default_build_alone_leaves_experiments_out_and_their_chapters_have_them_at_their_revisions():
    default = planning.plan("default")
    named = {name: revision for one in default for name, revision in found._rows(one.name).EXPERIMENTS.items()}
    assert named == {name: catalogue.EXPERIMENTS[name].revision for name in named}
    assert all(set(chapter.left_out) <= set(found._rows(chapter.name).EXPERIMENTS) for chapter in default)
    assert any(chapter.left_out for chapter in default)
    assert not any(chapter.left_out for name in ("smoke", "trained", "gpu") for chapter in planning.plan(name))


def test_what_a_build_leaves_out_is_not_measured_and_all_else_is(monkeypatch):
    experiments = [SimpleNamespace(name=name, run=lambda _settings: "measured") for name in ("long", "short")]
    monkeypatch.setattr(found, "experiments", lambda _chapter: experiments)
    monkeypatch.setenv(LEFT_OUT_VARIABLE, "long,other")
    assert found.measured("which_path_is_right", WhichPathSettings()).runs == {"long": None, "short": "measured"}


def test_an_experiment_that_the_rows_do_not_name_or_no_module_makes_is_refused(monkeypatch):
    for named, said in (({"errors": 1}, " makes no such experiment"), ({}, ".rows does not name it with its revision")):
        monkeypatch.setattr(rows, "EXPERIMENTS", named)
        assert refusal(found.experiments, "kvreport.chapters.which_path_is_right").endswith(said)


@pytest.mark.parametrize("kept", [{"counting": "counting/0123"}, None])
def test_a_chapter_that_is_only_drawn_again_is_told_its_runs_and_no_other_is(book, monkeypatch, kept):
    build = MagicMock(environment={})
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: None)
    chapter = plan(book)[0]
    execution._run(chapter, "drawn again", build, chapter.figures, kept)
    assert build.kernel.call_args.args[0][MEASURED_VARIABLE] == (json.dumps(kept) if kept else "")


@pytest.mark.parametrize("asked", [True, False])
def test_a_build_that_cannot_fetch_the_trained_model_says_so_and_goes_on(monkeypatch, capsys, asked, tmp_path):
    rendered = []
    monkeypatch.setattr(paths, "BUILD", tmp_path / "_build")
    monkeypatch.setattr(planning.packages, "fetch", Mock(side_effect=UserError("no network")))
    monkeypatch.setattr(planning, "plan", lambda: [Mock(stem="one", why_stale=lambda: None)])
    monkeypatch.setattr("kvreport.site.build.build_html", lambda: rendered.append("html"))
    commands.build(fetch=asked)
    # A chapter by itself is not rendered: where it lies is said.
    commands.build(["one"])
    assert rendered == ["html"]
    said, noted = capsys.readouterr()
    assert noted.splitlines() == (["kvbook: no network", "kvbook: going on without the trained model"] if asked else [])
    assert said == f"0 of 1 had to be executed; copies with outputs: {paths.EXECUTED}\n"


def test_a_build_folder_that_could_not_be_rendered_into_is_refused_before_anything_is_executed(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(paths, "BUILD", tmp_path / "elsewhere")
    monkeypatch.setattr(planning, "plan", lambda: asked.append("plan") or [])
    assert "must name a folder called _build" in refusal(commands.build)
    assert asked == []
    # Where chapters are named no site is rendered, and any name will do.
    assert "no chapter nosuch" in refusal(commands.build, ["nosuch"])
    assert asked == ["plan"]


@pytest.mark.slow
def test_asking_whether_chapters_are_fresh_waits_for_no_library_that_computes_or_draws():
    # Seconds of a build that has nothing to do. The last is the control: what draws does import them.
    say = "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    script = f"import sys, kvreport.running.execution, kvreport.site; {say}; import kvreport.publishing.page; {say}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, control = done.stdout.splitlines()
    assert first == "[]" != control


def test_the_trained_models_set_runs_every_chapter_on_it_but_the_one_that_trains_its_own(monkeypatch):
    default = {chapter.name: chapter.parameters for chapter in planning.plan()}
    chapters = [chapter for chapter in planning.plan("trained") if chapter.parameters != default[chapter.name]]
    # The atlas is of all architectures, and of no model.
    asked = {chapter.name: chapter.values() for chapter in chapters if chapter.name != "atlas"}
    assert len(asked) >= 11
    assert asked.pop("from_scratch")["model"] == "small"
    for name, values in asked.items():
        assert (values["model"], values["weights"], values["device"]) == ("smollm2", "package", "cpu"), name
        # A second model is the same one, or a stand-in that a figure calls so.
        assert {values.get(key, "smollm2") for key in ("reference_model", "second_model", "text_model")} == {"smollm2"}
    # Control: the default build asks for nothing of the kind where the model has not been fetched.
    monkeypatch.setattr(planning.packages, "state", lambda: {"smollm2": None})
    assert "package" not in {chapter.values().get("weights") for chapter in planning.plan()}


def test_what_was_read_in_a_source_is_kept_for_later_processes_but_not_half_a_line(tmp_path, monkeypatch):
    kept, parsed = tmp_path / "sources.jsonl", Mock(wraps=fingerprint._parsed)

    def ask(source: str) -> tuple[set[str], fingerprint._Source]:
        fingerprint._read.cache_clear()
        fingerprint._read_before.cache_clear()
        return fingerprint.imports_of(source, "kvbook.models.corpus"), fingerprint._read(source)

    monkeypatch.setattr(fingerprint, "_READ", kept)
    monkeypatch.setattr(fingerprint, "_parsed", parsed)
    source = "import json\nfrom . import sources\nfrom kvbook.lengths import bounds\n"
    first = ask(source)
    assert first[0] == {"kvbook.lengths", "kvbook.models", "kvbook.models.sources"}
    assert ask(source) == first
    parsed.assert_called_once_with(source)
    # Controls: other content is read itself, and so is all of what a killed process has left half a line of.
    assert ask(f"{source}x = 1\n")[1].sha256 != first[1].sha256
    kept.write_text(kept.read_text("utf-8")[:40], "utf-8")
    assert ask(source) == first
    assert [asked.args for asked in parsed.call_args_list] == [(source,), (f"{source}x = 1\n",), (source,)]
    # Where nothing can be written, everything is parsed.
    monkeypatch.setattr(fingerprint, "_READ", tmp_path / "no folder" / "sources.jsonl")
    assert ask(source) == first
