"""The rule that is printed beside a claim is the rule that judges it."""

import dataclasses
import random
import re
import string

import pytest
from made_up import fact

from kvbook.measuring.estimates import FEWEST_UNITS, Estimate
from kvreport.publishing import found as found_in
from kvreport.publishing.judging import UNFITTED, Evidence, Measured, judge
from kvreport.publishing.rules import Bound, Quantity, Rule, anyone, every, other_cause, refuted, reproduced
from kvreport.running import planning

CHECKS = [getattr(found_in.measures_of(chapter.name), "CHECKS", {}) for chapter in planning.plan()]
RULES = {name: check.rule for checks in CHECKS for name, check in checks.items()}

SHARE = Quantity("share of texts that differ", "file", "model")
COUNT = Quantity("runs that differ")
HALF = Bound(0.5, "ours", "more often than not", "share")
SIMPLE = Rule((reproduced(every(SHARE, "above", HALF)), refuted(anyone(SHARE, "below", HALF))))


def at(*values: float, units: int = 40) -> list[Measured]:
    return [Measured(f"model {i}", Estimate(v, v - 0.01, v + 0.01), units) for i, v in enumerate(values)]


def word(rule: Rule, found, weights: str = "hub", **about) -> str:
    return judge(rule, Evidence(weights, found, **about)).verdict


# What the text says, read by a reader who has the text alone

_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
_CLAUSE = re.compile(
    r"(?P<label>\([a-z]\)|its whole interval|it) "
    r"(?P<lies>lies above|lies below|is at least|is at most|lies inside|lies outside) "
    rf"(?P<bound>1/{_NUMBER} to {_NUMBER}|{_NUMBER} to {_NUMBER}|{_NUMBER})"
    r"(?: \((?P<source>the document's|arithmetic|ours): [^)]+\))?(?: for (?P<of>every|at least one|most))?"
)
_OUTCOME = (
    r"(Reproduced|Refuted|Other cause) when (.*?)(; one case is enough)?\.(?= (?:Re|Other|Not run|A cause|Weights)|$)"
)


def read(rule: Rule) -> list[tuple[str, list[dict[str, str]]]]:
    """Read the outcomes and their clauses off the printed rule, each with the quantity that its letter stands for."""
    text = rule.text()
    head = text.removeprefix("Estimated: ")
    single = next((q.name for q in rule.quantities if head.startswith(f"{q.name} (")), "")
    names = dict.fromkeys(("it", "its whole interval"), single)
    for letter in string.ascii_lowercase:
        names |= {f"({letter})": q.name for q in rule.quantities if f"({letter}) {q.name} (" in head}
    return [
        (answer, [found.groupdict() | {"name": names[found["label"]]} for found in _CLAUSE.finditer(said)])
        for answer, said, _ in re.findall(_OUTCOME, text)
    ]


def band(bound: str) -> tuple[float, float]:
    bound = bound.replace(",", "")
    low, high = bound.split(" to ") if " to " in bound else (bound, bound)
    return (1 / float(low[2:]) if low.startswith("1/") else float(low)), float(high)


def stands(clause: dict[str, str], estimates: list[Estimate]) -> bool:
    low, high = band(clause["bound"])
    test = {
        "lies above": lambda e: e.low > high, "lies below": lambda e: e.high < low,
        "is at least": lambda e: e.low >= high, "is at most": lambda e: e.high <= low,
        "lies inside": lambda e: e.low > low and e.high < high,
        "lies outside": lambda e: e.high < low or e.low > high,
    }[clause["lies"]]
    count = sum(map(test, estimates))
    of = clause["of"] or "every"
    return {"every": count == len(estimates), "at least one": count > 0, "most": count > len(estimates) / 2}[of]


def as_read(rule: Rule, found: dict[Quantity, list[Measured]]) -> str:
    estimates = {quantity.name: [one.estimate for one in measured] for quantity, measured in found.items()}
    for answer, clauses in read(rule):
        if all(stands(clause, estimates[clause["name"]]) for clause in clauses):
            return answer.lower()
    return "undecided"


