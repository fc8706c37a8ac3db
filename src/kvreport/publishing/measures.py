"""Measures: what a chapter's rows say, each named once, for sentences, numbers, claims and tables alike.

A chapter's ``rows.py`` names its frames, and its ``measures.py`` lists what is estimated from them::

    EQUAL = Measure("share of texts with bitwise identical logits", "file", rows="logits", by=("dtype",),
                    estimate=share("equal"))

In the prose ``{measured}`EQUAL dtype=float32``` writes the number, and a check names the measure that it judges.  Here
is what all chapters need: rows that are not there, groups, pairs of groups, independent units and labels.
"""

import functools
import re
import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

import pandas as pd

from kvbook import UserError, refusing
from kvbook.measuring.estimates import Estimate
from kvbook.runs.records import Run
from kvreport.publishing.estimators import UNITS, Part
from kvreport.publishing.found import Found
from kvreport.publishing.judging import NOT_RECORDED, UNFITTED, Check, Evidence, Measured, with_units
from kvreport.publishing.rules import Bound, Outcome, Quantity, Rule, Side, anyone, every, refuted, reproduced
from kvreport.publishing.statements import Scope, Statement
from kvreport.publishing.verdicts import weights_of
from kvreport.publishing.wording import DTYPES, between, change, estimated, listed, power_of_ten, spread

# A number in the prose: of a chapter's own measures, or on another page with the chapter's name before it.
ROLE = re.compile(r"\{measured\}`(?:(?P<chapter>\w+):)?(?P<what>[^`@]+)(?:@(?P<maker>\w+))?`")


@dataclass(frozen=True)
class Measure(Quantity):
    """A quantity, and how it is estimated from rows.

    Attributes
    ----------
    rows : str
        The frame or the experiment that has them.
    estimate : callable
        Makes an estimate from the rows of one group, or of two where `over` pairs them; None where these allow none.
    by : tuple of str
        Columns; each combination of their values has an estimate of its own.
    over : tuple of (str, value or callable), optional
        A column of `by`, and the value that each group is compared with; a callable chooses it from the group's own
        value and all that there are.
    keep : tuple of (str, tuple)
        Columns, and the values of them that count.
    """

    rows: str = ""
    estimate: Callable[..., Estimate | None] | None = None
    by: tuple[str, ...] = ()
    over: tuple[str, Any] | None = None
    keep: tuple[tuple[str, tuple[Hashable, ...]], ...] = ()

    def where(self, **keep: Any) -> "Measure":
        """Return the measure of some of its rows; a place in braces in its name takes what was chosen."""
        chosen = tuple((column, value if isinstance(value, tuple) else (value,)) for column, value in keep.items())
        name = self.name
        for column, values in chosen:
            name = name.replace(f"{{{column}}}", " or ".join(map(said, values)))
        return replace(self, name=name, keep=(*self.keep, *chosen))

    def alike(self, name: str = "", estimate: Callable[..., Estimate | None] | None = None, **about: Any) -> "Measure":
        """Return a copy that differs in nothing but what is told."""
        return replace(self, name=name or self.name, estimate=estimate or self.estimate, **about)

    def __call__(self, found: Found) -> list[Measured]:
        """Estimate it for every group; nothing where the rows are not there."""
        groups = self.groups(found)
        # A reader needs model and dtype of the only series too, and not the one value that is compared with another.
        one = self.over is not None and len({self._at(key) for key in groups}) == 1
        told = [i for i, column in enumerate(self.by) if not one or column != self.over[0]]
        measured = []
        for key, parts in groups.items():
            # What was found keeps the groups, so that no other one gets their identity.
            made = (self.estimate, *map(id, parts))
            estimate = found.once(made, lambda parts=parts: self.estimate(*parts)) or UNFITTED
            # A share of all that there are is of no sample.
            sampled = self.unit and not isinstance(estimate, Part)
            # An estimator leaves out rows without a value, and with them units that have no other.
            units = (estimate.units or parts[0][UNITS[self.unit]].nunique()) if sampled else None
            measured.append(Measured(" ".join(said(key[i]) for i in told), estimate, units))
        return measured

    def table(self, found: Found, name: str = "estimate") -> pd.DataFrame:
        """Return its estimates as a table, a column for each of `by`; without those that could not be made."""
        estimated = zip(self.groups(found), self(found), strict=True)
        rows = [(*key, one.estimate) for key, one in estimated if one.estimate is not UNFITTED]
        return pd.DataFrame(rows, columns=[*self.by, name])

    def groups(self, found: Found) -> dict[tuple[Hashable, ...], list[pd.DataFrame]]:
        """Split the rows that count into groups, each with the one that it is compared with."""
        # Of the column that is compared, a group that does not count itself may be the other one's partner.
        compared = self.over[0] if self.over else None
        keep = [(column, values) for column, values in self.keep if column != compared]
        # Measures that count some groups of the same rows share them, and with them what is estimated.
        within = tuple((column, values) for column, values in keep if column not in self.by)
        split = found.once((self.rows, self.by, within), lambda: self._split(found[self.rows], within))
        chosen = [(self.by.index(column), values) for column, values in keep if column in self.by]
        groups = {key: of for key, of in split.items() if all(key[at] in values for at, values in chosen)}
        if self.over is None:
            return {key: [group] for key, group in groups.items()}
        counted, pairs = dict(self.keep).get(compared), {}
        alike: dict[tuple, dict[Hashable, pd.DataFrame]] = {}
        for key, group in groups.items():
            alike.setdefault(self._but(key), {})[self._at(key)] = group
        for key, group in groups.items():
            own, others, wanted = self._at(key), alike[self._but(key)], self.over[1]
            if callable(wanted):
                wanted = wanted(own, list(others))
            if wanted in others and wanted != own and (counted is None or own in counted):
                pairs[key] = [group, others[wanted]]
        return pairs

    def _split(self, rows: pd.DataFrame | None, within: tuple) -> dict[tuple[Hashable, ...], pd.DataFrame]:
        for column, values in within if rows is not None else ():
            rows = rows[rows[column].isin(values)]
        if rows is None or not len(rows):
            return {}
        return dict(iter(rows.groupby(list(self.by), sort=False))) if self.by else {(): rows}

    def _at(self, key: tuple) -> Any:
        return key[self.by.index(self.over[0])]

    def _but(self, key: tuple) -> tuple:
        return tuple(value for column, value in zip(self.by, key, strict=True) if column != self.over[0])


