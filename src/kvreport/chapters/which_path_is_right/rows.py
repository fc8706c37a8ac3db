"""The rows of the chapter on which path is right by name; to read them takes no torch."""

import numpy as np
import pandas as pd

from kvbook.measuring import UNIT_ROUNDOFF
from kvreport.publishing.wording import DTYPES

# The chapter's experiment and the revision of its rows.
EXPERIMENTS = {"path_errors": 1}
SERIES = ("model", "dtype", "path")
CACHED = "token by token"
EAGER = "no cache, eager attention"
OFF_BY_ONE = "control: a position too early"
# What the reference is worth: its own two paths, and what a model gives that was merely loaded in fp64.
CHECK, AS_LOADED = "reference, token by token", "loaded in fp64, no cache"
# The stock pass, against which the others are held; its error is in their rows.
UNCACHED = "no cache"

# Two independent errors of one size are this many times as far apart as each is from the reference.
INDEPENDENT = 2**0.5
# A shift that explains less of the mean square than this is lost in the scatter.
LEAST_EXPLAINED = 0.1
# Of neighbouring positions.
_GROUPS = 6


def root_mean_square(values: pd.Series) -> float:
    """Size of errors or changes, whatever their sign."""
    return float(np.sqrt(np.square(values).mean()))


def _pooled(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Pool errors over rows: root mean squares, and the correlation of all errors, concatenated."""
    squares = rows[by].assign(
        error_full=rows["error_full"] ** 2, error=rows["error"] ** 2, drift=rows["drift"] ** 2,
        product=rows["correlation"].fillna(0) * rows["error_full"] * rows["error"],
    )
    groups = squares.groupby(by, sort=False)
    found = groups.mean()
    correlation = found.pop("product") / np.sqrt(found["error_full"] * found["error"])
    found = np.sqrt(found).assign(n=groups.size(), correlation=correlation)
    found["ratio"] = found["error"] / found["error_full"]
    # The drift in units of the two errors' mean size: 0 where all is shared, the square root of 2 where nothing is.
    found["apart"] = found["drift"] / np.sqrt((found["error_full"] ** 2 + found["error"] ** 2) / 2)
    return found.reset_index()


def logits(path_errors: pd.DataFrame) -> pd.DataFrame:
    """Keep the logits of the dtypes under test, without the rows that try the reference."""
    of = path_errors[(path_errors["place"] == "logits") & ~path_errors["path"].isin([CHECK, AS_LOADED])]
    difference, sharper = of["nats"] - of["nats_full"], of["entropy"] - of["entropy_full"]
    return of.assign(closer=_closer(of), difference=difference, sharper=sharper)


def _closer(rows: pd.DataFrame) -> pd.Series:
    """Tell where a path is closer than the uncached one; a tie is no one's success."""
    return (rows["error"] < rows["error_full"]).astype(float).where(rows["error"] != rows["error_full"])


def texts(logits: pd.DataFrame) -> pd.DataFrame:
    """Pool the errors of each text's positions, and tell which path is closer."""
    by = [*SERIES, "sample", "source"]
    texts, kl = _pooled(logits, by), logits.groupby(by, sort=False)[["kl", "kl_full"]].mean()
    # In fp64 a path can be the reference's own; without an error there is no correlation, and no distance in its units.
    apart = texts["apart"].where(texts["correlation"].notna())
    return texts.assign(closer=_closer(texts), apart=apart, kl_ratio=(kl["kl"] / kl["kl_full"]).to_numpy())


def layers(path_errors: pd.DataFrame) -> pd.DataFrame:
    """Pool errors over texts, hidden state by hidden state; the logits are one layer further."""
    return _pooled(path_errors[path_errors["place"] != "vocabulary"], [*SERIES, "place", "layer"])


def positions(logits: pd.DataFrame) -> pd.DataFrame:
    """Follow the logits' error along the text, in groups of neighbouring positions."""
    logits = logits[logits["path"] != OFF_BY_ONE]
    edges = np.linspace(logits["position"].min(), logits["position"].max() + 1, _GROUPS + 1)
    group = np.digitize(logits["position"], edges[1:-1])
    return _pooled(logits.assign(position=(edges[:-1] + edges[1:] - 1)[group] / 2), [*SERIES, "position"])


def along_the_text(logits: pd.DataFrame) -> pd.DataFrame:
    """Measure for every text how the ratio of errors goes with the position."""
    usable = logits[(logits["path"] == CACHED) & (logits["error"] > 0) & (logits["error_full"] > 0)]
    by = ["model", "dtype", "sample", "source"]
    texts = usable.groupby(by, sort=False)
    return pd.DataFrame([dict(zip(by, key, strict=True)) | {"change": _change(text)} for key, text in texts])


def _change(text: pd.DataFrame) -> float:
    place = text["position"] - text["position"].mean()
    logs = np.log(text["error"] / text["error_full"])
    return np.exp((place @ logs) / (place @ place) * (text["position"].max() - text["position"].min()))


def reference(path_errors: pd.DataFrame, logits: pd.DataFrame) -> pd.DataFrame:
    """Show what the reference is worth beside the smallest error that is measured with it."""
    finest = min(logits["dtype"].unique(), key=UNIT_ROUNDOFF.__getitem__)
    shown = (
        (CHECK, CHECK, "float64", "error"), (AS_LOADED, AS_LOADED, "float64", "error"),
        (CACHED, CACHED, finest, "error"), (UNCACHED, CACHED, finest, "error_full"),
    )
    table = []
    for model, own in path_errors[path_errors["place"] == "logits"].groupby("model", sort=False):
        for name, path, dtype, error in shown:
            part = own[(own["path"] == path) & (own["dtype"] == dtype)]
            table.append((model, name, DTYPES[dtype], root_mean_square(part[error]), part["sample"].nunique()))
    return pd.DataFrame(table, columns=["model", "compared with the reference", "dtype", "logits", "samples"])
