"""The claims of the forum thread on cache reuse: for each the rule by which it is judged, and what of the rows it looks at."""

import pandas as pd

from kvbook.measuring import estimates
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.prompt_reuse import continuations, split_keys, tables
from kvreport.chapters.prompt_reuse.results import Results
from kvreport.publishing.judging import Check, Evidence, Measured, fact, facts, missing
from kvreport.publishing.rules import HALF, Bound, Quantity, Rule, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of
from kvreport.publishing.wording import DTYPES

# The thread loads its first example in the library's default, which was fp32 then.
_POSTED_DTYPE = "float32"
_NONE = Bound(0, "arithmetic", "none")


def _weights(results: Results) -> str:
    """Say whose weights the two models have."""
    return weights_of(results.split.about["models"])


def _finest(results: Results) -> str:
    """Name the finest dtype of the run."""
    return min(results.reuse.rows["dtype"].unique(), key=UNIT_ROUNDOFF.__getitem__)


def _of(equal: pd.Series) -> str:
    return f"{int(equal.sum())} of {len(equal)}"


KEYS = Quantity("elements of the first layer's keys that differ in fp32 as posted", series="model", form="{:,.0f}")
ANYWHERE = Quantity("the same at all numbers of tokens fed that were tried, together", series="model", form="{:,.0f}")


def _first_layer_differs(results: Results) -> Evidence:
    posted = results.at_published_rows
    said = "; ".join(
        f"{row.model} {DTYPES[row.dtype]}, {row.rows_fed} tokens fed: {row.n_differing:,} of {row.n_elements:,}"
        for row in posted.itertuples()
    )
    table = results.rows_fed
    table = table[(table["variant"] == split_keys.POSTED) & (table["dtype"] == _POSTED_DTYPE)]
    if table.empty:
        return missing("random", f"the thread's dtype, {DTYPES[_POSTED_DTYPE]}, was not run")
    # Which numbers of rows go through other code is the processor's and its library's.
    found = {
        KEYS: facts(posted[posted["dtype"] == _POSTED_DTYPE].groupby("model", sort=False)["n_differing"].sum().items()),
        ANYWHERE: facts(table.groupby("model", sort=False)["n_differing"].sum().items()),
    }
    return Evidence("random", found, f"at the published widths: {said}")


def _posted_runs(runs: pd.DataFrame, *cases: str) -> pd.DataFrame:
    return runs[runs["case"].isin(cases) & (runs["way"] == continuations.POSTED)]


def _prompts(runs: pd.DataFrame, seam: bool) -> pd.DataFrame:
    """Keep the posted way of the prompts whose ids leave the prefix's, or of those whose ids continue them.

    Texts of the corpus are no prompts, and behind a cache of the whole prompt nothing is left to feed.
    """
    posted = _posted_runs(runs, *(set(tables.CASES) - {continuations.CORPUS, continuations.WHOLE}))
    return posted[posted["seam"] == seam]


def _differing(runs: pd.DataFrame) -> list[Measured]:
    """Give the share of prompts whose tokens differ; models, dtypes and caches read the same prompts."""
    return [Measured("", *estimates.share_over(runs, ~runs["equal"], "item"))] if len(runs) else []


MISMATCH = "a vocabulary in which the thread's own prompts change the prefix's ids"
OWN = Quantity("share of runs on the thread's own prompts whose tokens differ")


def _reused_cache_changes_text(results: Results) -> Evidence:
    own = _posted_runs(results.written, continuations.THREAD)
    chosen = _prompts(results.written, seam=True)
    beside = (
        f"on the prompts whose ids leave the prefix's, chosen for that, tokens differ in {_of(~chosen['equal'])} runs"
    )
    has = frozenset({MISMATCH} if own["seam"].all() else ())
    return Evidence(_weights(results), {OWN: [fact((~own["equal"]).mean())]}, beside, has)


FINE = Quantity("share of prompts with a boundary mismatch whose tokens differ in the finest dtype", "prompt")
COARSE = Quantity("share of prompts with a boundary mismatch whose tokens differ in a coarser dtype", "prompt")
CONTINUED = Quantity(
    "share of prompts whose ids continue the cached ones and whose tokens differ in the finest dtype", "prompt"
)


def _precision_explains(results: Results) -> Evidence:
    runs = results.written
    seams, continued = (_prompts(runs, seam) for seam in (True, False))
    if seams.empty:
        return missing(_weights(results), "0 prompts whose ids leave the prefix's in this vocabulary")
    finest = _finest(results)
    rounding = continued[continued["dtype"] != finest]
    found = {
        FINE: _differing(seams[seams["dtype"] == finest]),
        COARSE: _differing(seams[seams["dtype"] != finest]),
        CONTINUED: _differing(continued[continued["dtype"] == finest]),
    }
    each = (f"{tables.CASES[case]} {_of(~rows['equal'])}" for case, rows in rounding.groupby("case", sort=False))
    beside = (
        f"rounding adds to it: where ids continue, tokens differ in {_of(~rounding['equal'])} runs in coarser dtypes "
        f"({', '.join(each)})"
    )
    return Evidence(_weights(results), found, beside)


CHECKS = {
    "first-layer-differs": Check(
        Rule(
            (
                reproduced(every(KEYS, "above", _NONE)),
                refuted(every(KEYS, "at most", _NONE), every(ANYWHERE, "at most", _NONE)),
            )
        ),
        _first_layer_differs,
    ),
    "reused-cache-changes-text": Check(
        Rule(
            (reproduced(every(OWN, "above", HALF)), refuted(every(OWN, "below", HALF))),
            needs=(MISMATCH,),
        ),
        _reused_cache_changes_text,
    ),
    "precision-explains": Check(
        Rule(
            (
                other_cause(every(FINE, "above", HALF), every(CONTINUED, "below", HALF)),
                reproduced(every(FINE, "below", HALF), every(COARSE, "above", HALF)),
                refuted(every(FINE, "above", HALF)),
            ),
            unseen="the thread's own prompts do not show its symptom in the vocabulary that was run",
        ),
        _precision_explains,
    ),
}

CLAIMS = Claims("forum-reuse", CHECKS)