def joined(columns: Mapping[str, Measure], found: Found, groups: Literal["inner", "outer"] = "inner") -> pd.DataFrame:
    """Put measures side by side, one column each, of the groups that all of them have or that any has."""
    tables = (measure.table(found, name).set_index(list(measure.by)) for name, measure in columns.items())
    return pd.concat(tables, axis=1, join=groups).reset_index()


def said(value: Any) -> str:
    """Write a value of a column: a dtype by its short name."""
    return DTYPES.get(value, str(value))


class Worded(NamedTuple):
    """Something that is said in words.

    Attributes
    ----------
    rows : tuple of str
        The frames or experiments that it is taken from.
    say : callable
        Writes it; None where a run is not there.
    """

    rows: tuple[str, ...]
    say: Callable[[Found], str | None]

    def __call__(self, found: Found) -> str:
        """Write it."""
        said = self.say(found)
        return NOT_RECORDED if said is None else said


def noted(experiment: str, *path: str | int, write: Callable[[Any], str] = str) -> Worded:
    """Name a fact of a run's record, such as a setting, by the keys that lead to it."""
    return Worded(
        (experiment,), lambda found: None if (fact := found.noted(experiment, *path)) is None else write(fact)
    )


def worded(rows: str, say: Callable[[pd.DataFrame], str]) -> Worded:
    """Name what the rows of a frame or an experiment say in words, such as where one curve crosses another."""
    return Worded((rows,), lambda found: None if (of := found[rows]) is None else say(of))


def verdict(check: Check) -> Worded:
    """Name the verdict on a claim."""
    return Worded(tuple(measure.rows for measure in check.rule.quantities), lambda found: check(found).verdict)


# What is judged by measures: a sentence of ours, and a document's claim.


def always(
    measure: Measure, side: Side, bound: Bound, speaks_of: Scope = "any model", headline: bool = False, on: str = ""
) -> Statement:
    """Check a sentence by every series of one measure; see `Statement`."""
    return Statement(every(measure, side, bound), speaks_of, headline, on)


# The same of a sentence on the model, or on the processor, whose rows are printed.
of_model = functools.partial(always, speaks_of="this model")
here = functools.partial(always, speaks_of="this processor")


def either(
    measure: Measure, side: Literal["above", "below"], bound: Bound, against: Callable = anyone
) -> tuple[Outcome, Outcome]:
    """Bear a claim out by every series on one side of a bound, and contradict it by any, or by all, on the other."""
    other = "below" if side == "above" else "above"
    return reproduced(every(measure, side, bound)), refuted(against(measure, other, bound))


