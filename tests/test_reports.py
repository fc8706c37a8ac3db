"""What a check writes besides its lines: a program that shows the fault, a page, test cases, annotations; the demo."""

import json
import os
import socket
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from bs4 import BeautifulSoup
from refusing import refusal
from small_models import asked

from kvbook import paths
from kvbook.diagnosis import check, faults, outcome, reports, repro


@pytest.fixture(scope="module")
def checked():
    """Return what the demo finds: of a sound model and of one with a fault."""
    return check.demo()


# A program that shows the fault.


@pytest.mark.slow
def test_the_program_is_small_runs_by_itself_and_prints_a_drift_that_no_rounding_explains(mamba_folder, tmp_path):
    printed = repro.write(asked(mamba_folder, "stdlib"), "in two parts", tmp_path / "fault.py")
    program = (tmp_path / "fault.py").read_text("utf-8")
    assert "kvbook" not in program.partition('"""\n\n')[2], "plain transformers"
    assert "num_hidden_layers': 1" in program
    assert "from_pretrained" not in program
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.check_output([sys.executable, "fault.py"], cwd=tmp_path, env=environment, text=True)
    assert float(said.split("logits: ")[1].split()[0]) > 100 * repro.LARGEST_ROUNDING
    assert said.strip() == printed


def test_control_a_fault_that_plain_transformers_does_not_have_gives_no_program(
    kvbook_here, llama_folder, text_folder, tmp_path, injected
):
    injected(faults.offset_forgotten)
    done = kvbook_here(
        "check", llama_folder, "--corpus", text_folder, "--samples", 1, "--tokens", 8, "--repro", tmp_path / "fault.py"
    )
    assert done.returncode == 2
    assert "no small program of plain transformers shows the fault" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_path_without_a_program_is_named(llama_folder, tmp_path):
    said = refusal(repro.write, asked(llama_folder, "stdlib"), "left padding", tmp_path / "fault.py")
    assert "knows no program for 'left padding'" in said


# Pages, test cases, annotations.


def test_the_page_has_every_line_of_the_check_and_the_plot_and_needs_nothing_else(checked, tmp_path):
    for found in checked:
        reports.write_html(found, tmp_path / "found.html")
        page = BeautifulSoup((tmp_path / "found.html").read_text("utf-8"), "html.parser")
        assert [cell.text for cell in page.find_all("td")] == [line[10:] for line in found.lines]
        assert page.svg is not None
        assert found.verdict in page.title.text
        assert not page.find_all(["script", "link", "img"])


def test_text_of_a_model_cannot_become_markup(checked, tmp_path):
    reports.write_html(checked[0].model_copy(update={"model": "<script>alert(1)</script>"}), tmp_path / "found.html")
    assert "<script>" not in (tmp_path / "found.html").read_text("utf-8")


def test_each_path_is_a_test_case_that_fails_where_the_path_is_wrong(checked, tmp_path):
    for found in checked:
        reports.write_junit(found, tmp_path / "found.xml")
        suite = ElementTree.parse(tmp_path / "found.xml").getroot()
        assert [case.get("name") for case in suite] == [each.path for each in found.paths]
        wrong = [case.get("name") for case in suite if case.find("failure") is not None]
        assert wrong == [each.path for each in found.paths if each.verdict == "bug"]
        assert suite.get("failures") == str(len(wrong))


def test_on_github_one_line_says_the_verdict_where_the_change_is_shown(checked, monkeypatch):
    settings = asked("llama", "stdlib")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert reports.write({}, checked[1], settings) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    for found, level in zip(checked, ("notice", "error"), strict=True):
        (line,) = reports.write({}, found, settings)
        assert line.startswith(f"::{level} title=kvbook check ")
        assert "\n" not in line


# The demo.


def test_the_demo_finds_the_sound_model_sound_and_the_fault_in_its_first_layer(checked):
    assert [(found.verdict, found.status) for found in checked] == [("rounding", 0), ("bug", 1)]
    assert checked[1].first_suspicious_layer == 1


def test_the_demo_needs_no_network_and_no_file(kvbook_here, monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    monkeypatch.chdir(tmp_path)
    done = kvbook_here("demo")
    assert (done.returncode, done.stdout.count("verdict   ")) == (0, 2)
    assert list(tmp_path.iterdir()) == []


# Saved reports.


def test_a_saved_report_is_read_again_and_one_of_the_version_before_too(checked):
    for found in checked:
        text = found.model_dump_json()
        assert outcome.read(text, "found.json") == found
        assert outcome.read(json.dumps(json.loads(text) | {"schema_version": 1}), "found.json").lines == found.lines


@pytest.mark.parametrize(("change", "words"), [
    ({"schema_version": 3}, "has schema version 3, and this kvbook reads 1 to 2"),
    ({"verdict": "fine"}, "is damaged (verdict)"), ({"schema_version": None}, "has schema version None"),
])
def test_a_report_that_cannot_be_read_is_refused_in_one_line(checked, change, words):
    told = json.loads(checked[0].model_dump_json()) | change
    assert words in refusal(lambda: outcome.read(json.dumps(told), "found.json"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1"])
def test_what_is_no_report_is_refused_in_one_line(text):
    assert "is no report of" in refusal(outcome.read, text, "found.json")


def test_show_prints_the_lines_of_a_saved_report(kvbook_here, refused, checked, tmp_path):
    (tmp_path / "found.json").write_text(checked[1].model_dump_json())
    done = kvbook_here("show", tmp_path / "found.json", "--junit", tmp_path / "found.xml")
    assert (done.returncode, done.stdout.splitlines()) == (0, checked[1].lines)
    assert (tmp_path / "found.xml").is_file()
    refused("show", tmp_path / "nothing.json")
