"""Statements: a sentence holds on the published rows, says so when it does not, and is held against a reader's run."""

import ast
import copy
import importlib
import json
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from made_up import changed, fact, on, published, run_of, with_rows
from refusing import refusal

from kvbook import paths
from kvbook.measuring.estimates import Estimate, wilson
from kvbook.runs.evidence import beside_of
from kvbook.runs.records import Run
from kvbook.settings import read_yaml
from kvreport.publishing import captions, evaluated, judging, measures, statements
from kvreport.publishing.found import Found, has_measures, measures_of, of_runs
from kvreport.publishing.judging import Measured
from kvreport.publishing.rules import HALF, NONE, Bound, Condition, Quantity, anyone, every
from kvreport.publishing.statements import Checked, Statement
from kvreport.running import planning
from kvreport.site import sentences

DRIFT = Quantity("drift", "text")
BOUND = Bound(1.0, "ours", "a bound")
ABOVE = every(DRIFT, "above", BOUND)
WRITTEN = [chapter for chapter in planning.plan() if has_measures(chapter.name)]
BY_NAME = pytest.mark.parametrize("chapter", WRITTEN, ids=lambda chapter: chapter.name)


def given(quantity: Quantity, estimates: list[Measured]) -> Quantity:
    """Return a quantity of which these are the estimates."""
    about = {field.name: getattr(quantity, field.name) for field in fields(Quantity)}
    return type("Given", (Quantity,), {"__call__": lambda *_: estimates})(**about)


