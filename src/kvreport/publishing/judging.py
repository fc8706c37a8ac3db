"""Verdicts: what a rule makes of the estimates of a run."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from kvbook.measuring.estimates import FEWEST_UNITS, Estimate
from kvreport.publishing import wording
from kvreport.publishing.rules import Answer, Bound, Outcome, Quantity, Rule

Word = Literal[
    "reproduced", "reproduced on another real model", "reproduced in kind",
    "refuted", "refuted on another real model", "refuted in kind",
    "other cause", "plausible cause", "undecided", "not run",
]
# Whose weights they are: the documents' models, or other trained models of a real size.
DOCUMENTS, OTHERS = ("hub", "local"), ("package", "gguf")
# Of fewer units than this a verdict is given, and said to rest on few.
FEW_UNITS = 30
# Repeats of a time on one machine scatter less than texts differ; ways are timed by turns.
FEW_REPEATS = 10
_REPEATS = frozenset({"repeat", "repetition"})
# What a page says of a number or a claim for which a processor has no rows.
NOT_RECORDED = "not recorded there"

# Of a series that no estimate could be made for: it lies on no side of any bound.
UNFITTED = Estimate(math.nan, math.nan, math.nan, "range")


@dataclass(frozen=True)
class Measured:
    """One estimate: of which series, and from how many independent units (None where nothing is sampled)."""

    series: str
    estimate: Estimate
    units: int | None = None

    def __post_init__(self) -> None:
        """Refuse a fact that names units: it has no interval, however many rows it was counted on."""
        if self.is_fitted and self.estimate.kind == "range" and (self.units or 0) >= FEWEST_UNITS:
            raise ValueError(f"{self.series}: an estimate from {self.units} units has an interval; a count is a fact")

    @property
    def is_fitted(self) -> bool:
        """Whether an estimate could be made for the series."""
        return not math.isnan(self.estimate.value)

    @property
    def refuting(self) -> Estimate:
        """What may contradict: an interval of no width, of a few units that are all alike, is on no side of a bound."""
        few = FEWEST_UNITS <= (self.units or 0) < FEW_UNITS
        return UNFITTED if few and self.estimate.low == self.estimate.high else self.estimate

    def said(self, form: str) -> str:
        """Write it after the name of its series."""
        number = wording.estimated(self.estimate, form) if self.is_fitted else "cannot be estimated"
        return f"{self.series} {number}".strip()


def with_units(measured: Iterable[Measured], unit: str, form: str) -> str:
    """Write estimates with their intervals, and how many independent units they are from."""
    return "; ".join(f"{one.estimate.text(form)}, {one.units} {unit}" for one in measured)


@dataclass(frozen=True)
class Evidence:
    """What a run says of one claim.

    Attributes
    ----------
    weights : str
        Of the models that made the rows.
    found : mapping of Quantity to sequence of Measured
        The estimates.
    beside : str
        What is told beside them and decides nothing.
    has : frozenset of str
        What of `Rule.needs` the run has.
    missing : str
        Why nothing was measured; empty where something was.
    published : str or None
        What the document's own numbers give in the same arithmetic.
    """

    weights: str
    found: Mapping[Quantity, Sequence[Measured]] = field(default_factory=dict)
    beside: str = ""
    has: frozenset[str] = frozenset()
    missing: str = ""
    published: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What our rows say of a claim.

    Attributes
    ----------
    here : str
        The numbers that decided, with their intervals, and what other bounds of ours would make of them.
    verdict : str
        One of `Word`.
    n : str
        Of how many independent units, and whether these are few.
    published : str, optional
        What the document's own numbers give in the same arithmetic, where it published numbers.
    """

    here: str
    verdict: Word
    n: str = ""
    published: str | None = None


@dataclass(frozen=True)
class Check:
    """A claim's rule, and how its evidence is taken from what a chapter found."""

    rule: Rule
    measure: Callable[[Any], Evidence]

    def __call__(self, found: Any) -> Verdict:
        """Judge the claim."""
        return judge(self.rule, self.measure(found))


