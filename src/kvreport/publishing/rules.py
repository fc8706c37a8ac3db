"""Rules by which claims are judged: data that says itself in words.

A rule holds what is estimated, over which independent unit, for which series, and the bounds that bear the claim out or
contradict it, each with where it comes from.  `Rule.text` is what a page prints, and `judging.judge` gives the verdict;
both read the same object.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvbook.measuring.estimates import Estimate

Answer = Literal["reproduced", "refuted", "other cause"]
Source = Literal["document", "arithmetic", "ours"]
Scale = Literal["value", "ratio", "share"]
Side = Literal["above", "below", "at least", "at most", "inside", "outside"]

_FOR = {"every": "for every", "any": "for at least one", "most": "for most, by"}
_WHOSE: dict[Source, str] = {"document": "the document's", "arithmetic": "arithmetic", "ours": "ours"}


@dataclass(frozen=True)
class Bound:
    """A threshold and where it comes from.

    Attributes
    ----------
    value : float
        The threshold; of a band, its upper end.
    source : {"document", "arithmetic", "ours"}
        Who set it.
    why : str
        The word of the document, the arithmetic, or what the number means.
    scale : {"value", "ratio", "share"}
        What three times the bound is: three times the value, three times a ratio's distance from 1 (of one below 1, its
        inverse's), or three times a share's odds.  A band is symmetric about 0, or of a ratio about 1.
    """

    value: float
    source: Source
    why: str
    scale: Scale = "value"

    @property
    def lower(self) -> float:
        """The lower end of a band."""
        return 1 / self.value if self.scale == "ratio" else -self.value

    def times(self, factor: float) -> "Bound":
        """Return a bound that is looser or stricter by a factor."""
        value = self.value * factor
        if self.scale == "ratio":
            above = 1 + (max(self.value, 1 / self.value) - 1) * factor
            value = above if self.value >= 1 else 1 / above
        elif self.scale == "share":
            odds = self.value / (1 - self.value) * factor
            value = odds / (1 + odds)
        return replace(self, value=value)

    def number(self, side: Side = "above") -> str:
        """Write the threshold, of a band with both ends."""
        # A ratio close to 1 must not read as 1.
        digits = 4 if self.scale == "ratio" and abs(self.value - 1) < 0.005 else 3
        number = f"{self.value:,.0f}" if 1000 <= abs(self.value) < 1e6 else f"{self.value:.{digits}g}"
        if side not in ("inside", "outside"):
            return number
        return f"1/{number} to {number}" if self.scale == "ratio" else f"-{number} to {number}"


# "Most" and "mostly" name no number: where they begin is our choice, of a claim as of a statement.
HALF = Bound(0.5, "ours", "more often than not", "share")
NONE, ALL = Bound(0, "arithmetic", "none"), Bound(1, "arithmetic", "all")


@dataclass(frozen=True)
class Quantity:
    """What is estimated.

    Attributes
    ----------
    name : str
        A noun phrase, as it stands in the middle of a sentence.
    unit : str
        The independent unit that the interval counts; empty for a fact that is counted and not sampled.
    series : str
        What one estimate is made for, such as "model and dtype"; empty where there is one.
    form : str
        How a value is written.
    census : str
        Of a fact, all that was counted, such as "all architectures"; empty where it is counted over what was at hand.
    """

    name: str
    unit: str = ""
    series: str = ""
    form: str = "{:.2f}"
    census: str = ""

    @property
    def about(self) -> str:
        """The quantity with its unit and series."""
        counted = f"counted over {self.census}" if self.census else "counted, not sampled"
        how = [f"unit: {self.unit}" if self.unit else counted]
        how += [f"one for each {self.series}"] if self.series else []
        return f"{self.name} ({'; '.join(how)})"


@dataclass(frozen=True)
class Condition:
    """Where an estimate must lie, with its whole interval.

    Attributes
    ----------
    quantity : Quantity
        Whose estimates are looked at.
    side : str
        On which side of the bound.
    bound : Bound
        The threshold.
    of : {"every", "any", "most"}
        For how many series.
    """

    quantity: Quantity
    side: Side
    bound: Bound
    of: Literal["every", "any", "most"] = "every"

    def holds(self, found: Sequence[Estimate]) -> bool:
        """Tell whether the estimates lie there; of none it does not hold."""
        there = [_lies(estimate, self.side, self.bound) for estimate in found]
        if self.of == "most":
            return sum(there) > len(there) / 2
        return bool(there) and (all(there) if self.of == "every" else any(there))

    def said(self, label: str, known: set[Bound]) -> str:
        """Write the condition as a clause; a bound that is not among the known ones with where it comes from."""
        many = f" {_FOR[self.of]} {self.quantity.series}" if self.quantity.series else ""
        source = "" if self.bound in known else f" ({_WHOSE[self.bound.source]}: {self.bound.why})"
        known.add(self.bound)
        subject = label
        if self.quantity.unit:
            subject = "its whole interval" if label == "it" else f"the whole interval of {label}"
        verb = "is" if self.side in ("at least", "at most") else "lies"
        return f"{subject} {verb} {self.side} {self.bound.number(self.side)}{source}{many}"


def _lies(estimate: Estimate, side: Side, bound: Bound) -> bool:
    low, high = estimate.low, estimate.high
    return {
        "above": low > bound.value, "at least": low >= bound.value,
        "below": high < bound.value, "at most": high <= bound.value,
        "inside": bound.lower < low and high < bound.value, "outside": high < bound.lower or low > bound.value,
    }[side]


@dataclass(frozen=True)
class Outcome:
    """An answer and all conditions that it takes.

    Attributes
    ----------
    answer : {"reproduced", "refuted", "other cause"}
        What is answered.
    conditions : tuple of Condition
        Each must hold.
    one_is_enough : bool
        Whether a single unit suffices: a counterexample, or a thing that is only said to exist.
    """

    answer: Answer
    conditions: tuple[Condition, ...]
    one_is_enough: bool = False

    def said(self, labels: Mapping[Quantity, str], known: set[Bound]) -> str:
        """Write the outcome as a sentence."""
        enough = "; one case is enough" if self.one_is_enough else ""
        clauses = ", and ".join(c.said(labels[c.quantity] or "it", known) for c in self.conditions)
        return f"{self.answer.capitalize()} when {clauses}{enough}."


@dataclass(frozen=True)
class Rule:
    """How a claim is judged: the first outcome whose conditions all hold, else undecided.

    Attributes
    ----------
    outcomes : tuple of Outcome
        In the order in which they are tried.
    needs : tuple of str
        What a run must have for the claim to be judged at all.
    about_code : bool
        Whether the claim is about shapes or code, so that another model's weights are evidence as good.
    unseen : str
        What the document does not show and another cause takes for granted; such a cause is called plausible.
    """

    outcomes: tuple[Outcome, ...]
    needs: tuple[str, ...] = ()
    about_code: bool = False
    unseen: str = ""

    @property
    def conditions(self) -> list[Condition]:
        """The conditions of all outcomes."""
        return [condition for outcome in self.outcomes for condition in outcome.conditions]

    @property
    def quantities(self) -> list[Quantity]:
        """What the conditions look at, each once."""
        return list(dict.fromkeys(condition.quantity for condition in self.conditions))

    @property
    def labels(self) -> dict[Quantity, str]:
        """Letters by which several quantities are told apart; a single one needs none."""
        quantities = self.quantities
        if len(quantities) == 1:
            return {quantities[0]: ""}
        return {quantity: f"({letter})" for quantity, letter in zip(quantities, string.ascii_lowercase, strict=False)}

    def text(self) -> str:
        """Say the rule in words."""
        labels, known = self.labels, set()
        named = (f"{label} {quantity.about}".strip() for quantity, label in labels.items())
        said = [f"Estimated: {'; '.join(named)}.", *(outcome.said(labels, known) for outcome in self.outcomes)]
        said += [f"Not run without {' and '.join(self.needs)}."] if self.needs else []
        said += [f"A cause is plausible at most: {self.unseen}."] if self.unseen else []
        said += ["Weights do not matter."] if self.about_code else []
        return " ".join(said)

    def with_bound(self, bound: Bound, other: Bound) -> "Rule":
        """Return the rule with another bound in place of one."""

        def outcome(old: Outcome) -> Outcome:
            new = (replace(c, bound=other) if c.bound == bound else c for c in old.conditions)
            return replace(old, conditions=tuple(new))

        return replace(self, outcomes=tuple(map(outcome, self.outcomes)))


def every(quantity: Quantity, side: Side, bound: Bound) -> Condition:
    """Ask for every series."""
    return Condition(quantity, side, bound)


def anyone(quantity: Quantity, side: Side, bound: Bound) -> Condition:
    """Ask for one series at least."""
    return Condition(quantity, side, bound, "any")


def most(quantity: Quantity, side: Side, bound: Bound) -> Condition:
    """Ask for more than half of the series."""
    return Condition(quantity, side, bound, "most")


def reproduced(*conditions: Condition, one_is_enough: bool = False) -> Outcome:
    """The claim is borne out."""
    return Outcome("reproduced", conditions, one_is_enough)


def refuted(*conditions: Condition, one_is_enough: bool = False) -> Outcome:
    """The claim is contradicted."""
    return Outcome("refuted", conditions, one_is_enough)


def other_cause(*conditions: Condition, one_is_enough: bool = False) -> Outcome:
    """What was seen is real, and its explanation is not."""
    return Outcome("other cause", conditions, one_is_enough)
