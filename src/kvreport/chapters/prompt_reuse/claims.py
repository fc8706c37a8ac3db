"""The claims of the forum thread on cache reuse: for each the rule by which it is judged, and what of the rows it looks at."""

import pandas as pd

from kvbook.measuring import agreement, estimates
from kvreport.chapters.prompt_reuse import continuations, split_keys, tables
from kvreport.chapters.prompt_reuse.results import Results
from kvreport.publishing.judging import DOCUMENTS, OTHERS, REAL_WEIGHTS, Check, Evidence, Measured, fact, facts, missing
from kvreport.publishing.rules import Bound, Quantity, Rule, anyone, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of
from kvreport.publishing.wording import DTYPES

# The thread loads its first example in the library's default, which was fp32 then.
_POSTED_DTYPE = "float32"
_HALF = Bound(0.5, "arithmetic", "more often than not", "share")
_NONE = Bound(0, "arithmetic", "none")


def _weights(results: Results) -> str:
    """Say whose weights the two models have."""
    return weights_of(results.split.about["models"])


def _finest(results: Results) -> str:
    """Name the finest dtype of the run."""
    return min(results.reuse.rows["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)


def _of(equal: pd.Series) -> str:
    return f"{int(equal.sum())} of {len(equal)}"


COUNT = Quantity("elements of the first layer's keys over the published number", series="model", form="{:g}")


def _element_counts(results: Results) -> Evidence:
    table = results.counts
    beside = "; ".join(
        f"{row.model}: {row.per_token:,} x ({row.prompt} + {row.response}) = {row.elements:,}"
        for row in table.itertuples()
    )
    found = facts((row.model, row.elements / row.published) for row in table.itertuples())
    return Evidence("hub", {COUNT: found}, beside)


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


BROKEN = Quantity("runs of the documented example whose tokens differ in the finest dtype", form="{:.0f}")
SAFE = Quantity("share of prompts of the documented example whose tokens are equal in the finest dtype", "prompt")


def _recipe_is_safe(results: Results) -> Evidence:
    table = _posted_runs(results.written, continuations.DOCUMENTED)
    beside = f"the ids do not continue the prefix's in {_of(table['seam'])} runs of all dtypes"
    table = table[table["dtype"] == _finest(results)]
    found = {
        BROKEN: [fact((~table["equal"]).sum())],
        SAFE: [Measured("", *estimates.share_over(table, table["equal"], "item"))],
    }
    return Evidence(_weights(results), found, f"{beside}; of {len(table)} runs in {DTYPES[_finest(results)]}")


NAMED = Quantity("share of models that name Paris without the cache, as posted or in their chat template")
COMPLAINS = Quantity("texts with the cache that say “incomplete”", form="{:.0f}")
LACKING = Quantity("texts with the cache whose ids leave the cached ones", form="{:.0f}")


def _answer_survives(results: Results) -> Evidence:
    runs = results.written
    asked = runs[
        runs["case"].isin([continuations.THREAD, continuations.CHAT])
        & (runs["item"].astype(str) == "1")
        & (runs["cache"] != "static")
    ]
    asked = asked.assign(text=asked["words"].map("".join))
    plain, posted = (asked[asked["way"] == way] for way in (continuations.NO_REUSE, continuations.POSTED))
    named = plain["text"].str.contains("Paris").groupby(plain["model"]).any()
    found = {
        NAMED: [fact(named.mean())],
        COMPLAINS: [fact(posted["text"].str.contains("incomplete").sum())],
        # Where the prompt's ids go on from the cache's, nothing is missing that a model could complain of.
        LACKING: [fact(posted["seam"].sum())],
    }
    # Stand-ins of which none has learned the fact say nothing of it.
    real = named.any() or _weights(results) in (*DOCUMENTS, *OTHERS)
    has = frozenset({REAL_WEIGHTS} if real else ())
    return Evidence(_weights(results), found, f"of {len(posted)} texts with the cache", has)


_PUBLISHED_COUNT = Bound(1, "document", "its printed numbers")
_ALL = Bound(1, "document", "both models answer")
_ONE = Bound(1, "document", "one does")

CHECKS = {
    "element-counts": Check(
        Rule(
            (
                reproduced(every(COUNT, "at least", _PUBLISHED_COUNT), every(COUNT, "at most", _PUBLISHED_COUNT)),
                refuted(anyone(COUNT, "below", _PUBLISHED_COUNT)),
                refuted(anyone(COUNT, "above", _PUBLISHED_COUNT)),
            ),
            about_code=True,
        ),
        _element_counts,
    ),
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
            (reproduced(every(OWN, "above", _HALF)), refuted(every(OWN, "below", _HALF))),
            needs=(MISMATCH,),
        ),
        _reused_cache_changes_text,
    ),
    "precision-explains": Check(
        Rule(
            (
                other_cause(every(FINE, "above", _HALF), every(CONTINUED, "below", _HALF)),
                reproduced(every(FINE, "below", _HALF), every(COARSE, "above", _HALF)),
                refuted(every(FINE, "above", _HALF)),
            )
        ),
        _precision_explains,
    ),
    "recipe-is-safe": Check(
        Rule(
            (
                refuted(every(BROKEN, "above", _NONE), one_is_enough=True),
                reproduced(every(BROKEN, "at most", _NONE), every(SAFE, "above", _HALF)),
            )
        ),
        _recipe_is_safe,
    ),
    "answer-survives": Check(
        Rule(
            (
                reproduced(every(NAMED, "at least", _ALL), every(COMPLAINS, "at least", _ONE)),
                refuted(
                    every(NAMED, "at least", _ALL), every(LACKING, "above", _NONE), every(COMPLAINS, "at most", _NONE)
                ),
            ),
            needs=(REAL_WEIGHTS,),
        ),
        _answer_survives,
    ),
}

CLAIMS = Claims("forum-reuse", CHECKS)
