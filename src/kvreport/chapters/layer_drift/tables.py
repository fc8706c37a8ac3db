"""Tables behind the chapter on issue 25420."""

import itertools
from collections.abc import Iterable

import pandas as pd

from kvbook.measuring import agreement, estimates, mitigations
from kvreport.chapters.layer_drift import greedy_paths
from kvreport.publishing.wording import DTYPES

# The embedding cannot drift, and layer 1 only begins to: in 16 bits few or none of its elements differ.  From layer 2 on
# there is drift to carry along; what comes after the final norm has another scale.
FIRST_FITTED_LAYER = 2


def inner(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep the layers to which one law of growth can apply."""
    last = rows.loc[rows["place"] == "hidden", "layer"].max()
    return rows[(rows["place"] == "hidden") & (rows["layer"] >= FIRST_FITTED_LAYER) & (rows["layer"] < last)]


def _fittable(rows: pd.DataFrame, value: str) -> estimates.Resampled | None:
    """Resample a series whose mean drift is above zero in every inner layer and draw; a logarithm takes no other."""
    resampled = estimates.resample(inner(rows), value)
    positive = len(resampled.layers) >= 3 and (resampled.mean > 0).all() and (resampled.draws > 0).all()
    return resampled if positive else None


def layer_means(drift: pd.DataFrame) -> pd.DataFrame:
    """Average over samples, as the document did, with an interval."""
    tables = []
    for (model, weights, dtype), rows in drift.groupby(["model", "weights", "dtype"], sort=False):
        resampled = estimates.resample(rows, "max_abs")
        low, high = resampled.interval()
        others = rows.groupby("layer")[["relative_rms", "differing_share"]].mean()
        tables.append(
            pd.DataFrame(
                {
                    "model": model,
                    "weights": weights,
                    "dtype": dtype,
                    "place": rows.groupby("layer")["place"].first().to_numpy(),
                    "layer": resampled.layers,
                    "max_abs": resampled.mean,
                    "low": low,
                    "high": high,
                    "relative_rms": others["relative_rms"].to_numpy(),
                    "differing_share": others["differing_share"].to_numpy(),
                    "n": rows["sample"].nunique(),
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


def fittable(drift: pd.DataFrame, value: str = "max_abs") -> dict[tuple[str, str], estimates.Resampled]:
    """Resample every series, by model and dtype, that drifts in each inner layer: what `growth_table` and others fit."""
    resampled = {key: _fittable(rows, value) for key, rows in drift.groupby(["model", "dtype"], sort=False)}
    return {key: series for key, series in resampled.items() if series is not None}


def growth_table(series: dict[tuple[str, str], estimates.Resampled]) -> pd.DataFrame:
    """Fit the growth a layer of every series of `fittable`."""
    table = [
        {
            "model": model,
            "dtype": dtype,
            "fit": estimates.growth_per_layer(resampled.layers, resampled.mean),
            "sampling": estimates.growth_resampled(resampled),
        }
        for (model, dtype), resampled in series.items()
    ]
    return pd.DataFrame(table, columns=["model", "dtype", "fit", "sampling"])


def ratio_table(series: dict[tuple[str, str], estimates.Resampled]) -> pd.DataFrame:
    """Take the ratio of every dtype to the next finer one, over the inner layers, of the series of `fittable`."""
    table = []
    for model in dict.fromkeys(model for model, _ in series):
        of_model = {dtype: resampled for (name, dtype), resampled in series.items() if name == model}
        names = sorted(of_model, key=agreement.UNIT_ROUNDOFF.__getitem__)
        for fine, coarse in itertools.pairwise(names):
            table.append(
                {
                    "model": model,
                    "coarse": coarse,
                    "fine": fine,
                    "fit": estimates.geometric_mean_ratio(of_model[coarse].mean, of_model[fine].mean),
                    "sampling": estimates.ratio_resampled(of_model[coarse], of_model[fine]),
                }
            )
    return pd.DataFrame(table, columns=["model", "coarse", "fine", "fit", "sampling"])


def published_fits(published: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Fit growth and ratios to the document's own columns; they have no samples, so only the fit's interval."""
    growth, ratios = [], []
    for model, of_model in published.groupby("model", sort=False):
        fitted = {dtype: inner(rows) for dtype, rows in of_model.groupby("dtype", sort=False)}
        for dtype, rows in fitted.items():
            fit = estimates.growth_per_layer(rows["layer"].to_numpy(), rows["max_abs"].to_numpy())
            growth.append({"model": model, "dtype": dtype, "fit": fit})
        names = sorted(fitted, key=agreement.UNIT_ROUNDOFF.__getitem__)
        for fine, coarse in itertools.pairwise(names):
            ratio = estimates.geometric_mean_ratio(
                fitted[coarse]["max_abs"].to_numpy(), fitted[fine]["max_abs"].to_numpy()
            )
            ratios.append({"model": model, "coarse": coarse, "fine": fine, "fit": ratio})
    return pd.DataFrame(growth), pd.DataFrame(ratios, columns=["model", "coarse", "fine", "fit"])


def _distinct(greedy: pd.DataFrame) -> pd.DataFrame:
    """Keep one copy of a prompt that several seeds drew: its rows are equal, and it is one unit."""
    return greedy.drop_duplicates(["model", "dtype", "prompt", "method", "step"])


def divergence_table(greedy: pd.DataFrame) -> pd.DataFrame:
    """Find for every prompt and method the first token that differs from decoding without a cache."""
    greedy = _distinct(greedy).sort_values("step", kind="stable")
    tokens, margins, digests, lengths, tied = (
        greedy[name].to_numpy()
        for name in ("token", "margin", "logits_sha256", "cache_length", list(greedy_paths.TIES))
    )
    # Places in these, for there are hundreds of loops.
    places = greedy.groupby(["model", "dtype", "prompt", "method"], sort=False).indices
    table = []
    for key in dict.fromkeys(place[:3] for place in places):
        model, dtype, prompt = key
        uncached = places[*key, greedy_paths.UNCACHED]
        for method in greedy_paths.METHODS[1:]:
            own = places[*key, method]
            step = agreement.first_divergence(tokens[uncached].tolist(), tokens[own].tolist())
            steps = min(len(uncached), len(own))
            # A loop that ended early, at the model's context, cannot be called equal.
            complete = steps == len(uncached)
            equal = digests[own[:steps]] == digests[uncached[:steps]]
            table.append(
                {
                    "model": model,
                    "dtype": dtype,
                    "prompt": prompt,
                    "method": method,
                    "first_divergence": step,
                    "margin": None if step is None else margins[uncached[step]],
                    "tied": None if step is None else bool(tied[own[step]].any()),
                    "steps": steps,
                    "equal": step is None and complete,
                    "bits_equal_steps": int(equal.sum()),
                    "final_cache_length": int(lengths[own[-1]]),
                }
            )
    frame = pd.DataFrame(table)
    return frame.astype({"first_divergence": "Float64", "margin": "Float64"})


def steps_as(greedy: pd.DataFrame, method: str, other: str) -> pd.DataFrame:
    """Tell of every prompt whether two methods write equal tokens, and have bitwise identical logits after the first step.

    At the first one `generate` runs the output head on the last row alone, and a loop on all rows of the prompt.
    """
    keys, greedy = ["model", "dtype", "prompt"], _distinct(greedy).sort_values("step", kind="stable")
    found = {}
    for column, rows in (("token", greedy), ("logits_sha256", greedy[greedy["step"] > 0])):
        written = rows.groupby([*keys, "method"], sort=False)[column].agg(tuple).unstack("method")
        found[column] = written[method].eq(written[other])
    return pd.DataFrame(found).fillna(True).reset_index()


def _first_difference(rows: pd.DataFrame) -> str:
    """Say of one prompt where its tokens part from the uncached ones, of several how many never do."""
    if len(rows) > 1:
        return f"{int(rows['equal'].sum())} of {len(rows)} equal"
    row = rows.iloc[0]
    if row["equal"]:
        return "equal"
    first = row["first_divergence"]
    return f"equal, ends at {row['steps']}" if pd.isna(first) else f"step {int(first)}"


def divergence_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `divergence_table` out for reading: a row a method, a column a model and dtype."""
    table = table.assign(column=table["model"] + ", " + table["dtype"].map(DTYPES))
    said = {key: _first_difference(rows) for key, rows in table.groupby(["method", "column"], sort=False)}
    grid = pd.Series(said).unstack()
    grid = grid.loc[list(greedy_paths.METHODS[1:]), list(dict.fromkeys(table["column"]))]
    # Of the first prompt; another one begins with another number of tokens.
    first = table[table["prompt"] == table["prompt"].iloc[0]]
    lengths = first.groupby("method")["final_cache_length"].agg(lambda held: ", ".join(map(str, sorted(set(held)))))
    grid.insert(0, "cache length", lengths)
    return grid.rename_axis(index="method", columns=None).reset_index()


def mitigation_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Take every variant against stock: drift by the ratio of means, times by the median of paired ratios."""
    table = []
    for dtype, rows in measured.groupby("dtype", sort=False):
        if not (rows.loc[rows["variant"] == mitigations.STOCK, "logits_relative_rms"] > 0).any():
            continue
        for variant in mitigations.NAMES[1:]:
            own = rows[rows["variant"] == variant]
            if len(own):
                table.append(
                    {
                        "dtype": dtype,
                        "variant": variant,
                        "equal_share": estimates.share_over(own, own["logits_relative_rms"] == 0)[0],
                        "drift_ratio": estimates.paired_ratio(rows, "logits_relative_rms", variant, "stock"),
                        "decode_ratio": estimates.paired_median_ratio(rows, "decode_s", variant, "stock"),
                        "full_ratio": estimates.paired_median_ratio(rows, "full_s", variant, "stock"),
                    }
                )
    columns = ["dtype", "variant", "equal_share", "drift_ratio", "decode_ratio", "full_ratio"]
    return pd.DataFrame(table, columns=columns)


GROWTH, RATIO = "growth per layer", "ratio of drift / that of unit roundoffs"


def laws_table(ours: Iterable[pd.DataFrame], published: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Bring our `growth_table` and `ratio_table` and the two of `published_fits` together."""
    table = []
    whose = (*((fitted, "fit", True) for fitted in published), *((fitted, "sampling", False) for fitted in ours))
    for fitted, column, theirs in whose:
        for _, row in fitted.iterrows():
            is_ratio = "coarse" in fitted.columns
            dtypes = f"{DTYPES[row['coarse']]} / {DTYPES[row['fine']]}" if is_ratio else DTYPES[row["dtype"]]
            label = f"{row['model'].split('/')[-1]}, {dtypes}{', the issue' if theirs else ''}"
            estimate = row[column]
            if is_ratio:
                roundoffs = agreement.UNIT_ROUNDOFF[row["coarse"]] / agreement.UNIT_ROUNDOFF[row["fine"]]
                estimate = estimates.Estimate(
                    *(end / roundoffs for end in (estimate.value, estimate.low, estimate.high)), estimate.kind
                )
            table.append((RATIO if is_ratio else GROWTH, label, estimate, theirs))
    return pd.DataFrame(table, columns=["quantity", "label", "estimate", "published"])


def drift_table(means: pd.DataFrame) -> pd.DataFrame:
    """Lay the means out as the document printed them: a row a layer, a column a model and dtype."""
    table = means.assign(column=means["model"] + ", " + means["dtype"].map(DTYPES)).pivot(
        index="layer", columns="column", values="max_abs"
    )[list(dict.fromkeys(means["model"] + ", " + means["dtype"].map(DTYPES)))]
    depths = means[means["place"] == "logits"].groupby("model")["layer"].first()
    # Models of unequal depth have their logits in different rows; the label is right when all agree.
    names = dict.fromkeys(depths, "logits") if len(set(depths)) == 1 else {}
    table.index = [names.get(layer, layer) for layer in table.index]
    return table.rename_axis("layer").reset_index()


def mitigation_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `mitigation_table` out for reading, under a reader's column names."""
    return pd.DataFrame(
        {
            "mitigation": table["variant"],
            "dtype": table["dtype"].map(DTYPES),
            "drift / stock": table["drift_ratio"].map(lambda e: e.text("{:.2f}")),
            "logits equal": table["equal_share"].map(lambda e: e.text("{:.0%}")),
            "decode step / stock": table["decode_ratio"].map(lambda e: e.text("{:.2f}")),
            "full pass / stock": table["full_ratio"].map(lambda e: e.text("{:.2f}")),
        }
    )


def with_published(means: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Put our means and the document's in one table, as they are drawn, told apart by a column ``published``."""
    return pd.concat([means.assign(published=False), published.assign(published=True)], ignore_index=True)
