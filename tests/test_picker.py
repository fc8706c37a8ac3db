"""The front page's picker opens a verdict only when the answers decide it: its own code, on the real page."""

import json
import re
import subprocess
from pathlib import Path

import playwright
import pytest

from kvbook import paths

SCRIPT = paths.ROOT / "src" / "kvreport" / "site" / "static" / "kvbook-picker.js"
# Playwright brings its own.
NODE = Path(playwright.__file__).parent / "driver" / "node"
GENERAL = "Something differs: is it a bug or rounding?"
# Asked of every combination at once: a process takes longer than all answers.
PROGRAM = """
const { QUESTIONS, decide } = require(process.argv[1]);
const symptoms = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const found = [];
const next = (answers, left) => {
  if (!left.length) return found.push([answers, decide(symptoms, answers)]);
  const [[name, , given], ...rest] = left;
  for (const answer of ["", ...Object.keys(given)]) next({ ...answers, [name]: answer }, rest);
};
next({}, QUESTIONS);
console.log(JSON.stringify(found));
"""


def symptoms(page: str) -> dict[str, list[str]]:
    """Return the classes of every symptom of a page, by its title."""
    found = re.findall(r"^:{4}\{dropdown\} (.+)\n:class-container: symptom (.+)$", page, re.MULTILINE)
    return {title: classes.split() for title, classes in found}


def decided(entries: dict[str, list[str]], script: Path = SCRIPT) -> list[tuple[dict[str, str], set[str], set[str]]]:
    """List, for every combination of answers, the symptoms that are shown, and those that are open."""
    asked = json.dumps(list(entries.values()))
    done = subprocess.run([NODE, "-e", PROGRAM, script], input=asked, capture_output=True, text=True, check=True)
    found = []
    for answers, each in json.loads(done.stdout):
        by_title = dict(zip(entries, each, strict=True))
        shown = {title for title, one in by_title.items() if not one["hidden"]}
        found.append((answers, shown, {title for title, one in by_title.items() if one["open"]}))
    return found


def faults(entries: dict[str, list[str]], script: Path = SCRIPT) -> list[str]:
    """List where a symptom is open against the answers or without one that it needs, and dead ends."""
    found = []
    for answers, shown, opened in decided(entries, script):
        said = ", ".join(f"{name} {answer}" for name, answer in answers.items() if answer) or "nothing"
        for title in opened - {GENERAL}:
            needed = {one.partition("-")[0] for one in entries[title]} - {"general"}
            lacking = sorted(name for name in needed if f"{name}-{answers[name]}" not in entries[title])
            found += [f"{said}: {title} is open, and needs an answer to {name}" for name in lacking]
        if not shown:
            found.append(f"{said}: nothing fits")
        if not opened and any(answers.values()) and answers["changed"] not in ("speed", "equal"):
            found.append(f"{said}: no advice is open")
    return found


@pytest.fixture(scope="module")
def entries():
    return symptoms((paths.ROOT / "index.md").read_text("utf-8"))


def test_no_symptom_opens_while_a_question_that_it_names_has_no_answer_and_some_advice_always_does(entries):
    assert len(entries) >= 10
    assert len(decided(entries)) == 6 * 3**4
    assert faults(entries) == []


def test_control_a_picker_that_takes_no_answer_for_a_fitting_one_is_found(entries, tmp_path):
    code = SCRIPT.read_text("utf-8")
    rule = "named.every(([answer, own])"
    assert rule in code
    (tmp_path / "picker.js").write_text(code.replace(rule, rule.replace("every", "some")), "utf-8")
    own = "My own cache gets worse after block_size tokens (nanoGPT) is open, and needs an answer to past"
    assert f"changed logits, loop own: {own}" in faults(entries, tmp_path / "picker.js")


@pytest.mark.parametrize(
    ("given", "title"),
    [
        # fp32 was not tried.
        ({"changed": "text", "ids": "yes", "past": "no"}, GENERAL),
        ({"changed": "text", "ids": "yes", "past": "no", "dtype": "32"}, "The text differs in fp32 too"),
        ({"changed": "logits", "ids": "no"}, "I reuse a prompt's cache, and the answer changes"),
    ],
)
def test_answers_open_the_advice_that_they_decide(entries, given, title):
    found = {frozenset((name, one) for name, one in of.items() if one): opened for of, _, opened in decided(entries)}
    assert found[frozenset(given.items())] == {title}
