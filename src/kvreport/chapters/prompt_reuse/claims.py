"""The claims of the forum thread on cache reuse, each with the check that its YAML describes."""

import pandas as pd

from kvbook.measuring import agreement, estimates
from kvreport.chapters.prompt_reuse import continuations, split_keys
from kvreport.chapters.prompt_reuse.results import Results
from kvreport.publishing.verdicts import DOCUMENTS, OTHERS, Verdict, holds, weights_of
from kvreport.publishing.wording import DTYPES


def _weights(results: Results) -> str:
    """Say whose weights the two models have."""
    return weights_of(results.split.about["models"])


def _finest(results: Results) -> str:
    """Name the finest dtype of the run."""
    return min(results.reuse.rows["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)


def _of(equal: pd.Series) -> str:
    return f"{int(equal.sum())} of {len(equal)}"


def split_changes_keys(results: Results) -> Verdict:
    """Count over all layers."""
    rows = results.split.rows[results.split.rows["variant"] == split_keys.POSTED]
    counts = rows.groupby(["model", "dtype"], sort=False)[["n_differing", "n_elements"]].sum()
    here = "; ".join(
        f"{model} {DTYPES[dtype]}: {row.n_differing:,} of {row.n_elements:,}"
        for (model, dtype), row in zip(counts.index, counts.itertuples(), strict=True)
    )
    differs = counts["n_differing"] > 0
    finest = differs[differs.index.get_level_values("dtype") == _finest(results)]
    return Verdict(f"all layers, keys and values: {here}", holds(finest.all(), not differs.any(), _weights(results)))


def element_counts(results: Results) -> Verdict:
    """Build the compared tensors and count."""
    table = results.counts
    met = table["elements"] == table["published"]
    here = "; ".join(
        f"{row.model}: {row.per_token:,} x ({row.prompt} + {row.response}) = {row.elements:,}"
        for row in table.itertuples()
    )
    # The count depends on the shape alone, which is the document's: weights do not enter.
    return Verdict(here, holds(met.all(), not met.all(), "hub"))


def first_layer_differs(results: Results) -> Verdict:
    """Count at the published numbers of rows, and at the others."""
    table = results.rows_fed
    stock = table[table["variant"] == split_keys.POSTED]
    posted = results.at_published_rows
    elsewhere = stock.drop(stock.index[stock["n_differing"] == 0])
    here = "; ".join(
        f"{row.model} {DTYPES[row.dtype]}, {row.rows_fed} rows: {row.n_differing:,} of {row.n_elements:,}"
        for row in posted.itertuples()
    )
    numbers = sorted(elsewhere["rows_fed"].unique())
    here += f"; some differ when the rows fed are {', '.join(map(str, numbers))}" if numbers else "; none at any number"
    word = holds((posted["n_differing"] > 0).all(), elsewhere.empty, "random")
    return Verdict(here, word)


def reuse_is_the_cause(results: Results) -> Verdict:
    """Overwrite the cache, and equalize the rows."""
    measured = ["n_elements", "n_differing", "max_ulps", "max_abs", "relative_rms"]
    split = results.split.rows
    response = split[(split["part"] == "response") & (split["tensor"] == "keys")]
    keys = ["model", "dtype", "layer"]
    posted, overwritten = (
        response[response["variant"] == variant].set_index(keys)[measured]
        for variant in (split_keys.POSTED, split_keys.OVERWRITTEN)
    )
    unequal = (posted != overwritten.loc[posted.index]).any(axis=1)
    first = unequal.xs(0, level="layer")
    deeper = unequal[unequal.index.get_level_values("layer") > 0]
    rows = results.rows_fed
    stock = int(rows.loc[rows["variant"] == split_keys.POSTED, "n_differing"].sum())
    padded = int(rows.loc[rows["variant"] == split_keys.FULL_ROWS, "n_differing"].sum())
    here = (
        f"cache overwritten: the first layer's keys change in {_of(first)} runs, deeper layers' in {_of(deeper)}; "
        f"first layer at its true width, all row counts: {stock:,} elements differ, {padded:,} once the linear maps see "
        "as many rows as in the whole pass"
    )
    if first.any():
        return Verdict(here, holds(first.all(), False, _weights(results)))
    return Verdict(here, "other cause" if deeper.any() and not padded else "undecided")


def _seam_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Keep the posted way where the ids do not continue: the thread's prompts, or their like in this vocabulary."""
    return runs[
        runs["case"].isin([continuations.THREAD, continuations.JOINED])
        & runs["seam"]
        & (runs["way"] == continuations.POSTED)
    ]


def reused_cache_changes_text(results: Results) -> Verdict:
    """Compare tokens where the ids do not continue."""
    seams = _seam_runs(results.runs)
    if seams.empty:
        return Verdict("0 posted or joined prompts whose ids leave the prefix's in this vocabulary", "not run")
    estimate = estimates.share(int((~seams["equal"]).sum()), len(seams))
    here = f"tokens differ in {_of(~seams['equal'])} runs ({estimate.text('{:.2f}')}), every one with a seam in its ids"
    return Verdict(here, holds(estimate.low > 0.5, estimate.high < 0.5, _weights(results)))


def either_cache_kind(results: Results) -> Verdict:
    """Pair each run with a static cache with the one with a dynamic cache."""
    keys = ["model", "dtype", "case", "item", "way"]
    runs = results.runs
    tokens = {kind: runs[runs["cache"] == kind].set_index(keys)["tokens"] for kind in ("static", "dynamic")}
    both = tokens["static"].to_frame("static").join(tokens["dynamic"].rename("dynamic"), how="inner")
    equal = both["static"] == both["dynamic"]
    estimate = estimates.share(int(equal.sum()), len(equal))
    return Verdict(
        f"tokens equal in {_of(equal)} runs ({estimate.text('{:.2f}')})",
        holds(bool(equal.all()), estimate.high < 0.5, _weights(results)),
    )


def precision_explains(results: Results) -> Verdict:
    """Take the dtype and the ids apart."""
    runs = results.runs
    seams = _seam_runs(runs)
    continued = runs[(runs["case"] == continuations.CONTINUED) & (runs["way"] == continuations.POSTED)]
    if seams.empty:
        return Verdict("0 prompts whose ids leave the prefix's in this vocabulary", "not run")
    parts = []
    for dtype in runs["dtype"].unique():
        parts.append(
            f"{DTYPES[dtype]}: tokens equal in {_of(seams.loc[seams['dtype'] == dtype, 'equal'])} runs with a seam, "
            f"in {_of(continued.loc[continued['dtype'] == dtype, 'equal'])} whose ids continue"
        )
    finest = _finest(results)
    breaks = not seams.loc[seams["dtype"] == finest, "equal"].all()
    healed = bool(continued.loc[continued["dtype"] == finest, "equal"].all())
    if breaks and healed:
        return Verdict("; ".join(parts), "other cause")
    coarse = seams[seams["dtype"] != finest]
    only_coarse = not breaks and len(coarse) > 0 and not coarse["equal"].all()
    return Verdict("; ".join(parts), holds(only_coarse, False, _weights(results)))


def recipe_is_safe(results: Results) -> Verdict:
    """Run the documented example."""
    runs = results.runs
    table = runs[(runs["case"] == continuations.DOCUMENTED) & (runs["way"] == continuations.POSTED)]
    estimate = estimates.share(int(table["equal"].sum()), len(table))
    here = (
        f"ids do not continue in {_of(table['seam'])} runs; tokens equal in {_of(table['equal'])} "
        f"({estimate.text('{:.2f}')})"
    )
    return Verdict(here, holds(bool(table["equal"].all()), estimate.high < 0.5, _weights(results)))


def answer_survives(results: Results) -> Verdict:
    """Look for the capital's name, and for the complaint, in the text."""
    runs = results.runs
    asked = runs[
        runs["case"].isin([continuations.THREAD, continuations.CHAT])
        & (runs["item"].astype(str) == "1")
        & (runs["cache"] != "static")
    ]
    asked = asked.assign(text=asked["words"].map("".join), in_chat=asked["case"] == continuations.CHAT)
    plain, posted = (asked[asked["way"] == way] for way in (continuations.NO_REUSE, continuations.POSTED))
    named = plain["text"].str.contains("Paris")
    complains = posted["text"].str.contains("incomplete")
    parts = [
        f"{_of(of)} texts name Paris {where}"
        for where, of in (("as posted", named[~plain["in_chat"]]), ("in the chat template", named[plain["in_chat"]]))
        if len(of)
    ]
    here = f"without reuse {', '.join(parts)}; with the cache as it is {_of(complains)} say “incomplete”"
    if not named.any():
        real = _weights(results) in (*DOCUMENTS, *OTHERS)
        return Verdict(here, "undecided" if real else "needs the real weights")
    answers = bool(named.groupby(plain["model"]).any().all())
    # Where the prompt's ids go on from the cache's, nothing is missing that a model could complain of.
    contradicted = bool(posted["seam"].any()) and not complains.any()
    return Verdict(here, holds(answers and bool(complains.any()), contradicted, _weights(results)))


CHECKS = {
    "split-changes-keys": split_changes_keys,
    "element-counts": element_counts,
    "first-layer-differs": first_layer_differs,
    "reuse-is-the-cause": reuse_is_the_cause,
    "reused-cache-changes-text": reused_cache_changes_text,
    "either-cache-kind": either_cache_kind,
    "precision-explains": precision_explains,
    "recipe-is-safe": recipe_is_safe,
    "answer-survives": answer_survives,
}