def claim(
    *outcomes: Outcome, needs: tuple[str, ...] = (), about_code: bool = False, unseen: str = "",
    beside: Callable[[Found], str] = lambda _: "", missing: Callable[[Found], str] = lambda _: "",
    has: Callable[[Found], frozenset[str]] = lambda _: frozenset(),
    published: Callable[[Found], str | None] = lambda _: None,
    whose: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> Check:
    """Judge a document's claim by the measures of its rule; see `Rule` and, for what else is told, `Evidence`.

    It is judged by the weights of the models that it speaks of; `whose` tells them by what the run says of them.
    """
    rule = Rule(outcomes, needs, about_code, unseen)

    def evidence(found: Found) -> Evidence:
        runs = found.behind(*(measure.rows for measure in rule.quantities))
        models = [model for run in runs for model in run.about.get("models", ())]
        weights = weights_of(filter(whose, models))
        if not runs or (why := missing(found)):
            return Evidence(weights, missing=why if runs else NOT_RECORDED, published=published(found))
        measured = {measure: measure(found) for measure in rule.quantities}
        return Evidence(weights, measured, beside(found), has(found), "", published(found))

    return Check(rule, evidence)


# Numbers in the prose.


def named(module: ModuleType) -> dict[str, Measure | Worded]:
    """List what a chapter's ``measures.py`` names."""
    return {name: one for name, one in vars(module).items() if isinstance(one, Measure | Worded)}


def written(role: str, known: Mapping[str, Measure | Worded], found: Found, everywhere: Sequence[Found] = ()) -> str:
    """Write a number of the prose: a measure's name, what of its rows counts, and how it is written.

    ``EQUAL dtype=float32 count``: after the name come ``column=value``, a word of `HOW` and a format such as ``.0%``.
    With ``rounded`` estimates are first rounded to two digits.  With ``everywhere`` it is the span of the estimates
    from all that was recorded, on every processor and every population of texts.
    """
    with refusing(f"{{measured}}`{role}`: a quotation mark is not closed", ValueError):
        name, *words = shlex.split(role)
    rounded, spanned = "rounded" in words, "everywhere" in words
    words = [word for word in words if word not in ("rounded", "everywhere")]
    if name not in known:
        raise UserError(f"{{measured}}`{role}`: there is no measure {name}; measures.py has {', '.join(known)}")
    one = known[name]
    if isinstance(one, Worded):
        return one(found)
    kept = dict(word.split("=", 1) for word in words if "=" in word)
    how = [word for word in words if word in HOW]
    forms = [f"{{:{word}}}" for word in words if "=" not in word and word not in HOW]
    if len(how) > 1 or len(forms) > 1:
        raise UserError(f"{{measured}}`{role}`: give one format, and one of {', '.join(HOW)}")
    places = everywhere or [found] if spanned else [found]
    measured = [each for place in places for each in one.where(**_values(role, kept, place[one.rows]))(place)]
    # What cannot be estimated on one processor bounds no span.
    measured = [each for each in measured if each.is_fitted or not spanned]
    if not measured:
        return NOT_RECORDED
    if rounded:
        measured = [replace(each, estimate=each.estimate.in_two_digits()) for each in measured]
    form, write = forms[0] if forms else one.form, HOW[how[0]] if how else HOW["value"] if spanned else _ESTIMATES
    ranked = sorted(measured, key=lambda each: each.estimate.value)
    with refusing(lambda error: f"{{measured}}`{role}`: {error}", ValueError):
        said = (write(each, form, one.unit) for each in ([ranked[:1], ranked[-1:]] if spanned else [measured]))
        return " to ".join(dict.fromkeys(said))


def told(text: str, known: Mapping[str, Any]) -> Callable[[Found], str]:
    """Make what fills a text beside a claim: a role stands in braces, as ``{GROWTH dtype=float32 .0%}``."""
    return lambda found: re.sub(r"\{([^{}]+)\}", lambda role: written(role[1], known, found), text)


def behind(one: Measure | Worded, found: Found) -> list[Run]:
    """List the runs that a number is taken from."""
    return found.behind(*([one.rows] if isinstance(one.rows, str) else one.rows))


def _values(role: str, kept: Mapping[str, str], rows: pd.DataFrame | None) -> dict[str, tuple[Hashable, ...]]:
    """Find the values of columns that are written so."""
    if rows is None:
        return {}
    found = {}
    for column, text in kept.items():
        if column not in rows:
            raise UserError(f"{{measured}}`{role}`: no column {column}; there are {', '.join(map(str, rows))}")
        found[column] = tuple(value for value in rows[column].unique() if str(value) == text)
    return found


def _count(one: Measured, _form: str) -> str:
    """Write a share as what it is of: 3 of 60."""
    whole = getattr(one.estimate, "of", one.units) or 0
    part = one.estimate.value * whole
    if not whole or abs(part - round(part)) > 1e-6:
        raise ValueError("only a share of units, one row each, or of all rows can be counted")
    return f"{round(part):,} of {whole:,}"


def _series(measured: Sequence[Measured], _form: str, _unit: str) -> str:
    if not all(one.series for one in measured):
        raise ValueError("only one of several groups has a name")
    return listed([one.series for one in measured])


def _each(write: Callable[[Measured, str], str]) -> Callable[[Sequence[Measured], str, str], str]:
    """Write estimates one after the other."""
    return lambda measured, form, _unit: ", ".join(write(one, form) for one in measured)


_ESTIMATES = _each(lambda one, form: estimated(one.estimate, form))
HOW: dict[str, Callable[[Sequence[Measured], str, str], str]] = {
    "value": _each(lambda one, form: form.format(one.estimate.value)),
    "span": lambda measured, form, _unit: between((one.estimate.value for one in measured), form),
    "count": _each(_count),
    "names": _series,
    "units": lambda measured, form, unit: with_units(measured, f"{unit}s", form),
    "change": _each(lambda one, _form: change(one.estimate)),
    "spread": _each(lambda one, _form: spread(one.estimate)),
    "power": _each(lambda one, _form: power_of_ten(one.estimate.value)),
    "digit": _each(lambda one, _form: power_of_ten(one.estimate.value, 0)),
}
