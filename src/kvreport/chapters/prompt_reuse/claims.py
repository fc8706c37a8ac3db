"""The claims of the forum thread on cache reuse, each with the check that its YAML describes."""

from dataclasses import dataclass

import pandas as pd

from kvbook.measuring import agreement
from kvbook.measuring import estimates as fits
from kvreport.chapters.prompt_reuse import continuations as prompt_reuse
from kvreport.chapters.prompt_reuse import split_keys
from kvreport.chapters.prompt_reuse import tables as analysis
from kvreport.publishing.verdicts import Verdict, holds
from kvreport.publishing.wording import DTYPES


@dataclass(frozen=True)
class Evidence:
    """The chapter's rows.

    Attributes
    ----------
    split, first_layer, reuse : DataFrame
        Rows of the experiments ``split_keys``, ``first_layer`` and ``prompt_reuse``.
    shapes : dict
        The documents' configurations by hub id, from the record of ``first_layer``.
    """

    split: pd.DataFrame
    first_layer: pd.DataFrame
    reuse: pd.DataFrame
    shapes: dict

    @property
    def weights(self) -> str:
        """Where the weights came from; the first model speaks for both, they are loaded alike."""
        return self.split["weights"].iloc[0]

    @property
    def runs(self) -> pd.DataFrame:
        """One row a continuation."""
        return analysis.runs(self.reuse)

    @property
    def finest(self) -> str:
        """The finest dtype of the run."""
        return min(self.reuse["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)


def _of(equal: pd.Series) -> str:
    return f"{int(equal.sum())} of {len(equal)}"


def split_changes_keys(evidence: Evidence) -> Verdict:
    """Count over all layers."""
    rows = evidence.split[evidence.split["variant"] == split_keys.POSTED]
    counts = rows.groupby(["model", "dtype"], sort=False)[["n_differing", "n_elements"]].sum()
    here = "; ".join(
        f"{model} {DTYPES[dtype]}: {row.n_differing:,} of {row.n_elements:,}"
        for (model, dtype), row in zip(counts.index, counts.itertuples(), strict=True)
    )
    differs = counts["n_differing"] > 0
    finest = differs[differs.index.get_level_values("dtype") == evidence.finest]
    return Verdict(f"all layers, keys and values: {here}", holds(finest.all(), not differs.any(), evidence.weights))


def element_counts(evidence: Evidence) -> Verdict:
    """Build the compared tensors and count."""
    table = analysis.count_arithmetic(evidence.first_layer, evidence.shapes)
    met = table["elements"] == table["published"]
    here = "; ".join(
        f"{row.model}: {row.per_token:,} x ({row.prompt} + {row.response}) = {row.elements:,}"
        for row in table.itertuples()
    )
    # The count depends on the shape alone, which is the document's: weights do not enter.
    return Verdict(here, holds(met.all(), not met.all(), "hub"))


def first_layer_differs(evidence: Evidence) -> Verdict:
    """Count at the published numbers of rows, and at the others."""
    table = analysis.rows_fed_table(evidence.first_layer)
    stock = table[table["variant"] == split_keys.POSTED]
    published = analysis.published_response_shares()
    posted = stock.merge(published[["model", "rows_fed"]], on=["model", "rows_fed"])
    elsewhere = stock.drop(stock.index[stock["n_differing"] == 0])
    here = "; ".join(
        f"{row.model} {DTYPES[row.dtype]}, {row.rows_fed} rows: {row.n_differing:,} of {row.n_elements:,}"
        for row in posted.itertuples()
    )
    numbers = sorted(elsewhere["rows_fed"].unique())
    here += f"; some differ when the rows fed are {', '.join(map(str, numbers))}" if numbers else "; none at any number"
    word = holds((posted["n_differing"] > 0).all(), elsewhere.empty, "random")
    return Verdict(here, word)


def reuse_is_the_cause(evidence: Evidence) -> Verdict:
    """Overwrite the cache, and equalize the rows."""
    measured = ["n_elements", "n_differing", "max_ulps", "max_abs", "relative_rms"]
    response = evidence.split[(evidence.split["part"] == "response") & (evidence.split["tensor"] == "keys")]
    keys = ["model", "dtype", "layer"]
    posted, overwritten = (
        response[response["variant"] == variant].set_index(keys)[measured]
        for variant in (split_keys.POSTED, split_keys.OVERWRITTEN)
    )
    unequal = (posted != overwritten.loc[posted.index]).any(axis=1)
    first = unequal.xs(0, level="layer")
    deeper = unequal[unequal.index.get_level_values("layer") > 0]
    rows = analysis.rows_fed_table(evidence.first_layer)
    stock = int(rows.loc[rows["variant"] == split_keys.POSTED, "n_differing"].sum())
    padded = int(rows.loc[rows["variant"] == split_keys.FULL_ROWS, "n_differing"].sum())
    here = (
        f"cache overwritten: the first layer's keys change in {_of(first)} runs, deeper layers' in {_of(deeper)}; "
        f"first layer at its true width, all row counts: {stock:,} elements differ, {padded:,} once the linear maps see "
        "as many rows as in the whole pass"
    )
    if first.any():
        return Verdict(here, holds(first.all(), False, evidence.weights))
    return Verdict(here, "other cause" if deeper.any() and not padded else "undecided")


def _seam_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Keep the posted way where the ids do not continue: the thread's prompts, or their like in this vocabulary."""
    return runs[
        runs["case"].isin([prompt_reuse.THREAD, prompt_reuse.JOINED])
        & runs["seam"]
        & (runs["way"] == prompt_reuse.POSTED)
    ]


def reused_cache_changes_text(evidence: Evidence) -> Verdict:
    """Compare tokens where the ids do not continue."""
    seams = _seam_runs(evidence.runs)
    if seams.empty:
        return Verdict("0 posted or joined prompts whose ids leave the prefix's in this vocabulary", "not run")
    estimate = fits.share(int((~seams["equal"]).sum()), len(seams))
    here = f"tokens differ in {_of(~seams['equal'])} runs ({estimate.text('{:.2f}')}), every one with a seam in its ids"
    return Verdict(here, holds(estimate.low > 0.5, estimate.high < 0.5, evidence.weights))


def either_cache_kind(evidence: Evidence) -> Verdict:
    """Pair each run with a static cache with the one with a dynamic cache."""
    keys = ["model", "dtype", "case", "item", "way"]
    runs = evidence.runs
    tokens = {kind: runs[runs["cache"] == kind].set_index(keys)["tokens"] for kind in ("static", "dynamic")}
    both = tokens["static"].to_frame("static").join(tokens["dynamic"].rename("dynamic"), how="inner")
    equal = both["static"] == both["dynamic"]
    estimate = fits.share(int(equal.sum()), len(equal))
    return Verdict(
        f"tokens equal in {_of(equal)} runs ({estimate.text('{:.2f}')})",
        holds(bool(equal.all()), estimate.high < 0.5, evidence.weights),
    )


def precision_explains(evidence: Evidence) -> Verdict:
    """Take the dtype and the ids apart."""
    runs = evidence.runs
    seams = _seam_runs(runs)
    continued = runs[(runs["case"] == prompt_reuse.CONTINUED) & (runs["way"] == prompt_reuse.POSTED)]
    if seams.empty:
        return Verdict("0 prompts whose ids leave the prefix's in this vocabulary", "not run")
    parts = []
    for dtype in runs["dtype"].unique():
        parts.append(
            f"{DTYPES[dtype]}: tokens equal in {_of(seams.loc[seams['dtype'] == dtype, 'equal'])} runs with a seam, "
            f"in {_of(continued.loc[continued['dtype'] == dtype, 'equal'])} whose ids continue"
        )
    finest = evidence.finest
    breaks = not seams.loc[seams["dtype"] == finest, "equal"].all()
    healed = bool(continued.loc[continued["dtype"] == finest, "equal"].all())
    if breaks and healed:
        return Verdict("; ".join(parts), "other cause")
    coarse = seams[seams["dtype"] != finest]
    only_coarse = not breaks and len(coarse) > 0 and not coarse["equal"].all()
    return Verdict("; ".join(parts), holds(only_coarse, False, evidence.weights))


def recipe_is_safe(evidence: Evidence) -> Verdict:
    """Run the documented example."""
    runs = evidence.runs
    table = runs[(runs["case"] == prompt_reuse.DOCUMENTED) & (runs["way"] == prompt_reuse.POSTED)]
    estimate = fits.share(int(table["equal"].sum()), len(table))
    here = (
        f"ids do not continue in {_of(table['seam'])} runs; tokens equal in {_of(table['equal'])} "
        f"({estimate.text('{:.2f}')})"
    )
    return Verdict(here, holds(bool(table["equal"].all()), estimate.high < 0.5, evidence.weights))


def answer_survives(evidence: Evidence) -> Verdict:
    """Look for the capital's name, and for the complaint, in the text."""
    runs = evidence.runs
    asked = runs[
        (runs["case"] == prompt_reuse.THREAD) & (runs["item"].astype(str) == "1") & (runs["cache"] != "static")
    ]
    text = asked["words"].map("".join)
    named = text[asked["way"] == prompt_reuse.NO_REUSE].str.contains("Paris")
    complains = text[asked["way"] == prompt_reuse.POSTED].str.contains("incomplete")
    here = f"without reuse {_of(named)} texts name Paris; with the cache as it is {_of(complains)} say “incomplete”"
    if not named.any():
        return Verdict(here, "needs the real weights")
    return Verdict(here, holds(bool(named.all() and complains.any()), not complains.any(), evidence.weights))


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
