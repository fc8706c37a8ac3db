"""Tables behind the chapter on which path is right."""

import numpy as np
import pandas as pd

from kvbook.measuring import agreement
from kvbook.measuring import estimates as fits
from kvreport.chapters.which_path_is_right import path_errors
from kvreport.publishing.wording import DTYPES, power_of_ten

SERIES = ["model", "dtype", "path"]
# Two independent errors of one size are this many times as far apart as each is from the reference.
INDEPENDENT = 2**0.5
# A shift that explains less of the mean square than this is lost in the scatter.
LEAST_EXPLAINED = 0.1


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep the dtypes under test, without the rows that try the reference."""
    return rows[~rows["path"].isin([path_errors.CHECK, path_errors.AS_LOADED])]


def _root_mean_square(values: pd.Series) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _pooled(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Pool errors over rows: root mean squares, and the correlation of all errors, concatenated."""
    squares = rows[by].assign(
        error_full=rows["error_full"] ** 2, error=rows["error"] ** 2, drift=rows["drift"] ** 2,
        product=rows["correlation"].fillna(0) * rows["error_full"] * rows["error"], n=1,
    )  # fmt: skip
    found = squares.groupby(by, sort=False).agg(
        error_full=("error_full", "mean"), error=("error", "mean"), drift=("drift", "mean"), product=("product", "mean"),
        n=("n", "sum"),
    )  # fmt: skip
    found["correlation"] = found.pop("product") / np.sqrt(found["error_full"] * found["error"])
    for name in ("error_full", "error", "drift"):
        found[name] = np.sqrt(found[name])
    found["ratio"] = found["error"] / found["error_full"]
    # The drift in units of the two errors' mean size: 0 where all is shared, the square root of 2 where nothing is.
    found["apart"] = found["drift"] / np.sqrt((found["error_full"] ** 2 + found["error"] ** 2) / 2)
    return found.reset_index()


def by_sample(rows: pd.DataFrame) -> pd.DataFrame:
    """Pool the logits' errors over the positions of each text."""
    return _pooled(rows[rows["place"] == "logits"], [*SERIES, "sample", "source"])