def judge(rule: Rule, evidence: Evidence) -> Verdict:
    """Turn estimates into a verdict by a rule."""
    word, outcome = _decide(rule, evidence)
    if evidence.missing or not any(evidence.found.values()):
        return Verdict(evidence.missing or "no rows to judge it by", "not run", "", evidence.published)
    counts = _units(rule.quantities, evidence)
    here = [_told(q, label, evidence.found[q]) for q, label in rule.labels.items() if evidence.found.get(q)]
    here += [evidence.beside] if evidence.beside else []
    if word == "not run":
        here += [f"this run lacks {' and '.join(need for need in rule.needs if need not in evidence.has)}"]
    elif word == "undecided" and _too_few(counts):
        here += ["too few to decide"]
    if word != "not run":
        bounds = (condition.bound for condition in rule.conditions)
        here += elsewhere(bounds, word, lambda old, new: _decide(rule.with_bound(old, new), evidence)[0])
    n = "one case is enough" if outcome and outcome.one_is_enough else _counted(counts)
    return Verdict("; ".join(here), word, n, evidence.published)


def _decide(rule: Rule, evidence: Evidence) -> tuple[Word, Outcome | None]:
    """Find the first outcome whose conditions all hold, and the word for it."""
    if evidence.missing or not evidence.has.issuperset(rule.needs):
        return "not run", None
    for outcome in rule.outcomes:
        looked_at = [condition.quantity for condition in outcome.conditions]
        if _too_few(_units(looked_at, evidence)) and not outcome.one_is_enough:
            continue
        contradicts = outcome.answer == "refuted" and not outcome.one_is_enough
        taken = attrgetter("refuting" if contradicts else "estimate")
        if all(c.holds([*map(taken, evidence.found.get(c.quantity, ()))]) for c in outcome.conditions):
            return _scoped(outcome.answer, rule, evidence.weights), outcome
    return "undecided", None


def _scoped(answer: Answer, rule: Rule, weights: str) -> Word:
    """Return the word for an answer; what stand-ins show, for a claim or against it, they show in kind."""
    theirs = rule.about_code or weights in DOCUMENTS
    if answer == "other cause":
        return "other cause" if (theirs or weights in OTHERS) and not rule.unseen else "plausible cause"
    where = "" if theirs else " on another real model" if weights in OTHERS else " in kind"
    return f"{answer}{where}"


def _units(quantities: Iterable[Quantity], evidence: Evidence) -> dict[str, int]:
    """Count independent units by their name, the fewest that any estimate rests on."""
    counts: dict[str, int] = {}
    for quantity in quantities:
        for one in evidence.found.get(quantity, ()):
            if quantity.unit and one.units is not None:
                counts[quantity.unit] = min(one.units, counts.get(quantity.unit, one.units))
    return counts


def is_few(count: int, unit: str) -> bool:
    """Tell whether a headline needs more units than these."""
    return count < (FEW_REPEATS if unit in _REPEATS else FEW_UNITS)


def _too_few(counts: Mapping[str, int]) -> bool:
    return any(count < FEWEST_UNITS for count in counts.values())


def _counted(counts: Mapping[str, int]) -> str:
    def mark(count: int, unit: str) -> str:
        return " (too few)" if count < FEWEST_UNITS else " (few)" if is_few(count, unit) else ""

    said = [f"{count} {unit}{'s' * (count != 1)}{mark(count, unit)}" for unit, count in counts.items()]
    return ", ".join(said) or "counted"


def _told(quantity: Quantity, label: str, measured: Sequence[Measured]) -> str:
    """Write the estimates, by the quantity's letter in the rule; of more than six only the least and the largest."""
    fitted = [one for one in measured if one.is_fitted]
    said = ", ".join(one.said(quantity.form) for one in fitted)
    if len(fitted) > 6:
        ends = (choose(fitted, key=lambda one: one.estimate.value) for choose in (min, max))
        said = f"from {' to '.join(one.said(quantity.form) for one in ends)}, {len(fitted)} series"
    left = len(measured) - len(fitted)
    without = f"{left} series cannot be estimated" if left else ""
    return f"{label or f'{quantity.name}:'} {', '.join(filter(None, (said, without)))}"


def elsewhere(bounds: Iterable[Bound], here: str, judged: Callable[[Bound, Bound], str]) -> list[str]:
    """Say what comes out at a third and at three times each bound that is ours, with the other bound in its place."""
    said = []
    for bound in dict.fromkeys(bound for bound in bounds if bound.source == "ours"):
        others = [bound.times(1 / 3), bound.times(3)]
        words = [judged(bound, other) for other in others]
        would = " and ".join(f"{word} at {other.number()}" for word, other in zip(words, others, strict=True))
        if set(words) == {here}:
            would = f"the same at {others[0].number()} and {others[1].number()}"
        said.append(f"our bound of {bound.number()}: {would}")
    return said