def text_of(chapter, kind: str = "markdown") -> str:
    cells = json.loads(chapter.source.read_text("utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)


# The published book


@BY_NAME
def test_every_statement_holds_on_the_printed_processor_and_none_speaks_against_it(chapter):
    found = evaluated.published(chapter.name)["statements"]
    assert {name: one["told"] for name, one in found.items() if not statements.is_borne_out(one)} == {}


@BY_NAME
def test_what_was_not_run_is_said_of_every_statement(chapter):
    found = of_runs(chapter.name, {})
    said = {name: statements.check(one, found).outcome for name, one in measures_of(chapter.name).STATEMENTS.items()}
    # What the stand-ins have learnt ships with them.
    assert set(said.values()) == ({"holds"} if chapter.name == "models" else {"not run"})


@BY_NAME
def test_rows_are_made_of_what_their_chapter_measures(chapter):
    known, found = importlib.import_module(f"{chapter.package}.rows").EXPERIMENTS, of_runs(chapter.name, {})
    # A misspelt parameter would name rows that are never there.
    found.frames["misspelt"] = lambda no_such_run: no_such_run
    assert [name for name in found.frames if not known.keys() >= {*found._experiments(name)}] == ["misspelt"]


@BY_NAME
def test_every_statement_names_the_runs_that_it_was_checked_on(chapter):
    for one in evaluated.published(chapter.name)["statements"].values():
        for processor, outcome in one["processors"].items():
            made_by = one["made_by"][processor]
            # What the stand-ins have learnt ships with them, and is read from no run.
            assert made_by or outcome == "not run" or chapter.name == "models"
            there = processor.removesuffix(f", {beside_of(processor)}")
            assert {made["machine"]["processor"] for made in made_by} <= {there}
            assert all(made["recorded"] for made in made_by)


def names_read(folder: Path) -> set[str]:
    """List the names that a folder's code reads: as they stand, of a module, or as roles in a text to be filled."""
    code = [path.read_text("utf-8") for path in folder.glob("*.py")]
    nodes = [node for text in code for node in ast.walk(ast.parse(text))]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return read.union(*(re.findall(r"\{([A-Z]\w*)[ }]", text) for text in code))


@BY_NAME
def test_sentences_checks_numbers_and_slots_belong_together(chapter):
    module, text = measures_of(chapter.name), text_of(chapter)
    assert sorted(match["id"] for match in statements.HOLDS.finditer(text)) == sorted(module.STATEMENTS)
    slots = [match["key"].partition("@") for match in captions.SLOT.finditer(text)]
    published = evaluated.published(chapter.name)
    assert {key for key, _, _ in slots} <= set(published["numbers"])
    assert {there for _, _, there in slots} <= {"", *map(evaluated.maker, published["labels"])}
    written = {role.split()[0] for role in evaluated.roles(chapter.name)}
    assert set(measures.named(module)) - written - names_read(Path(module.__file__).parent) == set()


# Of one processor is a line that names it.
ON_ONE_PROCESSOR = re.compile(r"Intel|AMD|this processor|`processor`")
ON_SOME_TEXTS = re.compile(r"Python (source|files)|English prose|chat\b")


def has_digits_that_another_run_does_not_share(printed: str, there: str) -> bool:
    """Tell whether two runs differ by a hundred units of the last printed digit; counts of so many are exact."""
    values = [re.search(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text) for text in (printed, there)]
    if None in values or re.search(r"\d of \d", f"{printed}; {there}"):
        return False
    one, other = (value[0].replace(",", "") for value in values)
    zeros = 0 if "." in one else len(one) - len(one.rstrip("0"))
    return abs(float(one) - float(other)) >= 100 * 10.0 ** (zeros - len(one.partition(".")[2]))


def lie_apart(printed: str, there: str) -> bool:
    """Tell whether two runs' intervals have nothing in common."""
    ends = [re.search(r"\[(-?[\d.,]+)%?, (-?[\d.,]+)%?\]", text) for text in (printed, there)]
    if None in ends:
        return False
    (low, high), (other_low, other_high) = ([float(end.replace(",", "")) for end in found.groups()] for found in ends)
    return low > other_high or high < other_low


def unnamed(chapter, naming: re.Pattern[str], beside: str) -> dict[str, list[str]]:
    """Find numbers in lines that do not name where they were measured, and what each is in each place beside."""
    numbers = evaluated.published(chapter.name)["numbers"]
    pages = "\n".join((paths.ROOT / page).read_text("utf-8") for page in ("index.md", "pages/answers.md"))
    pages = pages.replace(f"{{measured}}`{chapter.name}:", "{measured}`")
    lines = [line for line in f"{text_of(chapter)}\n{pages}".splitlines() if not naming.search(line)]
    written = {match["key"] for line in lines for match in captions.SLOT.finditer(line)} & set(numbers)
    other = {key: re.compile(f"{re.escape(key)}@{beside}") for key in written}
    return {key: [numbers[key], *(numbers[at] for at in numbers if of.fullmatch(at))] for key, of in other.items()}


@BY_NAME
@pytest.mark.parametrize("differ", [has_digits_that_another_run_does_not_share, lie_apart])
def test_a_number_that_two_processors_do_not_share_names_its_processor(chapter, differ):
    found = unnamed(chapter, ON_ONE_PROCESSOR, ".*").items()
    assert {key: said for key, (printed, *said) in found if any(differ(printed, there) for there in said)} == {}


def of_one_population(chapter, naming: re.Pattern[str]) -> set[str]:
    """Find estimates that other texts do not share, and that are no range."""
    found = unnamed(chapter, naming, "(Englishprose|chat)")
    differ = {key for key, said in found.items() if len({re.split(r" ?[\[±]", one)[0] for one in said}) > 1}
    return {key for key in differ if re.search(r"[\[±%]", found[key][0]) and "everywhere" not in key}


@BY_NAME
def test_an_estimate_that_populations_do_not_share_is_a_range_or_names_its_texts(chapter):
    assert of_one_population(chapter, ON_SOME_TEXTS) == set()
    # Control: without the names of texts, this chapter has such estimates.
    assert of_one_population(chapter, re.compile("(?!)")) or chapter.name != "which_path_is_right"


# Two runs' numbers, and whether digits that are printed differ, and whether intervals lie apart.
@pytest.mark.parametrize(("printed", "there", "digits", "apart"), [
    ("14,191 [13,426, 14,911]", "15,803 [14,683, 16,989]", True, False),
    ("14,000 [13,000, 15,000]", "16,000 [15,500, 17,000]", False, True),
    ("at about 1,335 tokens", "at about 1,094 tokens", True, False),
    ("75.6", "48.2", True, False), ("76", "48", False, False), ("ast.py", "12", False, False),
    ("1.15 [1.14, 1.16]", "0.99 [0.93, 1.06]", False, True),
    ("4.1% [3.8%, 4.5%], 33 files", "1.2% [0.8%, 1.5%], 20 files", False, True),
    ("1.04 [1.01, 1.11]", "1.06 [1.03, 1.09]", False, False),
    ("61 of 3,200", "470 of 24,000", False, False),
])
def test_control_numbers_that_two_runs_do_not_share_are_found(printed, there, digits, apart):
    assert has_digits_that_another_run_does_not_share(printed, there) is digits
    assert lie_apart(printed, there) is apart


@BY_NAME
def test_headlines_rest_on_thirty_units_or_ten_repeats_or_a_census(chapter):
    found, known = evaluated.published(chapter.name)["statements"], measures_of(chapter.name).STATEMENTS
    headlines = {name: (found[name]["units"], one.must.quantity.unit) for name, one in known.items() if one.headline}
    # With so few prompts these have no headline yet.
    assert headlines or chapter.name in ("serving_engines", "trainer_and_rollout")
    # One that names no unit names its census: a `Statement` without either is refused.
    assert {name: of for name, of in headlines.items() if of[1] and judging.is_few(*of)} == {}


def test_a_count_or_a_maximum_cannot_pose_as_a_sample():
    with pytest.raises(ValueError, match="a count is a fact"):
        Measured("rows that differ", fact(0).estimate, 35)
    # Control: what was estimated from as many units has an interval, also where it is 0.
    assert Measured("share that differs", wilson(0.0, 35), 35).units == 35


def test_a_headline_names_its_unit_or_all_that_was_counted():
    counted = Quantity("rows that differ")
    with pytest.raises(ValueError, match="names its unit"):
        Statement(every(counted, "at most", BOUND), headline=True)
    census = replace(counted, census="all rows that were run")
    headline = Statement(every(given(census, [fact(0)]), "at most", BOUND), headline=True)
    assert statements.check(headline, Found({}, {})).outcome == "holds"
    assert "counted over all rows that were run" in census.about
    # A fact that stands among a headline's samples would be taken for one of them.
    both = given(DRIFT, [Measured("", Estimate(2, 1.5, 2.5), 40), fact(2)])
    mixed = Statement(replace(ABOVE, quantity=both), headline=True)
    with pytest.raises(ValueError, match="a fact stands among"):
        statements.check(mixed, Found({}, {}))
    # Control: where it is no headline it is counted beside them.
    assert statements.check(replace(mixed, headline=False), Found({}, {})).units == 40


def test_texts_must_be_thirty_and_repeats_ten():
    assert [judging.is_few(count, "file") for count in (29, 30)] == [True, False]
    assert [judging.is_few(count, "repeat") for count in (9, 10)] == [True, False]


@BY_NAME
def test_every_figure_and_table_has_its_caption_in_markdown_and_none_is_left_over(chapter):
    code = text_of(chapter, "code")
    named = captions.of(chapter.source)
    judged = getattr(measures_of(chapter.name), "CLAIMS", None)
    drawn = {name for name in named if f'"{name}"' in code} | ({judged.table} if judged else set())
    assert drawn == set(named)
    assert sum(code.count(f"page.{kind}(") for kind in ("figure", "table", "claims")) == len(named)


def bounds() -> list[Bound]:
    """List every bound of the book's statements and claims."""
    of_statements = [one.must.bound for of in WRITTEN for one in measures_of(of.name).STATEMENTS.values()]
    checks = [check for of in WRITTEN for check in getattr(measures_of(of.name), "CHECKS", {}).values()]
    return [*of_statements, *(condition.bound for check in checks for condition in check.rule.conditions)]


def chosen(found: list[Bound]) -> list[Bound]:
    """List those that say arithmetic and are a choice: neither none, all or as much, nor two errors of one size."""
    return [bound for bound in found if bound.source == "arithmetic" and bound.value not in (0, 1, 2**0.5)]


def test_only_none_all_as_much_and_independent_errors_are_arithmetic():
    assert chosen(bounds()) == []
    # Control: half, called arithmetic.
    assert chosen([half := replace(HALF, source="arithmetic")]) == [half]


def test_more_often_than_not_is_one_bound_of_ours():
    assert {bound for bound in bounds() if "often than not" in bound.why} == {HALF}


# Of each chapter the sentences whose estimate has an arithmetic of its own, and the claims on others' documents.
CONTRARY = read_yaml(Path(__file__).with_name("contrary.yaml"))


def each(kind: str):
    cases = [(chapter, of) for chapter, listed in CONTRARY[kind].items() for of in listed]
    return pytest.mark.parametrize(("chapter", "of"), cases, ids=[f"{chapter}-{of['of']}" for chapter, of in cases])


@each("sentences")
def test_control_a_statement_fails_on_rows_that_contradict_it(chapter, of):
    statement, each = measures_of(chapter).STATEMENTS[of["of"]], published(chapter).values()
    borne_out = next(found for found in each if statements.check(statement, found).outcome == "holds")
    contrary = changed(borne_out, of["rows"], of.get("where", ""), **of["put"])
    assert statements.check(statement, contrary).outcome == of.get("outcome", "fails")


@each("claims")
def test_other_rows_give_another_verdict(chapter, of):
    found = next(iter(published(chapter).values()))
    if "rows" in of:
        found = changed(found, of["rows"], of.get("where", ""), **of.get("put", {}))
    if "keep" in of:
        found = with_rows(found, **{of["rows"]: found[of["rows"]].query(of["keep"])})
    said = measures_of(chapter).CHECKS[of["of"]](on(found, of.get("machine", {})))
    assert said.verdict.removesuffix(" on another real model") == of["verdict"]
    assert of.get("n", "") in said.n


def beyond(condition: Condition) -> Estimate:
    """Return an estimate on the other side of a condition's bound."""
    bound, size = condition.bound, abs(condition.bound.value) or 1.0
    value = bound.value + (-size if condition.side in ("above", "at least") else size) / 2
    return Estimate(value, value, value)


@BY_NAME
def test_every_statement_fails_on_an_estimate_beyond_its_bound_and_is_checked_on_its_own_makers_processor(chapter):
    for one in measures_of(chapter.name).STATEMENTS.values():
        found = [Measured("", beyond(one.must), 40 if one.must.quantity.unit else None)]
        failing = replace(one, must=replace(one.must, quantity=given(one.must.quantity, found)))
        # What a library was held to stands behind a processor's name.
        on = f"a processor, {one.on}" if "=" in one.on else one.on
        theirs, another = (Found({}, {"x": run_of(None, machine={"processor": of})}) for of in (on, "another"))
        assert statements.check(failing, theirs).outcome == "fails"
        assert statements.check(failing, another).outcome == ("not run" if one.on else "fails")


# The check


LOW, ACROSS, HIGH = (0.5, 0.4, 0.6), (1.0, 0.8, 1.2), (2.0, 1.5, 2.5)
BELOW, LEAST, MOST = (every(DRIFT, side, BOUND) for side in ("below", "at least", "at most"))
SOME, INSIDE = anyone(DRIFT, "above", BOUND), every(DRIFT, "inside", Bound(1.5, "ours", "a band", "ratio"))
# "Every" fails by one series, "any" only by all; a band is left by the whole interval only.
OUTCOMES = {
    "holds": [(ABOVE, HIGH), (SOME, HIGH, LOW), (BELOW, LOW), (LEAST, HIGH), (MOST, LOW), (INSIDE, (1.0, 0.9, 1.1))],
    "fails": [
        (ABOVE, LOW), (ABOVE, HIGH, LOW), (SOME, LOW, LOW), (BELOW, HIGH), (LEAST, LOW), (MOST, HIGH),
        (INSIDE, (3.0, 2.0, 4.0)),
    ],
    "not resolved": [(ABOVE, ACROSS), (ABOVE, HIGH, ACROSS), (SOME, LOW, ACROSS), (INSIDE, (1.5, 1.3, 1.7))],
    "not run": [(ABOVE,), (SOME,)],
}


def checked(must, *estimates, units=40) -> Checked:
    found = [Measured(f"series {k}", Estimate(*values), units) for k, values in enumerate(estimates)]
    return statements.check(Statement(replace(must, quantity=given(must.quantity, found))), Found({}, {}))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_statement_holds_fails_or_is_not_resolved_by_where_its_whole_intervals_lie(outcome):
    assert {checked(*case).outcome for case in OUTCOMES[outcome]} == {outcome}


def test_fewer_than_four_units_resolve_nothing():
    assert checked(ABOVE, HIGH, units=3).outcome == "not resolved"


def test_few_units_that_are_all_alike_contradict_nothing():
    alike = (2.0, 2.0, 2.0)
    assert [checked(BELOW, alike, units=units).outcome for units in (29, 30)] == ["not resolved", "fails"]
    assert checked(ABOVE, alike, units=4).outcome == "holds"


def test_a_statement_says_what_a_third_of_our_bound_and_three_times_it_would_give():
    found = checked(every(DRIFT, "above", HALF), (0.6, 0.55, 0.65))
    assert found.elsewhere == "our bound of 0.5: holds at 0.25 and fails at 0.75"


def test_a_run_agrees_differs_or_is_not_comparable():
    def compared(own: str, comparable: bool = True) -> str:
        return statements.compare("holds", own, comparable)

    assert [compared(own) for own in ("holds", "fails", "not resolved")] == ["agrees", "differs", "not resolved"]
    assert [compared(own, False) for own in ("fails", "not run")] == ["not comparable", "not run"]


def test_texts_on_which_two_processors_differ_are_told_with_the_processor():
    names = ("one", "one, chat", "two, chat", "one, English prose", "two, English prose")
    outcomes = dict(zip(names, ("holds", "fails", "holds", "holds", "not run"), strict=True))
    found = {"processor": "one", "told": "2", "outcome": "holds", "on": "", "processors": outcomes}
    said = sentences._there(found | {"said": dict.fromkeys(names, "0")}, {name: name.upper() for name in names})
    assert said == "holds on the ONE: 2; fails on the ONE, CHAT: 0; holds on the TWO, CHAT and English prose too"


def test_a_tally_says_of_how_much_a_run_says_nothing():
    counts = Counter({"agrees": 75, "not comparable": 80, "not resolved": 33})
    assert sentences._tally(counts, "This run") == (
        "This run can decide 75 of 188 statements: 75 agree with the book, and 0 differ. "
        "It cannot decide the others: 80 about another model or processor and 33 that its intervals leave open."
    )


def test_an_experiment_without_a_model_leaves_a_run_comparable():
    about = {"machine": {"processor": "one"}}
    named, shapes = (Run(about | models, Path()) for models in ({"models": [{"name": "small"}]}, {}))
    assert evaluated._is_in_scope("this processor", {"drift": named, "shapes": shapes}, ["small"], "one")
    # Controls: another processor and another model are told from it.
    assert not evaluated._is_in_scope("this processor", {"drift": named, "shapes": shapes}, ["small"], "another")
    assert not evaluated._is_in_scope("this processor", {"shapes": shapes}, ["small"], "one")


def test_rows_of_libraries_that_were_held_back_decide_only_sentences_that_name_the_limit():
    def speaks(on: str, processor: str) -> bool:
        run = Run({"machine": {"processor": processor, "cpu": {"instructions": []}}}, Path())
        return Statement(ABOVE, on=on).is_for(Found({}, {"drift": run}))

    held = "Maker One, LIBRARY_MAX=OLD"
    assert speaks("LIBRARY_MAX=OLD", held)
    assert not any(speaks(on, held) for on in ("", "Maker", "LIBRARY_MAX=NEW"))
    # Control: without a limit a sentence about all speaks of the processor, and one about its maker.
    assert all(speaks(on, "Maker One") for on in ("", "Maker"))
    assert evaluated.maker(f"{held}, fewer instructions") == "OLD"


def test_none_among_the_few_of_a_run_does_not_refute_that_there_are_some():
    count = Quantity("prompts that differ", census="all")
    assert Statement(every(count, "above", NONE)).says_some
    # Controls: a share of sampled texts, another bound, and "none".
    others = every(DRIFT, "above", NONE), every(count, "above", BOUND), every(count, "at most", NONE)
    assert not any(Statement(other).says_some for other in others)


@pytest.mark.parametrize(("items", "comparison"), [(None, "differs"), (1, "not resolved")])
def test_a_run_as_large_as_the_books_differs_where_it_finds_none_and_a_smaller_one_cannot_tell(
    items, comparison, monkeypatch
):
    book, found = evaluated.published("prompt_reuse"), next(iter(published("prompt_reuse").values()))
    # One token is written after each prompt, and reuse never changes it.
    equal = {name: found[name].query("step == step.min()") for name in ("prompt_reuse", "reused_questions")}
    few = {name: of[of["item"].isin(of["item"].unique()[:items])].assign(token=1) for name, of in equal.items()}
    runs = {name: run for name, run in with_rows(found, **few).runs.items() if run}
    monkeypatch.setattr(evaluated.records, "load", lambda folder: runs[folder.name])
    own = evaluated._own("prompt_reuse", book, {name: name for name in runs})["statements"]["rounding-in-bf16"]
    assert (own["outcome"], own["comparison"]) == ("fails", comparison)


def test_a_run_is_as_large_as_the_rows_that_a_sentence_counts_and_no_larger_for_others_of_the_frame():
    found = next(iter(published("where_drift_begins").values()))
    measure, calls = measures_of("where_drift_begins").MOST_PREFILL, found["calls"]
    counted = calls[calls["first"] & (calls["pass"] == dict(measure.keep)["pass"][0])]
    assert evaluated._rows_behind(Statement(every(measure, "above", NONE)), found) == len(counted)
    assert 0 < len(counted) < len(calls)


def test_a_run_is_held_against_its_own_kind_of_processor_where_that_was_recorded_and_decided():
    published = {"processor": "one", "processors": {"one": "holds", "another": "fails", "a third": "not resolved"}}
    assert evaluated._to_compare(published, ["another"]) == ("another", "fails")
    # Controls: of an undecided kind, and of one that was never recorded, the printed outcome counts.
    assert evaluated._to_compare(published, ["a third"]) == evaluated._to_compare(published, []) == ("one", "holds")
    runs = {"drift": Run({"machine": {"processor": "one"}, "models": [{"name": "small"}]}, Path())}
    assert evaluated._is_in_scope("this processor", runs, ["small"], "another", alike=True)
    assert not evaluated._is_in_scope("this processor", runs, ["small", "large"], "another", alike=True)
    runs["drift"].about["machine"]["device"] = "cuda:0"
    assert not evaluated._is_in_scope("this processor", runs, ["small"], "one")


# The page


GROWS = {
    "outcome": "holds", "told": "2 [1.5, 2.5]", "units": 40, "scope": "any model", "rule": "Drift lies above 1",
    "elsewhere": "our bound of 1: the same at 0.333 and 3", "processor": "one", "processors": {"one": "holds"},
    "said": {"one": "2 [1.5, 2.5]"}, "on": "",
}
BOOK = {
    "numbers": {"growth": "10 %"}, "statements": {"grows": GROWS}, "labels": {"one": "Maker One (kind)"},
    "behind": {evaluated.PROCESSOR: [{"models": ["small"], "processor": "Maker One (kind)", "texts": "Python source"}]},
}
TEXT = """\
Drift grows by {measured}`growth`. {holds}`grows`

:::{caption} fig-x
:alt: A line.
It grows by {measured}`growth`,
over two lines.
:::

<!-- part: your run -->
"""


@pytest.fixture
def chapter(monkeypatch):
    book = copy.deepcopy(BOOK)
    monkeypatch.setattr(evaluated, "published", lambda name: book)
    monkeypatch.setattr(evaluated, "own", lambda name, folders: None)
    return book


def said(text=TEXT) -> str:
    notebook = {"cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": text}]}
    return sentences.say(notebook, {"cells": []}, planning.plan()[0])[0]["cells"][0]["source"]