def series_table(rows: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Compare each path's error with the uncached one's, text by text, from `by_sample`."""
    positions = measured(rows)[measured(rows)["place"] == "logits"]
    positions = positions[positions["error"] != positions["error_full"]]
    positions = positions.assign(closer=(positions["error"] < positions["error_full"]).astype(float))
    of_positions = dict(iter(positions.groupby(SERIES, sort=False)))
    whole = _pooled(measured(rows)[measured(rows)["place"] == "logits"], SERIES).set_index(SERIES)
    table = []
    for series, texts in samples.groupby(SERIES, sort=False):
        differing = texts[texts["error"] != texts["error_full"]]
        # In fp64 a path can be the reference's own, and a ratio to no error at all says nothing.
        usable = texts[(texts["error"] > 0) & (texts["error_full"] > 0)]
        table.append(
            dict(zip(SERIES, series, strict=True))
            | {
                "n": len(texts),
                "error_full": whole.loc[series, "error_full"],
                "error": whole.loc[series, "error"],
                "ratio": fits.log_mean_resampled(usable, "ratio") if len(usable) else None,
                "closer": _share_closer(differing),
                "ties": len(texts) - len(differing),
                "closer_rows": fits.mean_resampled(of_positions[series], "closer") if series in of_positions else None,
                "correlation": fits.mean_resampled(usable, "correlation") if len(usable) else None,
                "apart": fits.mean_resampled(usable, "apart") if len(usable) else None,
            }
        )
    return pd.DataFrame(table)


def _share_closer(differing: pd.DataFrame) -> fits.Estimate | None:
    if differing.empty:
        return None
    return fits.share_over(differing, differing["error"] < differing["error_full"])[0]


def layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Pool errors over texts, hidden state by hidden state; the logits are one layer further."""
    return _pooled(rows[rows["place"] != "vocabulary"], [*SERIES, "place", "layer"])


def position_table(rows: pd.DataFrame, groups: int = 6) -> pd.DataFrame:
    """Follow the logits' error along the text, in groups of neighbouring positions."""
    logits = measured(rows)[measured(rows)["place"] == "logits"]
    logits = logits[logits["path"] != path_errors.OFF_BY_ONE]
    edges = np.linspace(logits["position"].min(), logits["position"].max() + 1, groups + 1)
    group = np.digitize(logits["position"], edges[1:-1])
    return _pooled(logits.assign(position=(edges[:-1] + edges[1:] - 1)[group] / 2), [*SERIES, "position"])


def slope_of_ratio(rows: pd.DataFrame) -> pd.DataFrame:
    """Ask whether the cached path falls behind along a text: how the ratio of errors goes with the position."""
    logits = rows[(rows["place"] == "logits") & (rows["path"] == path_errors.CACHED)]
    logits = logits[(logits["error"] > 0) & (logits["error_full"] > 0)]
    table = []
    for (model, dtype), series in logits.groupby(["model", "dtype"], sort=False):
        fitted = []
        for (sample, source), text in series.groupby(["sample", "source"]):
            place = text["position"] - text["position"].mean()
            logs = np.log(text["error"] / text["error_full"])
            steep = (place @ logs) / (place @ place) * (text["position"].max() - text["position"].min())
            fitted.append({"sample": sample, "source": source, "change": np.exp(steep)})
        table.append(
            {"model": model, "dtype": dtype, "change": fits.log_mean_resampled(pd.DataFrame(fitted), "change")}
        )
    return pd.DataFrame(table)


def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Score both paths on the text itself and against the reference's distribution."""
    logits = measured(rows)[measured(rows)["place"] == "logits"]
    logits = logits.assign(
        difference=logits["nats"] - logits["nats_full"], sharper=logits["entropy"] - logits["entropy_full"]
    )
    table = []
    for series, part in logits.groupby(SERIES, sort=False):
        texts = part.groupby(["sample", "source"])[["kl", "kl_full"]].mean().reset_index()
        texts = texts[(texts[["kl", "kl_full"]] > 0).all(axis=1)]
        table.append(
            dict(zip(SERIES, series, strict=True))
            | {
                "nats_reference": part["nats_reference"].mean(),
                "nats_full": part["nats_full"].mean(),
                "nats": part["nats"].mean(),
                "difference": fits.mean_resampled(part, "difference"),
                "difference_rms": _root_mean_square(part["difference"]),
                "entropy": fits.mean_resampled(part, "sharper"),
                "entropy_rms": _root_mean_square(part["sharper"]),
                "kl_full": part["kl_full"].mean(),
                "kl": part["kl"].mean(),
                "kl_ratio": fits.log_mean_resampled(texts.assign(ratio=texts["kl"] / texts["kl_full"]), "ratio")
                if len(texts)
                else None,
                "top1_full": int(part["top1_full"].sum()),
                "top1": int(part["top1"].sum()),
                "rows": len(part),
            }
        )
    return pd.DataFrame(table)


def scaled(estimate: fits.Estimate, by: float) -> fits.Estimate:
    """Divide an estimate by a positive number; 0 / 0 is no shift at all."""
    return fits.Estimate(
        *(end / by if by else 0.0 for end in (estimate.value, estimate.low, estimate.high)), estimate.kind
    )


def shift_table(rows: pd.DataFrame, quality: pd.DataFrame) -> pd.DataFrame:
    """Ask whether a path's difference from the uncached one has a direction, or scatters about zero."""
    quality = quality.set_index(SERIES)
    vocabulary = rows[rows["place"] == "vocabulary"]
    followed = dict(iter(vocabulary.groupby(SERIES, sort=False)))
    table = []
    for series, row in quality.iterrows():
        likelihood = scaled(row["difference"], row["difference_rms"])
        table.append(
            dict(zip(SERIES, series, strict=True))
            | {
                "likelihood": fits.Estimate(-likelihood.value, -likelihood.high, -likelihood.low, likelihood.kind),
                "entropy": scaled(row["entropy"], row["entropy_rms"]),
                "common": _common(followed[series]),
            }
        )
    return pd.DataFrame(table)


def _common(vocabulary: pd.DataFrame) -> fits.Estimate | None:
    # A file's samples are averaged first: they are not independent of each other.
    means = vocabulary.pivot_table(index="source", columns="token", values="shift")
    squares = (vocabulary.assign(square=vocabulary["shift_rms"] ** 2)).groupby("source")["square"].mean()
    if len(means) < fits.FEWEST_UNITS or not (squares > 0).all():
        return None
    return fits.common_share(means.to_numpy(), squares.loc[means.index].to_numpy())


def reference_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Show what the reference is worth beside the smallest error that is measured with it."""
    logits = rows[rows["place"] == "logits"]
    finest = min(measured(rows)["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)
    table = []
    for model, own in logits.groupby("model", sort=False):
        smallest = own[(own["path"] == path_errors.CACHED) & (own["dtype"] == finest)]
        shown = [
            (path_errors.CHECK, "float64", own.loc[own["path"] == path_errors.CHECK]),
            (path_errors.AS_LOADED, "float64", own.loc[own["path"] == path_errors.AS_LOADED]),
            (path_errors.CACHED, finest, smallest),
            ("no cache", finest, smallest.assign(error=smallest["error_full"])),
        ]
        table += [
            {
                "model": model, "compared with the reference": name, "dtype": DTYPES[dtype],
                "logits": _root_mean_square(part["error"]), "samples": part["sample"].nunique(),
            }
            for name, dtype, part in shown
        ]  # fmt: skip
    return pd.DataFrame(table)


def _written(estimate: fits.Estimate | None, form: str) -> str:
    return "no error to compare" if estimate is None else estimate.text(form)


def _factor(estimate: fits.Estimate | None) -> str:
    """Write a factor in three digits, and a large one without an exponent."""
    return _written(estimate, "{:,.0f}" if estimate and estimate.value >= 1000 else "{:.3g}")


def errors_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `series_table` out for reading."""
    return pd.DataFrame(
        {
            "model": table["model"],
            "dtype": table["dtype"].map(DTYPES),
            "path": table["path"],
            "error": table["error"].map(power_of_ten),
            "error / no cache's": table["ratio"].map(_factor),
            "texts in which it is closer": table["closer"].map(lambda e: _written(e, "{:.2f}")),
            "correlation": table["correlation"].map(lambda e: _written(e, "{:.2f}")),
            "drift / error": table["apart"].map(lambda e: _written(e, "{:.2f}")),
        }
    )


def quality_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `quality_table` of the cached path out for reading."""
    table = table[table["path"] == path_errors.CACHED]
    return pd.DataFrame(
        {
            "model": table["model"],
            "dtype": table["dtype"].map(DTYPES),
            "nats per token, no cache": table["nats_full"].map("{:.4f}".format),
            "cached minus no cache": table["difference"].map(_signed),
            "KL to fp64: no cache, cached": table["kl_full"].map(power_of_ten) + ", " + table["kl"].map(power_of_ten),
            "top-1 token as in fp64: no cache, cached": [
                f"{row.top1_full:,}, {row.top1:,} of {row.rows:,}" for row in table.itertuples()
            ],
        }
    )


def _signed(estimate: fits.Estimate) -> str:
    """Write an estimate of any size with one power of ten for all three numbers."""
    if not (largest := max(abs(estimate.low), abs(estimate.high))):
        return "0"
    power = int(np.floor(np.log10(largest)))
    numbers = scaled(estimate, 10.0**power).text("{:+.1f}")
    return f"{numbers} × {power_of_ten(10.0**power).rpartition(' ')[2]}" if power else numbers
