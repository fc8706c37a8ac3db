"""What the rows of the chapter on bug or rounding say: its measures, then the sentences that they decide."""


import pandas as pd

from kvbook import lengths
from kvbook.diagnosis import verdict
from kvbook.measuring.estimates import Estimate
from kvreport.chapters.bug_or_rounding import rows
from kvreport.publishing.estimators import computed, counted, distinct, part, share, total
from kvreport.publishing.measures import Measure, Worded, always, here, noted
from kvreport.publishing.rules import HALF, Bound


def _steepest(drifts: pd.DataFrame) -> Estimate | None:
    """Fit every symptom's slope, and choose that whose interval reaches highest."""
    slopes = [verdict.judge(symptom).slope for _, symptom in drifts.groupby("symptom", sort=False)]
    return max(filter(None, slopes), key=lambda slope: slope.high, default=None)


def _as_clean(drifts: pd.DataFrame, clean: pd.DataFrame) -> Estimate | None:
    both = drifts.dropna(subset="drift").merge(clean, on=["source", "sample"], suffixes=("", "_clean"))
    return share("alike")(both.assign(alike=both["drift"] == both["drift_clean"]))


@counted
def _clean_over_bugs(drifts: pd.DataFrame) -> float:
    clean = drifts["symptom"] == rows.NARROW_INSIDE
    return drifts.loc[clean, "drift"].max() / drifts.loc[drifts["injected"], "drift"].min()


BEYOND = Measure(
    "share of texts whose drift in fp64 is more than rounding can be", "file", "model", "{:.0%}", rows="injected",
    by=("model",), estimate=share("beyond"),
).where(dtype="float64")
EVERY_BUG = BEYOND.alike(
    "share of texts on which every injected bug drifts in fp64 by more than rounding can",
    lambda drifts: share("beyond")(drifts.groupby(["source", "sample"], as_index=False)["beyond"].all()),
).where(injected=True)
HIDDEN = BEYOND.alike(
    "share of texts with bitwise identical logits in plain fp64", share("identical"), series="", by=()
).where(symptom=rows.NARROW_INSIDE, first=True)
PLAIN = BEYOND.alike(
    "largest drift of a clean model in plain fp64, over the smallest of an injected bug", _clean_over_bugs, unit="",
    form="{:.2g}",
)
OF_DOCUMENTS = BEYOND.alike(
    series="symptom", rows="documents", by=("symptom",),
    estimate=lambda drifts: (share if drifts["sampled"].all() else part)("beyond")(drifts),
)
LARGEST = OF_DOCUMENTS.alike(
    "largest drift of any text in fp64, in roundoffs", computed("roundoffs", "max"), unit="", form="{:,.3g}"
)
SLOPE = Measure(
    "slope of log drift on log unit roundoff", "file", "model and symptom", rows="injected", by=("model", "symptom"),
    estimate=_steepest,
)
CLEAN_SLOPE = SLOPE.alike(series="model", by=("model",)).where(symptom=rows.CLEAN)
LARGEST_SLOPE = SLOPE.alike(
    f"largest {SLOPE.name}, of any injected bug", series="model", by=("model",)
).where(injected=True)
AS_CLEAN = Measure(
    "share of texts that drift exactly as in the clean model", "file", "model and dtype", "{:.0%}", rows="injected",
    by=("model", "dtype", "symptom"), over=("symptom", rows.CLEAN), estimate=_as_clean,
).where(symptom=rows.NARROW, dtype=("float16", "bfloat16"))
LAST_AS_CLEAN = Measure(
    "share of texts whose last layer drifts exactly as in the clean model", "file", "dtype", "{:.0%}",
    rows="last layer", by=("dtype", "bug"), over=("bug", rows.CLEAN), estimate=_as_clean,
).where(bug=rows.NARROW, dtype="bfloat16")
FOUND = Measure(
    "share of texts whose first layer beyond rounding is the injected one", "file", "bug", "{:.0%}",
    rows="first layers", by=("bug",), estimate=share("right"),
).where(dtype="float64", bug=(rows.LATE, rows.NARROW))
ACCUSED = Measure(
    "share of texts with a layer beyond rounding in the clean model", "file", form="{:.0%}", rows="first layers",
    estimate=share("accused"),
).where(dtype="float64", bug=rows.CLEAN)

