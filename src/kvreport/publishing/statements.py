"""Statements: sentences of a chapter, each beside a check that published rows must pass.

A chapter's ``STATEMENTS``, in ``measures.py``, has a check for each sentence that ends in ``{holds}`id```.  They are
evaluated from rows when a page is rendered, so that changing them executes nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvbook.measuring.estimates import FEWEST_UNITS
from kvreport.publishing import processors
from kvreport.publishing.found import Found
from kvreport.publishing.judging import Measured, elsewhere
from kvreport.publishing.rules import NONE, Condition, Side

Scope = Literal["any model", "this model", "this processor"]
Outcome = Literal["holds", "fails", "not resolved", "not run"]
Comparison = Literal["agrees", "differs", "not resolved", "not comparable", "not run"]

# Ends a sentence that is a statement.
HOLDS = re.compile(r"\s*\{holds\}`(?P<id>[^`]+)`")
# Words below which a sentence may lean on the one before it.
SHORT = 12

# Where the whole interval must lie for a condition to fail: everywhere but there.
_CONTRARY: dict[Side, Side] = {
    "above": "at most", "below": "at least", "at least": "below", "at most": "above", "inside": "outside",
    "outside": "inside",
}


@dataclass(frozen=True)
class Statement:
    """The check of one sentence.

    Attributes
    ----------
    must : Condition
        Where the estimates of its measure must lie.
    scope : {"any model", "this model", "this processor"}
        Whom the sentence speaks of.  Another run is comparable when it is of that model, and on that processor.
    headline : bool
        Whether the chapter opens with it or is cited for it: then it must rest on 30 units or more, on 10 repeats of a
        time, or on a census.
    on : str
        The maker or the kind of the processor that the sentence speaks of, such as "Intel" or "Zen 3"; on another one
        it is not checked.  Or what the environment held a library to, as "ONEDNN_MAX_CPU_ISA=AVX2": rows that were
        made so decide no other sentence.
    """

    must: Condition
    scope: Scope = "any model"
    headline: bool = False
    on: str = ""

    def __post_init__(self) -> None:
        """Refuse a headline of which nobody can say what it was counted on."""
        if self.headline and not (self.must.quantity.unit or self.must.quantity.census):
            raise ValueError(f"{self.must.quantity.name}: a headline names its unit, or all that was counted")

    @property
    def says_some(self) -> bool:
        """Tell whether it says that there are some, which a smaller run that finds none cannot refute."""
        must = self.must
        return (must.side, must.bound) == ("above", NONE) and not must.quantity.unit

    def is_for(self, found: Found) -> bool:
        """Tell whether it speaks of the processor that rows were made on."""
        machines = [run.about["machine"] for run in found.runs.values() if run]
        names = [machine.get("processor", "") for machine in machines]
        if any(map(processors.LIMIT.search, names)):
            return any(self.on in name.split(", ")[1:] for name in names)
        return not self.on or any(self.on in processors.label([machine]) for machine in machines)


@dataclass(frozen=True)
class Checked:
    """What the rows of one run say of a statement.

    Attributes
    ----------
    outcome : {"holds", "fails", "not resolved", "not run"}
        "Not resolved" when an interval contains the bound, or rests on fewer than four units.
    told : str
        The estimates, as a table shows them.
    units : int or None
        Independent units, the fewest of any estimate; None where nothing is sampled.
    elsewhere : str
        What a third of the bound and three times it would give, where the bound is ours.
    """

    outcome: Outcome
    told: str = ""
    units: int | None = None
    elsewhere: str = ""


def check(statement: Statement, results: Found) -> Checked:
    """Hold a statement against what a chapter found on one machine."""
    condition = statement.must
    found = condition.quantity(results) if statement.is_for(results) else []
    if not found:
        return Checked("not run")
    counts = [one.units for one in found if one.units is not None]
    if statement.headline and condition.quantity.unit and len(counts) < len(found):
        wrong = "a headline speaks of a sample, and a fact stands among its estimates"
        raise ValueError(f"{condition.quantity.name}: {wrong}")
    units = min(counts, default=None)
    told = ", ".join(one.said(condition.quantity.form) for one in found)
    if units is not None and units < FEWEST_UNITS:
        return Checked("not resolved", told, units)
    outcome = _outcome(condition, found)
    others = elsewhere([condition.bound], outcome, lambda _, other: _outcome(replace(condition, bound=other), found))
    return Checked(outcome, told, units, "".join(others))


def _outcome(condition: Condition, found: Sequence[Measured]) -> Outcome:
    if condition.holds([one.estimate for one in found]):
        return "holds"
    # "Every" fails by one, "any" only by all.
    of = {"every": "any", "any": "every", "most": "most"}[condition.of]
    contrary = replace(condition, side=_CONTRARY[condition.side], of=of)
    return "fails" if contrary.holds([one.refuting for one in found]) else "not resolved"


def compare(published: Outcome, own: Outcome, comparable: bool) -> Comparison:
    """Say whether another run agrees with the published outcome; values are shown and not judged."""
    if own != "not run" and not comparable:
        return "not comparable"
    if own in ("not run", "not resolved"):
        return own
    return "agrees" if own == published else "differs"


def is_borne_out(checked: Mapping[str, Any]) -> bool:
    """Tell whether a sentence may stand as it is written.

    It must hold on the processor whose outcome is printed.  A run on other texts or on another processor, of fewer
    units perhaps, must not contradict it; of a sentence about one processor alone, another one may.
    """
    outcomes, printed = checked["processors"], checked["processor"]
    everywhere = checked["scope"] != "this processor"
    others = [outcome for name, outcome in outcomes.items() if everywhere or name.partition(", ")[0] == printed]
    return outcomes[printed] == "holds" and "fails" not in others


def sentence_before(text: str, end: int) -> str:
    """Return the sentence that ends at a place of a text: the prose has one sentence a line, and now and then two.

    A short one, such as "In 16 bits it does not.", says little alone: the sentence before it comes with it.
    """
    paragraph = HOLDS.sub("", text[:end].rpartition("\n\n")[2])
    *before, last = map(str.strip, re.split(r"\n|(?<=[.?!])\s+(?=[A-Z])", paragraph))
    return " ".join([*before[-1:], last]) if len(last.split()) < SHORT else last
