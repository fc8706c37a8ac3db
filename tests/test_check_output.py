"""What `kvbook check` prints, as JSON, as a picture and as lines; and that the pages show what it prints today."""

import json
import re
import sys

import jsonschema
import pytest
from small_models import asked

from kvbook import paths
from kvbook.diagnosis import check, faults, outcome

SCHEMA = json.loads((paths.DATA / "check" / "schema.json").read_text("utf-8"))
SHOWN = paths.DATA / "check" / "output.txt"


@pytest.fixture(scope="module")
def sound(llama_folder, text_folder) -> outcome.Outcome:
    return check.check(asked(llama_folder, text_folder))


# JSON.


def test_the_published_schema_is_that_of_the_class():
    # To write it anew: json.dumps(outcome.Outcome.model_json_schema(), indent=1) and a line break.
    assert outcome.Outcome.model_json_schema() == SCHEMA


def test_what_is_printed_as_json_is_of_the_published_schema(kvbook_here, llama_folder, text_folder):
    done = kvbook_here("check", llama_folder, "--json", "--corpus", text_folder, "--samples", 2, "--tokens", 12)
    found = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert (found["verdict"], found["status"], done.returncode, found["schema_version"]) == ("rounding", 0, 0, 2)
    assert [drift["dtype"] for drift in found["drift"]] == ["float64", "float32"]
    for wrong in ({"verdict": "fine"}, {"one": "more"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found | wrong, SCHEMA)


def test_what_is_infinite_is_null_in_json(sound):
    endless = sound.model_copy(update={"drift": [outcome.Drift(dtype="float32", mean=None, roundoffs=None)]})
    assert json.loads(endless.model_dump_json())["drift"] == [{"dtype": "float32", "mean": None, "roundoffs": None}]
    assert any("inf" in line for line in endless.lines)


# Lines.


WRONG = (
    r"verdict   bug: [\d.e+,]+ roundoffs in float32, more than the 23,170",
    "layer     layer 1 of 6 is the first beyond rounding",
    "remedy    look at positions, mask, and what the cache gives to attention",
)


# Of a sound model the pages show such lines: see below.
def test_a_bug_takes_at_most_a_dozen_lines_with_verdict_number_and_remedy(llama_folder, text_folder, injected):
    injected(faults.one_step_late)
    lines = check.check(asked(llama_folder, text_folder)).lines
    assert len(lines) <= 12
    for words in WRONG:
        assert any(re.match(words, line) for line in lines), words


def test_many_paths_are_a_line_each_and_few_are_one_line(sound):
    few = [line for line in sound.lines if line.startswith("path")]
    assert few == ["paths     token by token: rounding; in two parts: rounding"]
    found = {"verdict": "rounding", "detail": "3 roundoffs, no more than 4"}
    more = [outcome.PathFound(path=f"path {n}", **found) for n in range(5)]
    many = [line for line in sound.model_copy(update={"paths": more}).lines if line.startswith("path")]
    assert many == [f"path      path {n}  rounding: 3 roundoffs" for n in range(5)]


def test_every_verdict_has_its_exit_status():
    assert outcome.STATUS == {"exact": 0, "rounding": 0, "intended storage precision": 0, "bug": 1, "undecided": 2}


# The pages.


def _form(lines: list[str]) -> list[str]:
    """Strip lines of their numbers and of the model's name."""
    found = [re.sub(r"-?\d[\d,.]*(e[+-]?\d+)?", "#", line).replace("threads", "thread") for line in lines]
    return [re.sub(r" +", " ", line) for line in found if not line.startswith(("model", "slope"))]


def test_what_the_pages_show_has_the_form_that_is_printed_today(llama_folder, text_folder, monkeypatch):
    settings = asked(llama_folder, text_folder, n_samples=4, n_tokens=24)
    shown = _form(SHOWN.read_text("utf-8").splitlines())
    assert _form(check.check(settings).lines) == shown
    # Control: another word is seen.
    monkeypatch.setattr(check, "_NOTHING", "nothing")
    assert _form(check.check(settings).lines) != shown


def test_readme_and_how_to_show_the_same_output():
    assert f"```text\n{SHOWN.read_text('utf-8')}```" in (paths.ROOT / "README.md").read_text("utf-8")
    assert "{literalinclude} ../data/check/output.txt" in (paths.ROOT / "pages" / "check.md").read_text("utf-8")


# The picture.


def test_a_plot_is_one_png_and_nothing_else(kvbook_here, llama_folder, text_folder, tmp_path):
    small = ("--corpus", text_folder, "--samples", 1, "--tokens", 8)
    done = kvbook_here("check", llama_folder, "--plot", tmp_path / "drift.png", *small)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["drift.png"]
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert "verdict" in done.stdout


@pytest.mark.parametrize(("option", "to", "ending"), [
    ("--plot", "drift.pdf", ".png"), ("--plot", "nowhere/drift.png", ".png"), ("--report", "found.htm", ".html"),
    ("--junit", "nowhere/found.xml", ".xml"), ("--repro", "fault.txt", ".py"),
])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(refused, tmp_path, option, to, ending):
    assert f"name a {ending} file in a folder that exists" in refused("check", "/nowhere", option, tmp_path / to)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_one_line_says_what_to_install(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused("check", "/nowhere", "--plot", tmp_path / "drift.png")


def test_a_fault_of_ours_has_not_the_status_of_a_bug_that_was_found(kvbook_here, monkeypatch):
    monkeypatch.setattr("kvbook.models.listing.text", lambda: 1 / 0)
    assert kvbook_here("models", "list").returncode == 2
