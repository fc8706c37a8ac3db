"""The numbers and statements of the chapter on bug or rounding."""

from collections.abc import Callable, Collection

import pandas as pd

from kvbook import lengths
from kvbook.diagnosis import verdict
from kvbook.measuring import estimates
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import first_bad_layer, reported, results, symptoms, tables
from kvreport.chapters.bug_or_rounding.results import Results
from kvreport.publishing.judging import Measured, fact
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES, between, power_of_ten

EXPERIMENTS = results.EXPERIMENTS
NARROW = first_bad_layer.NARROW

_FOUR_IN_FIVE = Bound(0.8, "ours", "four texts in five", "share")
_ONE_IN_FIVE = Bound(0.2, "ours", "one text in five", "share")
_MOST = Bound(verdict.LIMIT, "ours", "half way from fp64 to fp32, in powers of two")
_BETWEEN = Bound(verdict.BOUNDARY, "ours", "half way between a bug's 0 and rounding's 1", "share")

_LARGEST = Quantity("largest drift of any text in fp64, in roundoffs", "", "model or symptom", "{:,.3g}")
_BEYOND = Quantity(
    "share of texts whose drift in fp64 is more than rounding can be", "file", "model or symptom", "{:.0%}"
)
_EVERY_BUG = Quantity(
    "share of texts on which every injected bug drifts in fp64 by more than rounding can", "file", "model", "{:.0%}"
)
_SLOPE = Quantity("slope of log drift on log unit roundoff", "file", "model")
_LARGEST_SLOPE = Quantity("largest slope, of any injected bug, of log drift on log unit roundoff", "file", "model")
_PLAIN = Quantity(
    "largest drift of a clean model in plain fp64, over the smallest of an injected bug", "", "model", "{:.2g}"
)
_HIDDEN = Quantity("share of texts with bitwise identical logits in plain fp64", "file", form="{:.0%}")
_AS_CLEAN = Quantity("share of texts that drift exactly as in the clean model", "file", "model and dtype", "{:.0%}")
_FOUND = Quantity("share of texts whose first layer beyond rounding is the injected one", "file", "bug", "{:.0%}")
_ACCUSED = Quantity("share of texts with a layer beyond rounding in the clean model", "file", form="{:.0%}")
_LAST_AS_CLEAN = Quantity("share of texts whose last layer drifts exactly as in the clean model", "file", form="{:.0%}")


def _reported(*lies: str) -> tuple[str, ...]:
    return reported.names(reported.REPORTED, *lies)


def _drifts(found: Results, document: str | None, names: Collection[str] | None) -> pd.DataFrame:
    """Take the rows in fp64 of some symptoms: of one document, or of all that are documents'."""
    rows = found.in_fp64
    rows = rows[rows["document"] == document if document else rows["document"] != symptoms.PLANTED]
    return rows[rows["symptom"].isin(names)] if names is not None else rows


def _units(rows: pd.DataFrame) -> int | None:
    """Count files; the thread's own prompts are no sample, so they are counted."""
    return None if rows["symptom"].iloc[0] in (symptoms.ANEW, symptoms.CUT) else rows["source"].nunique()


def _series(model: str, symptom: str) -> str:
    """Name a symptom, or of what stands under one name for every model the model."""
    return model if symptom in (symptoms.CLEAN, symptoms.NARROW_INSIDE) else tables.named(symptom)


def _share(holds: pd.Series) -> tuple[estimates.Estimate, int]:
    table = holds.rename("holds").reset_index()
    return estimates.share_over(table, table["holds"])