def test_a_sentence_that_holds_shows_its_number_and_a_link_and_no_mark(chapter):
    text = said()
    assert "Drift grows by 10 %. []{#statement-grows}[¶](#statement-grows)" in text
    assert "Drift lies above 1 (any model); our bound of 1: the same at 0.333 and 3" in text
    assert sentences.MARK not in text
    assert "caption}" not in text


def test_another_processor_can_only_contradict_what_speaks_of_all():
    def stands(scope: str, one: str, other: str, name: str = "another") -> bool:
        outcomes = {"one": one, name: other}
        return statements.is_borne_out({"scope": scope, "processor": "one", "processors": outcomes})

    assert all(stands("any model", "holds", another) for another in ("holds", "not resolved", "not run"))
    assert stands("this processor", "holds", "fails")
    assert not stands("any model", "not resolved", "holds")
    assert not stands("this model", "holds", "fails")
    assert not stands("this processor", "fails", "holds")
    assert not stands("this processor", "holds", "fails", name="one, chat")


def test_a_failure_on_one_processor_shows_a_mark_and_the_table_the_outcome_on_each(chapter):
    of = chapter["statements"]["grows"]
    chapter["labels"]["another"] = "Maker Two"
    of["processors"]["another"], of["said"]["another"] = "holds", "3 [2.5, 3.5]"
    assert '"2 [1.5, 2.5]",' in said()
    of["processors"]["another"], of["said"]["another"] = "fails", "0.5 [0.4, 0.6]"
    assert sentences.MARK in said()
    assert '"holds on the Maker One (kind): 2 [1.5, 2.5]; fails on the Maker Two: 0.5 [0.4, 0.6]"' in said()
    of["processors"]["another"], of["said"]["another"] = "not run", ""
    assert "; not recorded there (Maker Two)" in said()
    of["processors"]["one, chat"], of["said"]["one, chat"] = "holds", "2.5 [2, 3]"
    chapter["labels"]["one, chat"] = "Maker One, on chat"
    assert "; holds on chat too" in said()
    of["processors"]["one, chat"] = "fails"
    assert "; fails on the Maker One, on chat: 2.5 [2, 3]" in said()
    of["processors"]["one, chat"] = "not run"
    assert "(Maker One, on chat)" not in said()
    # Control: what speaks of one processor is not checked on another.
    of["on"] = "Maker One"
    assert '"2 [1.5, 2.5]",' in said()


