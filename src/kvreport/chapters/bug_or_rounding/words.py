"""What the chapter on bug or rounding says in words: labels, captions, and the numbers of its prose."""

import pandas as pd

from kvbook.diagnosis import verdict
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvbook.runs.records import Run
from kvreport.chapters.bug_or_rounding import first_bad_layer, tables
from kvreport.chapters.bug_or_rounding.results import Results
from kvreport.chapters.bug_or_rounding.symptoms import CLEAN, NARROW_INSIDE
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, power_of_ten

HIDDEN = first_bad_layer.NARROW


def _setting(run: Run) -> str:
    dtypes = ", ".join(DTYPES[dtype] for dtype in run.about["settings"]["dtypes"])
    models = wording.models(run)
    return f"{models[0].upper()}{models[1:]}; {dtypes}; {wording.samples(run)}; {wording.machine(run)}"


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    about, one = _setting(results.drifts), _setting(results.by_layer)
    judged = (
        f"Bug: one text's drift is beyond {verdict.LIMIT:,.0f} roundoffs in any dtype; rounding: the finest dtype is fp64 and "
        f"none is, or it is fp32 and none is beyond {verdict.ROUNDING['float32']:,.0f}; else the slope decides, if its 95 % "
        "interval lies on one side of one half. Below one roundoff a drift counts in the slope as one"
    )
    said = {
        "fig-bug-planted": (
            f"{_planted_found(results)} Drift between the full pass and prefix + last token (root mean square difference of the "
            "logits over their spread, mean over texts) against the unit roundoff of the arithmetic. A drift of zero is not "
            f"drawn. {about}.",
            "Log-log axes of drift against unit roundoff: lines of clean families, of planted bugs, and of one bug that hides "
            "in 16 bits, each group with its slopes.",
        ),
        "tab-bug-planted": (f"What every planted bug was called in every family. {judged}. {about}.", ""),
        "fig-bug-symptoms": (
            f"{_symptoms_found(results)} Top: drift against unit roundoff, mean over texts; a drift of zero is not drawn. "
            "Bottom: slope of the fitted line with its 95 % interval (over dtypes, and bootstrap over files), by document. "
            f"{judged}. {about}.",
            "Top: log-log lines of drift against unit roundoff. Bottom: a list of symptoms by document, each with its slope and "
            "interval, on an axis from a bug's slope of 0 to rounding's of 1.",
        ),
        "fig-bug-layer": (
            f"{_layer_found(results.by_layer)} Relative drift behind every layer, mean over texts: in the finest dtype, and in the "
            f"coarsest. A drift of zero is not drawn. {one}.",
            "Panels of drift against layer on a logarithmic axis, for fine and for coarse arithmetic: a line for each of two "
            "bugs and for the clean model, and the limit of rounding where it is below 1.",
        ),
        "tab-decision": (
            "Your symptom, what it was here, what it is, and what to do. The verdict is computed from this run's rows; where it is "
            f"not the one that an explanation belongs to, the explanation is withheld. {about}.",
            "",
        ),
    }
    return wording.published(said)


def _planted_found(results: Results) -> str:
    """Say what clean families and planted bugs are called, and with what slopes."""
    planted = results.planted
    clean, bugs = planted[planted["symptom"] == CLEAN], planted[planted["symptom"] != CLEAN]
    sound, found = clean["kind"].isin(["rounding", "exact"]).sum(), (bugs["kind"] == "bug").sum()
    flat = bugs[bugs["symptom"] != HIDDEN]
    apart = f" but for the {HIDDEN}" if len(flat) < len(bugs) else ""
    return (
        f"Of clean families {sound} of {len(clean)} are called rounding or exact (slopes {_range(clean)}), of planted bugs "
        f"{found} of {len(bugs)} bugs (slopes {_range(flat)}{apart})."
    )


def _symptoms_found(results: Results) -> str:
    """Say how often the documents' symptoms are called what, and with what slopes."""
    symptoms = results.symptoms

    def verdicts(some: pd.DataFrame) -> str:
        kinds = some.groupby("kind", sort=False)
        return wording.listed([f"{len(part)} {kind} (slopes {_range(part)})" for kind, part in kinds]) or "not run"

    own = tables.complained_of(symptoms)
    return (
        f"The documents' {own.sum()} own symptoms are {verdicts(symptoms[own])}. "
        f"With the cause taken away, {(~own).sum()} are {verdicts(symptoms[~own])}."
    )