# Facts for the prose.
MODEL = noted("bug_or_rounding", "models", 0, "name")
N_TEXTS = noted("bug_or_rounding", "settings", "n_samples")
N_TOKENS = noted("bug_or_rounding", "settings", "n_tokens", write=lengths.said)
LIMIT = Worded((), lambda _: f"{verdict.LIMIT:,.0f}")
LIMIT_FP32 = Worded((), lambda _: f"{verdict.ROUNDING['float32']:,.0f}")
FAMILIES = Measure("families", form="{:.0f}", rows="injected", estimate=distinct("model")).where(first=False)
INJECTED = Measure("bugs", form="{:.0f}", rows="injected", estimate=distinct("symptom")).where(injected=True)
INJECTED_IN = Measure("layer", form="{:.0f}", rows="first_bad_layer", estimate=computed("planted_in", "max"))
SYMPTOMS = Measure("symptoms", form="{:.0f}", rows="counted", estimate=counted(len))
REPORTED, REMOVED = (SYMPTOMS.where(whose=whose) for whose in (rows.REPORTED, rows.REMOVED))
REPORTED_ROUNDING, INFERRED = (REPORTED.alike(estimate=total(column)) for column in ("sound", "inferred"))
BUGS = SYMPTOMS.alike(estimate=total("bug"))
REPORTED_BUGS, FOUND_BUGS = (BUGS.where(whose=whose) for whose in (rows.REPORTED, rows.FOUND))
BUGS_FED, BUGS_PAST_BLOCK, BUGS_IN_MODEL = (REPORTED_BUGS.where(lies=where) for where in rows.LIES)
CLEAN_MOST = Measure(
    "most roundoffs of a clean model", form="{:,.0f}", rows="injected", estimate=computed("roundoffs", "max")
).where(symptom=rows.CLEAN, dtype=("float32", "float64"))
INSIDE_MPT = Measure("mean drift in plain fp64", rows="injected", estimate=computed("drift", "mean")).where(
    symptom=rows.NARROW_INSIDE, model="mpt"
)
SMALLEST_BUG = Measure("smallest drift of a bug", rows="injected", estimate=computed("drift", "min")).where(
    injected=True, dtype="float64"
)
LEAST_MEAN = Measure(
    "fewest roundoffs of a bug, in the mean over texts", rows="injected",
    estimate=counted(lambda drifts: drifts.groupby(["model", "symptom"])["roundoffs"].mean().min()),
).where(injected=True, dtype="float64")

_FOUR_IN_FIVE = Bound(0.8, "ours", "four texts in five", "share")
_ONE_IN_FIVE = Bound(0.2, "ours", "one text in five", "share")
_MOST = Bound(verdict.LIMIT, "ours", "half way from fp64 to fp32, in powers of two")
_BETWEEN = Bound(verdict.BOUNDARY, "ours", "half way between a bug's 0 and rounding's 1", "share")

STATEMENTS = {
    "clean-shrinks": always(BEYOND.where(symptom=rows.CLEAN), "below", _ONE_IN_FIVE, headline=True),
    "clean-slope": always(CLEAN_SLOPE, "above", _BETWEEN),
    "bugs-stay": always(EVERY_BUG, "above", _FOUR_IN_FIVE, headline=True),
    "bug-slope": always(LARGEST_SLOPE, "below", _BETWEEN),
    "narrow-hides": always(AS_CLEAN, "above", _FOUR_IN_FIVE),
    "reported-rounding": always(OF_DOCUMENTS.where(whose=rows.REPORTED, lies=""), "below", _ONE_IN_FIVE, headline=True),
    "reported-bugs": always(OF_DOCUMENTS.where(whose=rows.REPORTED, lies=rows.LIES), "above", HALF),
    "found-bugs": always(OF_DOCUMENTS.where(whose=rows.FOUND), "above", HALF),
    "cause-removed": always(LARGEST.where(whose=rows.REMOVED), "at most", _MOST),
    "first-layer-found": always(FOUND, "above", _FOUR_IN_FIVE, headline=True),
    "clean-has-no-bad-layer": always(ACCUSED, "below", _ONE_IN_FIVE),
    "fp32-inside-accuses-mpt": always(BEYOND.where(symptom=rows.NARROW_INSIDE, model="mpt"), "above", HALF),
    "fp32-inside-hides": here(HIDDEN, "above", _ONE_IN_FIVE, on="AMD"),
    "fp32-inside-hides-nothing": here(HIDDEN, "below", _ONE_IN_FIVE, on="Intel"),
    "plain-fp64-separates": always(PLAIN, "below", Bound(0.1, "ours", "a tenth of the smallest bug")),
    "coarse-hides-the-layer": always(LAST_AS_CLEAN, "above", _FOUR_IN_FIVE),
}