def test_a_chapter_opens_with_the_model_the_texts_and_the_processor_of_its_numbers(chapter):
    made_on = "\n\n[small on Python source, Maker One (kind)]{.kvbook-made-on}\n"
    assert made_on in said("# A title\n\nAn answer. {holds}`grows`\n")
    assert "Also recorded" not in said()
    chapter["labels"]["another"] = "Maker Two"
    assert "[Also recorded: Maker Two.]{.kvbook-made-on}" in said()


def test_where_your_run_differs_the_sentence_leads_to_the_row(chapter, monkeypatch):
    own = {"statements": {"grows": {"outcome": "fails", "told": "0.5", "comparison": "differs"}}}
    monkeypatch.setattr(evaluated, "own", lambda name, folders: own)
    text = said()
    assert f"[differs on the machine that built this page](#{sentences.table_of(planning.plan()[0].name)})" in text
    assert "This run can decide 1 of 1 statements: 0 agree with the book, and 1 differs." in text
    own["statements"]["grows"]["comparison"] = "agrees"
    assert "differs on the machine" not in said()


def test_what_your_run_says_is_kept_in_a_file_until_its_runs_or_the_books_rows_change(tmp_path, monkeypatch):
    done, book = [], {"made_of": "today's rows"}
    monkeypatch.setattr(paths, "BUILD", tmp_path)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(evaluated, "published", lambda chapter: book)
    monkeypatch.setattr(evaluated, "_own", lambda *given: done.append(given) or {"statements": len(done)})
    chapter, a, b = planning.plan()[0].name, {"speed": "speed/a"}, {"speed": "speed/b"}
    assert evaluated.own(chapter, a) is None
    for run in ("a", "b"):
        (tmp_path / "runs" / "speed" / run).mkdir(parents=True)
    assert [evaluated.own(chapter, of)["statements"] for of in (a, a, b)] == [1, 1, 2]
    assert json.loads((tmp_path / "statements" / f"{chapter}.yours.json").read_text()) == evaluated.own(chapter, b)
    book["made_of"] = "tomorrow's"
    assert evaluated.own(chapter, b)["statements"] == 3