def _layer_found(layers: Run) -> str:
    """Say behind which layer drift is first beyond rounding, with each bug and without one."""
    dtype = next(dtype for dtype in UNIT_ROUNDOFF if dtype in set(layers.rows["dtype"]))

    def first(bug: str) -> str:
        found = tables.first_beyond(layers.rows, dtype, bug)
        return "no layer" if found is None else f"layer {found}" if found else "the embedding"

    planted = f"layer {_planted_in(layers)}"
    late, narrow, clean = map(first, (first_bad_layer.LATE, first_bad_layer.NARROW, first_bad_layer.CLEAN))
    if late == narrow == planted:
        return (
            f"In {DTYPES[dtype]} drift is first beyond rounding behind {planted}, where both bugs were planted, and behind "
            f"{clean} in the clean model."
        )
    return (
        f"In {DTYPES[dtype]} drift is first beyond rounding behind {late} for {first_bad_layer.LATE}, {narrow} for "
        f"{first_bad_layer.NARROW} and {clean} in the clean model; the bugs are in {planted}."
    )


def _planted_in(layers: Run) -> str:
    found = layers.rows["planted_in"].dropna()
    return f"{int(found.iloc[0])}" if len(found) else "none"


def _range(table: pd.DataFrame) -> str:
    values = [slope.value for slope in table["slope"] if slope is not None]
    # Adding zero turns a rounded minus zero into zero.
    ends = [f"{round(value, 2) + 0.0:.2f}" for value in (min(values), max(values))] if values else ["none"]
    return " to ".join(dict.fromkeys(ends))


def labels(table: pd.DataFrame) -> dict[str, str]:
    """Label the groups of lines in the figure of planted bugs."""
    clean = table[table["symptom"] == CLEAN]
    hidden = table[table["symptom"] == HIDDEN]
    bugs = table[~table["symptom"].isin([CLEAN, HIDDEN])]
    return {
        "clean": f"{len(clean)} clean families:\nslopes {_range(clean)}",
        "bugs": f"{len(bugs)} planted bugs: slopes {_range(bugs)}",
        "hidden": f"{HIDDEN}: slopes {_range(hidden)}" if len(hidden) else "",
    }


def _counts(table: pd.DataFrame) -> str:
    found = [
        f"{kind} {count} times" if count > 1 else f"{kind} once" for kind, count in table["kind"].value_counts().items()
    ]
    return ", ".join(found) or "not run"


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    rows, table, symptoms = results.drifts.rows, results.judged, results.symptoms
    clean = results.planted[results.planted["symptom"] == CLEAN]
    own = symptoms[tables.complained_of(symptoms)]
    inside = table[table["symptom"] == NARROW_INSIDE]
    hidden = rows[rows["symptom"] == HIDDEN]
    narrow = hidden[hidden["dtype"].isin(["float16", "bfloat16"])]
    return {
        "bug_limit": f"{verdict.LIMIT:,.0f}",
        "bug_rounding_fp32": f"{verdict.ROUNDING['float32']:,.0f}",
        "bug_clean": _counts(clean),
        "bug_hidden_all": _counts(table[table["symptom"] == HIDDEN]),
        "bug_hidden_narrow": _counts(tables.judged(narrow)) if len(narrow) else "not run",
        "bug_symptoms": _counts(own),
        "bug_without_the_cause": _counts(symptoms[~tables.complained_of(symptoms)]),
        "bug_in_short": in_short(own["kind"]),
        "bug_symptoms_rounding": _named(symptoms, "rounding"),
        "bug_symptoms_exact": _named(symptoms, "exact"),
        "bug_symptoms_bug": _named(symptoms, "bug"),
        "bug_symptoms_undecided": _named(symptoms, "undecided"),
        "bug_inside": "; ".join(
            f"{row.model} {power_of_ten(row.drift)} ({row.kind})" for row in inside.itertuples()
        ) or "not run",
        "bug_wide": "; ".join(
            f"{row.model} {power_of_ten(row.drift)}" for row in clean[clean["finest"] == "float64"].itertuples()
        ) or "not run",
    }  # fmt: skip


def in_short(kinds: pd.Series) -> str:
    """Answer in a sentence whether it is a bug."""
    bugs, rounding = ((kinds == kind).any() for kind in ("bug", "rounding"))
    if bugs and rounding:
        return "Sometimes it is, sometimes it is rounding."
    return "Yes." if bugs else "No, it is rounding." if rounding else "Neither a bug nor rounding was seen."


def _named(table: pd.DataFrame, kind: str) -> str:
    names = table.loc[table["kind"] == kind, "symptom"]
    return "; ".join(dict.fromkeys(names)) or "none"
