"""Tables behind the chapter on whether the difference matters: llama.cpp's statistics, flips by margin, partings, positions.

Intervals are bootstraps over files (see `kvbook.measuring.estimates`), since tokens of one text resemble each other.
"""

import itertools

import numpy as np
import pandas as pd
import yaml

from kvbook import paths
from kvbook.measuring import agreement, estimates, survival
from kvreport.chapters.does_it_matter import first_divergence, variants

# Draws for what has to be sorted anew in each.
_DRAWS = 200
# Share of the smallest margins below which their density is taken as even, so that margins smaller than any that was met
# have their chance too.
_EVEN = 0.05
# Comparisons in a bin of margins below which its share says next to nothing and is not drawn.
FEWEST = 40
# The changes that only round otherwise.
ROUNDING = [name for name, way in variants.BY_NAME.items() if way.kind == "rounding"]
# Bins of the margin, in ulps: four to a power of ten.
_BINS_A_DECADE = 4


def elsewhere() -> pd.DataFrame:
    """Read what others published, from the smallest divergence on: ``data/elsewhere.yaml``."""
    read = yaml.safe_load((paths.DATA / "elsewhere.yaml").read_text("utf-8"))
    entries = [{"whose": whose, **entry} for whose, entries in read.items() for entry in entries]
    return pd.DataFrame(entries).sort_values("mean_kl_nats")


def with_changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Add to rows of ``teacher_forced`` the change in the true token's probability, and shares as what is the same."""
    # exp(nll + x) would lose what is small; the product keeps it.
    delta_p = np.exp(-rows["nll"]) * np.expm1(rows["dlogp"])
    return rows.assign(
        delta_p=delta_p,
        delta_p_squared=delta_p**2,
        same_top=1 - rows["flip"],
        same_decision=1 - rows["decision_flip"],
    )


def _means(rows: pd.DataFrame, value: str, change=lambda mean: mean) -> dict[str, estimates.Estimate]:
    """Give a function of the mean by way, with its bootstrap interval over files."""
    resampled = estimates.resample(rows, value, by="way")
    return {
        way: estimates.percentiles(change(resampled.mean[place]), change(resampled.draws[:, place]), resampled.kind)
        for place, way in enumerate(resampled.layers)
    }


def _shares(rows: pd.DataFrame, value: str) -> dict[str, estimates.Estimate]:
    """Give shares of tokens by way, with an interval over files."""
    return {way: estimates.share_of_rows(part, part[value] > 0)[0] for way, part in rows.groupby("way")}


def by_file(rows: pd.DataFrame, columns: list[str]) -> list[np.ndarray]:
    """Split rows into arrays, one a file."""
    return [part[columns].to_numpy() for _, part in rows.groupby("source", sort=True)]


def resampled(files: list[np.ndarray], statistic, seed: int = 0) -> estimates.Estimate:
    """Give a statistic of all rows with its bootstrap interval over files, or of few files with its range over them."""
    if len(files) < estimates.FEWEST_UNITS:
        whole = statistic(np.concatenate(files))
        return estimates.percentiles(whole, np.array([statistic(file) for file in files]), "range")
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(files), (_DRAWS, len(files)))
    draws = [statistic(np.concatenate([files[place] for place in pick])) for pick in picks]
    return estimates.percentiles(statistic(np.concatenate(files)), np.array(draws))


def expected_flips(margins: np.ndarray, shifts: np.ndarray) -> float:
    """Predict the share of flips from how large margins are and how much they are shifted.

    The second choice overtakes the first where the margin is smaller than the loss that the shift brings.  Margins and shifts
    are taken as independent, so a single number of the one is held against the whole distribution of the other; and below
    the smallest twentieth of the margins their density is taken as even.  Both make an estimate possible where no flip was
    seen at all, and it is no better than they are.  In 16 bits many margins are exactly 0; those are spread as far as the
    smallest one that is not, for no shift loses nothing.
    """
    places, counts = np.unique(margins, return_counts=True)
    shares = np.cumsum(counts) / len(margins)
    known = (places > 0) & (shares >= _EVEN)
    # The distribution function of margins, even from 0 to the edge.
    places, shares = (np.concatenate([[0.0], values[known]]) for values in (places, shares))
    return float(np.interp(np.maximum(-shifts, 0.0), places, shares).mean())