def on_each_side(rule: Rule, seed: int = 0, times: int = 300):
    """Draw estimates on each side of every bound of a rule, of one series and of three."""
    drawn = random.Random(seed)
    ends = {quantity: set() for quantity in rule.quantities}
    for condition in rule.conditions:
        ends[condition.quantity] |= {condition.bound.value, condition.bound.lower}
    for _ in range(times):
        found = {}
        for quantity, bounds in ends.items():
            one = []
            for series in range(drawn.choice((1, 1, 3)) if quantity.series else 1):
                bound = drawn.choice(sorted(bounds))
                size = max(abs(bound), 1e-3) / 100
                centre = bound + drawn.choice((-2, 2, 2, -2, 0)) * size
                spread = size * (drawn.choice((1, 1, 1, 1000)) if quantity.unit else 0)
                units = 40 if quantity.unit else None
                one.append(Measured(str(series), Estimate(centre, centre - spread, centre + spread), units))
            found[quantity] = one
        yield found


@pytest.mark.parametrize("name", RULES)
def test_a_reader_of_the_printed_rule_gives_the_verdict_that_the_code_gives(name):
    # With real weights and all that is needed, so that the verdict is the rule's own answer.
    rule = dataclasses.replace(RULES[name], unseen="", needs=())
    said = [(as_read(rule, found), word(rule, found)) for found in on_each_side(rule)]
    assert len(set(said)) > 1, "the estimates lie on one side only"
    assert [by for by in said if len(set(by)) > 1] == []


def test_control_a_rule_whose_text_is_anothers_is_found():
    other = SIMPLE.with_bound(HALF, Bound(0.6, "ours", "three in five", "share"))
    assert any(as_read(SIMPLE, found) != word(other, found) for found in on_each_side(other))
    loose = Rule((reproduced(anyone(SHARE, "above", HALF)), refuted(every(SHARE, "below", HALF))))
    assert any(as_read(SIMPLE, found) != word(loose, found) for found in on_each_side(loose))


@pytest.mark.parametrize("name", RULES)
def test_every_threshold_is_printed_as_it_is_used_and_says_where_it_comes_from(name):
    rule = RULES[name]
    printed = [clause for _, clauses in read(rule) for clause in clauses]
    assert len(printed) == len(rule.conditions)
    for clause, condition in zip(printed, rule.conditions, strict=True):
        ends = (condition.bound.lower, condition.bound.value)
        assert band(clause["bound"]) == (ends if condition.side in ("inside", "outside") else ends[1:] * 2)
        assert condition.bound.why
    # Where a bound comes from is said where it is first named.
    first = {clause["bound"]: clause["source"] for clause in reversed(printed) if clause["source"]}
    assert first.keys() == {clause["bound"] for clause in printed}
    assert all(need in rule.text() for need in rule.needs)


def test_what_stand_ins_show_they_show_in_kind_for_a_claim_and_against_it():
    ends = {"hub": "", "package": " on another real model", "stand-in": " in kind", "random": " in kind"}
    for weights, end in ends.items():
        assert word(SIMPLE, {SHARE: at(0.9)}, weights) == f"reproduced{end}"
        assert word(SIMPLE, {SHARE: at(0.1)}, weights) == f"refuted{end}"
        assert word(SIMPLE, {SHARE: at(0.5)}, weights) == "undecided"
    assert word(dataclasses.replace(SIMPLE, about_code=True), {SHARE: at(0.1)}, "stand-in") == "refuted"


def test_a_cause_is_plausible_where_the_documents_own_setting_was_not_seen():
    rule = Rule((other_cause(every(SHARE, "above", HALF)),))
    assert word(rule, {SHARE: at(0.9)}) == word(rule, {SHARE: at(0.9)}, "package") == "other cause"
    assert word(rule, {SHARE: at(0.9)}, "stand-in") == "plausible cause"
    assert word(dataclasses.replace(rule, unseen="its code"), {SHARE: at(0.9)}) == "plausible cause"


def test_too_few_units_decide_nothing_and_are_said_to_be_too_few():
    few = judge(SIMPLE, Evidence("hub", {SHARE: at(0.9, units=FEWEST_UNITS - 1)}))
    assert few.verdict == "undecided"
    assert few.n == "3 files (too few)"
    assert "too few to decide" in few.here
    enough = judge(SIMPLE, Evidence("hub", {SHARE: at(0.9, units=FEWEST_UNITS)}))
    assert (enough.verdict, enough.n) == ("reproduced", "4 files (few)")
    assert judge(SIMPLE, Evidence("hub", {SHARE: at(0.9, units=30)})).n == "30 files"


