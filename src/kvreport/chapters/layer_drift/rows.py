"""The rows of the chapter on issue 25420 by name; to read them takes no torch."""

import pandas as pd

from kvbook import lengths
from kvbook.measuring import estimates
from kvbook.runs.records import Run
from kvreport.publishing import documents

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"layer_drift": 1, "greedy_paths": 3, "mitigations": 1, "layer_drift_lengths": 1}

# The loop, as it stands and with each of two changes and both; beside them, no cache, and the library's call.
UNCACHED, GENERATE = "no cache", "generate"
POSTED, POSITIONS, LAST, LAST_POSITIONS = LOOPS = (
    "cache, as posted", "cache, as posted + position ids", "cache, last token", "cache, last token + position ids",
)
METHODS = (UNCACHED, *LOOPS, GENERATE)
# Whether the two tokens of a divergence have equal logits in a method, and without a cache.
TIES = ("tied", "tied_uncached")
STOCK = "stock"

# The embedding cannot drift, and layer 1 only begins to: in 16 bits few or none of its elements differ.  From layer 2
# on there is drift to carry along; what comes after the final norm has another scale.
FIRST_FITTED_LAYER = 2

_SERIES = ["model", "weights", "dtype"]


def inner(layer_drift: pd.DataFrame) -> pd.DataFrame:
    """Keep the layers to which one law of growth can apply."""
    hidden = layer_drift[layer_drift["place"] == "hidden"]
    return hidden[(hidden["layer"] >= FIRST_FITTED_LAYER) & (hidden["layer"] < hidden["layer"].max())]


def _logits(run: Run) -> pd.DataFrame:
    rows = run.rows[run.rows["place"] == "logits"]
    tokens = lengths.said(run.about.get("lengths", run.about["settings"]["n_tokens"]))
    return rows.assign(tokens=tokens, differs=rows["differing_share"] > 0, identical=rows["differing_share"] == 0)


def logits(layer_drift: Run) -> pd.DataFrame:
    """Tell of every text of the issue's length whether its logits differ."""
    return _logits(layer_drift)


def logits_at_drawn_lengths(layer_drift_lengths: Run) -> pd.DataFrame:
    """Tell the same of every text of a drawn length."""
    return _logits(layer_drift_lengths)


def logits_at_all_lengths(logits: pd.DataFrame, logits_at_drawn_lengths: pd.DataFrame | None = None) -> pd.DataFrame:
    """Put both together, where there are both."""
    return pd.concat([logits, logits_at_drawn_lengths])


def models_that_drift(logits_at_all_lengths: pd.DataFrame) -> pd.DataFrame:
    """Tell of every model whether most of its texts differ, at all lengths that were tried."""
    shares = logits_at_all_lengths.groupby(["dtype", "model", "tokens"], sort=False)["differs"].mean()
    return (shares > 0.5).groupby(["dtype", "model"], sort=False).all().rename("drifts").reset_index()


def means(layer_drift: pd.DataFrame) -> pd.DataFrame:
    """Average over samples, as the document did, with an interval."""
    tables = []
    for (model, weights, dtype), rows in layer_drift.groupby(_SERIES, sort=False):
        resampled = estimates.resample(rows, "max_abs")
        low, high = resampled.interval()
        about = {"model": model, "weights": weights, "dtype": dtype, "n": rows["sample"].nunique()}
        layers = rows.groupby("layer")
        means = layers[["relative_rms", "differing_share"]].mean().assign(place=layers["place"].first())
        tables.append(means.reset_index().assign(**about, max_abs=resampled.mean, low=low, high=high))
    columns = [*_SERIES, "place", "layer", "max_abs", "low", "high", "relative_rms", "differing_share", "n"]
    return pd.concat(tables, ignore_index=True)[columns]


def published() -> pd.DataFrame:
    """Read the issue's means."""
    rows = []
    for series in documents.published("issue-25420")["drift"]["series"]:
        about = {key: series[key] for key in ("family", "model", "dtype")}
        rows += [about | {"place": "hidden", "layer": i, "max_abs": x} for i, x in enumerate(series["hidden"])]
        rows.append(about | {"place": "logits", "layer": len(series["hidden"]), "max_abs": series["logits"]})
    return pd.DataFrame(rows)


def _distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep one copy of a prompt that several seeds drew: its rows are equal, and it is one unit."""
    return rows.drop_duplicates(["model", "dtype", "prompt", "method", "step"]).sort_values("step", kind="stable")


def divergence(greedy_paths: pd.DataFrame) -> pd.DataFrame:
    """Find for every prompt and method the first token that differs from decoding without a cache."""
    prompt, greedy = ["model", "dtype", "prompt"], _distinct(greedy_paths)
    text = [*prompt, "method"]
    uncached = greedy.loc[greedy["method"] == UNCACHED, [*prompt, "step", "token"]]
    uncached = uncached.assign(written=uncached.groupby(prompt)["step"].transform("size"))
    steps = greedy[greedy["method"] != UNCACHED].merge(uncached, on=[*prompt, "step"], suffixes=("", "_uncached"))
    table = steps.groupby(text, sort=False).agg(
        steps=("step", "size"), written=("written", "first"), final_cache_length=("cache_length", "last")
    )
    first = steps[steps["token"] != steps["token_uncached"]].drop_duplicates(text).set_index(text)
    table = table.assign(first_divergence=first["step"], tied=first[list(TIES)].any(axis=1)).reset_index()
    # A loop that ended early, at the model's context, cannot be called equal.
    return table.assign(equal=table["first_divergence"].isna() & (table["steps"] == table["written"]))


def divergences(divergence: pd.DataFrame) -> pd.DataFrame:
    """Keep the texts that diverge."""
    return divergence[divergence["first_divergence"].notna()]


def generate_and_the_loop(greedy_paths: pd.DataFrame) -> pd.DataFrame:
    """Tell of every prompt whether `generate` has the loop's tokens, and after the first step its logits.

    At the first one `generate` runs the output head on the last row alone, and a loop on all rows of the prompt.
    """
    keys, greedy = ["model", "dtype", "prompt"], _distinct(greedy_paths)
    found = {}
    for name, column, of in (("token", "token", greedy), ("logits", "logits_sha256", greedy[greedy["step"] > 0])):
        written = of.groupby([*keys, "method"], sort=False)[column].agg(tuple).unstack("method")
        found[name] = written[GENERATE].eq(written[LAST])
    return pd.DataFrame(found).fillna(True).reset_index()


def mitigated(mitigations: pd.DataFrame) -> pd.DataFrame:
    """Leave out a dtype in which stock shows no drift: there is none to remove."""
    rows = mitigations.assign(identical=mitigations["logits_relative_rms"] == 0)
    return rows[rows["dtype"].isin(rows.loc[(rows["variant"] == STOCK) & ~rows["identical"], "dtype"])]


def mitigations_that_lower_the_drift(mitigated: pd.DataFrame) -> pd.DataFrame:
    """Keep, by dtype, stock and the mitigations that lower the drift."""

    def is_kept(rows: pd.DataFrame) -> bool:
        dtype, variant = rows[["dtype", "variant"]].iloc[0]
        of_dtype = mitigated[mitigated["dtype"] == dtype]
        return variant == STOCK or estimates.paired_ratio(of_dtype, "logits_relative_rms", variant, STOCK).high < 1

    return mitigated.groupby(["dtype", "variant"], sort=False).filter(is_kept)