def axes_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Work out every statistic of every way."""
    table = []
    for dtype, of_dtype in with_changes(rows).groupby("dtype", sort=False):
        of_dtype = of_dtype.assign(nll_way=of_dtype["nll"] - of_dtype["dlogp"])
        columns = {
            "perplexity": _means(of_dtype, "nll", np.exp),
            "perplexity_way": _means(of_dtype, "nll_way", np.exp),
            "perplexity_ratio": _means(of_dtype, "dlogp", lambda mean: np.exp(-mean)),
            "kl": _means(of_dtype, "kl"),
            "mean_delta_p": _means(of_dtype, "delta_p"),
            "rms_delta_p": _means(of_dtype, "delta_p_squared", np.sqrt),
            "same_top": _shares(of_dtype, "same_top"),
            "same_decision": _shares(of_dtype, "same_decision"),
        }
        for way, part in of_dtype.groupby("way", sort=False):
            files = by_file(part, ["kl", "margin", "shift"])
            table.append(
                {
                    "dtype": dtype,
                    "way": way,
                    "kind": variants.BY_NAME[way].kind,
                    "tokens": len(part),
                    "files": len(files),
                    **{name: by_way[way] for name, by_way in columns.items()},
                    "kl_99": resampled(files, lambda kept: np.quantile(kept[:, 0], 0.99)),
                    "expected_flips": resampled(files, lambda kept: expected_flips(kept[:, 1], kept[:, 2])),
                    **{f"kl_{q}": part["kl"].quantile(q / 100) for q in (50, 95)},
                    "kl_max": part["kl"].max(),
                    **{f"delta_p_{q}": part["delta_p"].quantile(q / 100) for q in (1, 50, 99)},
                    "bits_equal_share": (part["kl"] == 0).mean(),
                }
            )
    return pd.DataFrame(table)


def margins_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Count flips by the margin in ulps, over all ways that round otherwise and do nothing else."""
    table = []
    for dtype, part in rows[rows["way"].isin(ROUNDING)].groupby("dtype", sort=False):
        margins, loss = part["margin"] / part["ulp"], -part["shift"] / part["ulp"]
        top = int(np.ceil(_BINS_A_DECADE * np.log10(max(margins.max(), 2.0))))
        edges = np.concatenate([[0.0], 10.0 ** (np.arange(0, top + 1) / _BINS_A_DECADE)])
        for low, high in itertools.pairwise(edges):
            inside = part[(margins >= low) & (margins < high)]
            middle = np.array([np.sqrt(low * high) if low else high / 2])
            table.append(
                {
                    "dtype": dtype,
                    "low": low,
                    "high": high,
                    "tokens": len(inside),
                    "share_of_margins": len(inside) / len(part),
                    "flips": int(inside["flip"].sum()),
                    "seen": estimates.share_of_rows(inside, inside["flip"] > 0)[0] if len(inside) else None,
                    "predicted": _overtaken(margins[inside.index].to_numpy() if len(inside) else middle, loss),
                }
            )
    return pd.DataFrame(table)


def _overtaken(margins: np.ndarray, losses: pd.Series) -> float:
    """Give the mean probability that a loss is larger than a margin.

    A loss that just takes a margin away leaves a tie, which the lower id wins: a half.  Where there was no margin it was a
    tie before, and stays as it was.
    """
    ordered = np.sort(losses)
    at_least, more = (1 - np.searchsorted(ordered, margins, side=side) / len(ordered) for side in ("left", "right"))
    return float(np.where(margins > 0, (at_least + more) / 2, more).mean())


def partings(rows: pd.DataFrame) -> dict[tuple[str, str, str], survival.Survival]:
    """Estimate by dtype, choice and way how long a way stays with the baseline."""
    ways = pd.concat([rows[rows["way"] != first_divergence.BASELINE], between_dtypes(rows)], ignore_index=True)
    # A text that ended early and never diverged is equal to the end.
    steps = ways["steps"].where(ways["parted"] == 1, rows["steps"].max())
    curves = {
        key: survival.kaplan_meier(part["steps"].to_numpy(), part["parted"].to_numpy() == 1)
        for key, part in ways.assign(steps=steps).groupby(["dtype", "choice", "way"], sort=False)
    }
    dtypes = list(dict.fromkeys(rows["dtype"]))
    order = sorted(curves, key=lambda key: (dtypes.index(key[0]), key[1], first_divergence.WAYS.index(key[2])))
    return {key: curves[key] for key in order}


def between_dtypes(rows: pd.DataFrame) -> pd.DataFrame:
    """Hold the uncached texts of each dtype against those of the other one, in rows of a further way."""
    table = []
    written = rows[rows["way"] == first_divergence.BASELINE]
    for (choice, sample), texts in written.groupby(["choice", "sample"], sort=False):
        paths = {dtype: str(path).split() for dtype, path in zip(texts["dtype"], texts["path"], strict=True)}
        for dtype, path in paths.items():
            other = paths.get("bfloat16" if dtype == "float32" else "float32", path)
            first = agreement.first_divergence(path, other)
            if other is not path:
                table.append(
                    {
                        "dtype": dtype, "choice": choice, "way": variants.OTHER_DTYPE.name, "sample": sample,
                        "steps": len(path) if first is None else first + 1, "parted": int(first is not None),
                    }
                )  # fmt: skip
    return pd.DataFrame(table, columns=["dtype", "choice", "way", "sample", "steps", "parted"])