def test_a_caption_is_read_on_one_line_and_says_of_a_packaged_model_how_large_it_is_and_that_its_weights_are_rounded():
    notebook = {"cells": [{"cell_type": "markdown", "source": TEXT.replace("growth", "model")}]}
    found = captions.written(notebook, {"model": "SmolLM2-135M-Instruct"})
    said = "It grows by SmolLM2-135M-Instruct (135 M, 4-bit-rounded weights), over two lines."
    assert found == {"fig-x": captions.Caption(said, "A line.")}
    # Control: other weights of the same name.
    for other in ("a/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q8_0", "SmolLM2-135M"):
        assert captions.written(notebook, {"model": other})["fig-x"].text.startswith(f"It grows by {other}, over")


def test_the_caption_of_an_own_run_speaks_of_the_book_but_where_both_are_drawn():
    own = {"name": "fig-x", "published": False}
    others = own | {"name": "fig-your-x"}, own | {"published": True}, {"name": "fig-x"}
    assert [captions.speaks_of_the_book(item) for item in (own, *others)] == [True, False, False, False]


FAULTS = {
    "a sentence without a check": (TEXT + "More. {holds}`more`", "the sentence `more` has no check"),
    "a check without a sentence": (TEXT.replace("{holds}`grows`", ""), "`grows` has a check and no sentence"),
    "one id twice": (TEXT + "Again. {holds}`grows`", "`grows` stands twice"),
    "a slot without a number": (TEXT.replace("`growth`.", "`nosuch`."), "the number `nosuch` is nowhere computed"),
    "a figure without words": (TEXT.replace(":alt: A line.\n", ""), "no line `:alt:`"),
    "two captions of one figure": (TEXT + ":::{caption} fig-x\n:alt: A.\nB.\n:::\n", "fig-x has two captions"),
}


@pytest.mark.parametrize(("text", "message"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_belong_together_stops_the_build_in_one_line(chapter, text, message):
    assert message in refusal(said, text)