def _largest(document: str | None, *names: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.drifts is None:
            return []
        return [
            fact(rows["roundoffs"].max(), _series(model, symptom))
            for (model, symptom), rows in _drifts(found, document, names).groupby(["model", "symptom"], sort=False)
        ]

    return measure


def _beyond(document: str | None, names: Collection[str]) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.drifts is None:
            return []
        measured = []
        for (model, symptom), rows in _drifts(found, document, names).groupby(["model", "symptom"], sort=False):
            units = _units(rows)
            share = fact(rows["beyond"].mean()).estimate
            if units is not None:
                share, units = estimates.share_over(rows, rows["beyond"])
            measured.append(Measured(_series(model, symptom), share, units))
        return measured

    return measure


def _every_bug_beyond(found: Results) -> list[Measured]:
    """Measure for every model on what share of texts each injected bug drifts by more than rounding can."""
    if found.drifts is None:
        return []
    rows = _drifts(found, symptoms.PLANTED, [name for name in symptoms.NAMES if name != symptoms.CLEAN])
    return [
        Measured(str(model), *_share(of.groupby(["source", "sample"])["beyond"].all()))
        for model, of in rows.groupby("model", sort=False)
    ]


def _fp32_inside_mpt(found: Results) -> list[Measured]:
    return [one for one in _beyond(symptoms.PLANTED, [symptoms.NARROW_INSIDE])(found) if one.series == "mpt"]


def _plain_fp64(found: Results) -> list[Measured]:
    """Measure for every model how far a clean pass in plain fp64 is below the smallest bug."""
    if found.drifts is None:
        return []
    rows = _drifts(found, symptoms.PLANTED, None)
    measured = []
    for model, of in rows.groupby("model", sort=False):
        bugs = of.loc[~of["symptom"].isin([symptoms.CLEAN, symptoms.NARROW_INSIDE]), "drift"]
        clean = of.loc[of["symptom"] == symptoms.NARROW_INSIDE, "drift"]
        measured.append(fact(clean.max() / bugs.min(), str(model)))
    return measured


def _hidden(found: Results) -> list[Measured]:
    """Measure on what share of texts the first model, in plain fp64, has bitwise identical logits."""
    if found.drifts is None:
        return []
    rows = _drifts(found, symptoms.PLANTED, [symptoms.NARROW_INSIDE])
    rows = rows[rows["model"] == found.model]
    return [Measured("", *estimates.share_over(rows, rows["drift"] == 0))] if len(rows) else []


def _slopes(of: Callable[[pd.DataFrame], pd.Series]) -> Callable[[Results], list[Measured]]:
    """Measure for every model the slope whose interval reaches highest."""

    def measure(found: Results) -> list[Measured]:
        if found.drifts is None:
            return []
        table = found.planted[of(found.planted["symptom"]) & found.planted["slope"].notna()]
        steepest = table.assign(reaches=[slope.high for slope in table["slope"]]).sort_values("reaches")
        return [
            Measured(row.model, row.slope, row.files)
            for row in steepest.drop_duplicates("model", keep="last").itertuples()
        ]

    return measure


def _as_clean(rows: pd.DataFrame, bug: str) -> pd.Series:
    """Tell of every text whether a narrow cache drifts exactly as none does."""
    drift = rows.pivot_table(index=["source", "sample"], columns=bug, values="drift")
    return drift[NARROW] == drift[symptoms.CLEAN]


def _narrow_in_16_bits(found: Results) -> list[Measured]:
    if found.drifts is None:
        return []
    rows = found.drifts.rows
    rows = rows[rows["symptom"].isin([symptoms.CLEAN, NARROW]) & rows["dtype"].isin(["float16", "bfloat16"])]
    measured = []
    for (model, dtype), of in rows.groupby(["model", "dtype"], sort=False):
        same = _as_clean(of, "symptom")
        measured.append(Measured(f"{model}, {DTYPES[dtype]}", *_share(same)))
    return measured


def _first_layer(found: Results) -> list[Measured]:
    if found.by_layer is None:
        return []
    first = found.first_layers
    first = first[(first["dtype"] == "float64") & (first["bug"] != first_bad_layer.CLEAN)]
    return [
        Measured(bug, *estimates.share_over(rows, rows["layer"] == rows["planted_in"]))
        for bug, rows in first.groupby("bug", sort=False)
    ]


def _clean_layers(found: Results) -> list[Measured]:
    if found.by_layer is None:
        return []
    first = found.first_layers
    first = first[(first["dtype"] == "float64") & (first["bug"] == first_bad_layer.CLEAN)]
    return [Measured("", *estimates.share_over(first, first["layer"].notna()))] if len(first) else []


def _coarse_layers(found: Results) -> list[Measured]:
    if found.by_layer is None:
        return []
    rows = found.by_layer.rows
    rows = rows[(rows["dtype"] == "bfloat16") & (rows["layer"] == rows["layer"].max())]
    if rows.empty:
        return []
    same = _as_clean(rows, "bug")
    return [Measured("", *_share(same))]


STATEMENTS: dict[str, Statement[Results]] = {
    "clean-shrinks": Statement(
        every(_BEYOND, "below", _ONE_IN_FIVE), _beyond(symptoms.PLANTED, [symptoms.CLEAN]), headline=True
    ),
    "clean-slope": Statement(every(_SLOPE, "above", _BETWEEN), _slopes(lambda names: names == symptoms.CLEAN)),
    "bugs-stay": Statement(
        every(_EVERY_BUG, "above", _FOUR_IN_FIVE),
        _every_bug_beyond,
        headline=True,
    ),
    "bug-slope": Statement(
        every(_LARGEST_SLOPE, "below", _BETWEEN), _slopes(lambda names: names != symptoms.CLEAN)
    ),
    "narrow-hides": Statement(every(_AS_CLEAN, "above", _FOUR_IN_FIVE), _narrow_in_16_bits),
    "reported-rounding": Statement(every(_BEYOND, "below", _ONE_IN_FIVE), _beyond(None, _reported("")), headline=True),
    "reported-bugs": Statement(every(_BEYOND, "above", HALF), _beyond(None, _reported(*reported.LIES))),
    "found-bugs": Statement(every(_BEYOND, "above", HALF), _beyond(None, reported.names(reported.FOUND))),
    "cause-removed": Statement(
        every(_LARGEST, "at most", _MOST), _largest(None, *reported.names(reported.REMOVED))
    ),
    "first-layer-found": Statement(every(_FOUND, "above", _FOUR_IN_FIVE), _first_layer, headline=True),
    "clean-has-no-bad-layer": Statement(every(_ACCUSED, "below", _ONE_IN_FIVE), _clean_layers),
    "fp32-inside-accuses-mpt": Statement(every(_BEYOND, "above", HALF), _fp32_inside_mpt),
    "fp32-inside-hides": Statement(
        every(_HIDDEN, "above", _ONE_IN_FIVE), _hidden, scope="this processor", on="AMD"
    ),
    "fp32-inside-hides-nothing": Statement(
        every(_HIDDEN, "below", _ONE_IN_FIVE), _hidden, scope="this processor", on="Intel"
    ),
    "plain-fp64-separates": Statement(
        every(_PLAIN, "below", Bound(0.1, "ours", "a tenth of the smallest bug")), _plain_fp64
    ),
    "coarse-hides-the-layer": Statement(every(_LAST_AS_CLEAN, "above", _FOUR_IN_FIVE), _coarse_layers),
}


def _count(names: Collection[str], *kinds: str) -> Callable[[Results], str]:
    """Count symptoms, or those whose verdict is of some kinds."""

    def give(found: Results) -> str:
        asked = found.symptoms[found.symptoms["symptom"].isin(names)]
        return str(int(asked["kind"].isin(kinds).sum())) if kinds else str(len(asked))

    return give


def _slope_range(of: Callable[[pd.DataFrame], pd.Series]) -> Callable[[Results], str]:
    def give(found: Results) -> str:
        slopes = found.planted.loc[of(found.planted["symptom"]), "slope"].dropna()
        # Adding zero turns a rounded minus zero into zero.
        return between((round(slope.value, 2) + 0.0 for slope in slopes), "{:.2f}")

    return give


def _inside(found: Results) -> pd.Series:
    rows = found.in_fp64
    return rows[rows["symptom"] == symptoms.NARROW_INSIDE].groupby("model")["drift"].mean()


def _clean_most(found: Results) -> float:
    """Give the most roundoffs by which a clean model drifts on a text in fp32 or fp64."""
    rows = found.drifts.rows
    rows = rows[(rows["document"] == symptoms.PLANTED) & (rows["symptom"] == symptoms.CLEAN)]
    rows = rows[rows["dtype"].isin(("float32", "float64"))]
    return (rows["drift"] / rows["dtype"].map(UNIT_ROUNDOFF)).max()


def _bugs_least(found: Results) -> float:
    """Give the fewest roundoffs of fp64 by which an injected bug drifts, in the mean over texts."""
    lines = found.lines[(found.lines["document"] == symptoms.PLANTED) & (found.lines["dtype"] == "float64")]
    lines = lines[~lines["symptom"].isin((symptoms.CLEAN, symptoms.NARROW_INSIDE))]
    return (lines["drift"] / lines["roundoff"]).min()


def _smallest_bug(found: Results) -> float:
    rows = _drifts(found, symptoms.PLANTED, [name for name in symptoms.NAMES if name != symptoms.CLEAN])
    return rows["drift"].min()


NUMBERS: dict[str, Callable[[Results], str]] = {
    "model": lambda found: found.model,
    "n_texts": lambda found: str(found.drifts.about["settings"]["n_samples"]),
    "n_tokens": lambda found: lengths.said(found.drifts.about["settings"]["n_tokens"]),
    "n_families": lambda found: str(found.planted["model"].nunique() - 1),
    "n_injected": lambda found: str(found.planted["symptom"].nunique() - 1),
    "limit": lambda _: f"{verdict.LIMIT:,.0f}",
    "limit_fp32": lambda _: f"{verdict.ROUNDING['float32']:,.0f}",
    "clean_slopes": _slope_range(lambda names: names == symptoms.CLEAN),
    "bug_slopes": _slope_range(lambda names: names != symptoms.CLEAN),
    "reported": _count(_reported()),
    "reported_bugs": _count(_reported(), "bug"),
    "reported_rounding": _count(_reported(), "rounding", "exact"),
    "reported_inferred": _count([one.name for one in reported.SYMPTOMS if one.inferred], "bug"),
    "bugs_fed": _count(_reported(reported.FED), "bug"),
    "bugs_past_block": _count(_reported(reported.PAST_BLOCK), "bug"),
    "bugs_in_model": _count(_reported(reported.IN_MODEL), "bug"),
    "found_bugs": _count(reported.names(reported.FOUND), "bug"),
    "removed": _count(reported.names(reported.REMOVED)),
    "planted_in": lambda found: str(int(found.by_layer.rows["planted_in"].max())),
    "inside_mpt": lambda found: power_of_ten(_inside(found)["mpt"]),
    "clean_most": lambda found: f"{_clean_most(found):,.0f}",
    "bugs_least": lambda found: power_of_ten(_bugs_least(found), 0),
    "smallest_bug": lambda found: power_of_ten(_smallest_bug(found)),
}