def ties(rows: pd.DataFrame) -> pd.DataFrame:
    """List greedy texts that diverged: ``tied`` where the two candidates have equal logits in the way or the baseline."""
    diverged = rows[(rows["choice"] == first_divergence.GREEDY) & (rows["parted"] == 1)]
    return diverged.assign(tied=(diverged[["tied", "tied_baseline"]] == 1).any(axis=1))


def counted(holds: pd.Series) -> str:
    """Write of how many something holds."""
    return f"{int(holds.sum())} of {len(holds)}"


def partings_table(
    curves: dict[tuple[str, str, str], survival.Survival], rows: pd.DataFrame, axes: pd.DataFrame, steps: int
) -> pd.DataFrame:
    """Lay seen and expected partings side by side, with how many greedy ones are at an exact tie."""
    tied = dict(iter(ties(rows).groupby(["dtype", "way"])["tied"]))
    known = {(row.dtype, row.way): row for row in axes.itertuples()}
    table = []
    for dtype, way in dict.fromkeys((dtype, way) for dtype, _, way in curves):
        row = {"dtype": dtype, "way": way, "ties": counted(tied.get((dtype, way), pd.Series(dtype=bool)))}
        for choice in dict.fromkeys(choice for _, choice, _ in curves):
            if (curve := curves.get((dtype, choice, way))) is None:
                continue
            value, low, high = curve.at(steps)
            # Each pair goes on from a prompt of its own.
            few = curve.pairs < estimates.FEWEST_UNITS
            row[choice] = estimates.Estimate(value, *((np.nan, np.nan, "range") if few else (low, high)))
        # On fixed texts assisted decoding is its verification, which reads as many tokens at once.
        fixed = variants.CHUNKS.name if way == first_divergence.ASSISTED else way
        if on_fixed := known.get((dtype, fixed)):
            same = on_fixed.same_top
            row["flip_share"] = estimates.Estimate(1 - same.value, 1 - same.high, 1 - same.low, same.kind)
            row["expected_flips"] = on_fixed.expected_flips
        table.append(row)
    return pd.DataFrame(table)


def growth(rows: pd.DataFrame) -> pd.DataFrame:
    """Compare the last quarter of the positions with the first."""
    table = [
        {"dtype": dtype, "way": way, "ratio": ratio}
        for (dtype, way), part in rows.groupby(["dtype", "way"], sort=False)
        if (ratio := _over_the_first_quarter(part, part[part["bin"] > 3 * part["bin"].max() / 4])) is not None
    ]
    return pd.DataFrame(table, columns=["dtype", "way", "ratio"])


def _over_the_first_quarter(rows: pd.DataFrame, some: pd.DataFrame) -> estimates.Estimate | None:
    """Take the mean divergence of some bins over that of the first quarter's; None where that is 0."""
    first = rows[rows["bin"] <= rows["bin"].max() / 4]
    if first["kl"].min() <= 0:
        return None
    both = pd.concat([first.assign(variant="first"), some.assign(variant="some")])
    return estimates.paired_ratio(both, "kl", "some", "first")


def positions_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the divergence over texts, by way and bin of positions, and over that of the first quarter."""
    table = []
    for (dtype, way), part in rows.groupby(["dtype", "way"], sort=False):
        for place, of_bin in part.groupby("bin", sort=False):
            about = of_bin.iloc[0]
            table.append(
                {
                    "dtype": dtype,
                    "way": way,
                    "bin": place,
                    "read_from": about["read_from"],
                    "read_to": about["read_to"],
                    "flips": of_bin["flips"].sum(),
                    "n_tokens": of_bin["n_tokens"].sum(),
                    "kl": estimates.mean_resampled(of_bin, "kl"),
                    "over_first": _over_the_first_quarter(part, of_bin),
                }
            )
    found = pd.DataFrame(table)
    return found.assign(middle=(found["read_from"] + found["read_to"]) / 2)


def snowball(rows: pd.DataFrame) -> pd.DataFrame:
    """Average over pairs, by step from the place where they diverge."""
    grouped = rows.groupby(["dtype", "offset"], sort=False)
    table = grouped.agg(pairs=("sample", "nunique"), token_equal=("token_equal", "mean"))
    for column in ("kl_forced", "kl_free"):
        table[column] = [estimates.mean_resampled(part, column) for _, part in grouped]
    return table.reset_index()


def curves_table(curves: dict[tuple[str, str, str], survival.Survival]) -> pd.DataFrame:
    """Write curves as rows: ``dtype``, ``choice``, ``way``, ``step``, ``share``, ``low``, ``high``."""
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "dtype": dtype,
                    "choice": choice,
                    "way": way,
                    "step": curve.steps,
                    "share": curve.share,
                    "low": curve.low,
                    "high": curve.high,
                }
            )
            for (dtype, choice, way), curve in curves.items()
        ],
        ignore_index=True,
    )