def test_few_units_that_are_all_alike_refute_nothing():
    low, high = (Estimate(*3 * [value]) for value in (0.1, 0.9))
    for units, verdict in ((FEWEST_UNITS, "undecided"), (29, "undecided"), (30, "refuted")):
        assert word(SIMPLE, {SHARE: [Measured("a", low, units)]}) == verdict
    found = {SHARE: [Measured("a", high, FEWEST_UNITS)]}
    assert word(SIMPLE, found) == "reproduced"
    # Control: a counterexample among them is one.
    assert word(Rule((refuted(every(SHARE, "above", HALF), one_is_enough=True),)), found) == "refuted"


def test_one_counterexample_refutes_and_needs_no_sample():
    never = Bound(0, "document", "“always”")
    rule = Rule((refuted(every(COUNT, "above", never), one_is_enough=True), reproduced(every(SHARE, "above", HALF))))
    assert word(rule, {COUNT: [fact(1)], SHARE: at(0.9, units=1)}) == "refuted"
    assert word(rule, {COUNT: [fact(0)], SHARE: at(0.9, units=1)}) == "undecided"
    assert word(rule, {COUNT: [fact(0)], SHARE: at(0.9)}) == "reproduced"
    assert judge(rule, Evidence("hub", {COUNT: [fact(1)], SHARE: at(0.9, units=1)})).n == "one case is enough"


def test_a_series_that_could_not_be_estimated_keeps_a_claim_from_being_borne_out():
    found = {SHARE: [*at(0.9), Measured("another", UNFITTED, 40)]}
    assert word(SIMPLE, found) == "undecided"
    assert "1 series cannot be estimated" in judge(SIMPLE, Evidence("hub", found)).here


def test_what_a_run_lacks_is_said_and_nothing_is_judged():
    rule = dataclasses.replace(SIMPLE, needs=("a CUDA device",))
    lacking = judge(rule, Evidence("hub", {SHARE: at(0.9)}))
    assert lacking.verdict == "not run"
    assert "this run lacks a CUDA device" in lacking.here
    assert "our bound" not in lacking.here
    assert word(rule, {SHARE: at(0.9)}, has=frozenset({"a CUDA device"})) == "reproduced"
    assert judge(SIMPLE, Evidence("hub", missing="0 rows in bf16")).verdict == "not run"
    assert word(SIMPLE, {SHARE: []}) == "not run"


def test_a_bound_of_ours_is_tried_at_a_third_and_at_three_times_it():
    said = judge(SIMPLE, Evidence("hub", {SHARE: at(0.6)})).here
    assert "our bound of 0.5: reproduced at 0.25 and refuted at 0.75" in said
    assert "our bound of 0.5: the same at 0.25 and 0.75" in judge(SIMPLE, Evidence("hub", {SHARE: at(0.9)})).here
    theirs = SIMPLE.with_bound(HALF, dataclasses.replace(HALF, source="document"))
    assert "our bound" not in judge(theirs, Evidence("hub", {SHARE: at(0.6)})).here


def test_three_times_a_bound_is_three_times_its_distance_from_nothing():
    for value, scale, third, triple in (
        (6, "value", 2, 18), (1.3, "ratio", 1.1, 1.9), (0.5, "ratio", 0.75, 0.25), (0.5, "share", 0.25, 0.75),
    ):
        bound = Bound(value, "ours", "x", scale)
        assert [bound.times(factor).value for factor in (1 / 3, 3)] == pytest.approx([third, triple])


def test_many_series_are_told_by_their_ends():
    said = judge(SIMPLE, Evidence("hub", {SHARE: at(*(0.1 * k for k in range(1, 9)))})).here
    assert "from model 0 0.10 [0.09, 0.11] to model 7 0.80 [0.79, 0.81], 8 series" in said
    # Control: of few each is told.
    few = judge(SIMPLE, Evidence("hub", {SHARE: at(0.1, 0.2)})).here
    assert "model 0 0.10 [0.09, 0.11], model 1 0.20 [0.19, 0.21]" in few
