"""Tables of the chapter on whether the difference matters: llama.cpp's statistics, divergences of texts, positions.

Intervals are bootstraps over files (see `kvbook.measuring.estimates`), since tokens of one text resemble each other.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvbook.models.corpus import POPULATIONS, STDLIB
from kvbook.runs.evidence import texts_of
from kvreport.chapters.does_it_matter import measures, rows
from kvreport.publishing.found import Found
from kvreport.publishing.measures import Measure, joined
from kvreport.publishing.wording import DTYPES, change, power_of_ten, processor, scaled, spread

_CHANGE = ["dtype", "way"]


def axes(found: Found) -> pd.DataFrame:
    """Work out every statistic of every way."""
    columns = {
        "perplexity": measures.PERPLEXITY_BEFORE, "perplexity_way": measures.PERPLEXITY_AFTER,
        "perplexity_ratio": measures.PERPLEXITY, "kl": measures.DIVERGENCE, "mean_delta_p": measures.DELTA_P,
        "rms_delta_p": measures.RMS_DELTA_P, "same_top": measures.SAME_TOP, "same_decision": measures.SAME_DECISION,
        "kl_99": measures.TAIL, "expected_flips": measures.EXPECTED_FLIPS,
    }
    grouped = found["changes"].groupby(_CHANGE, sort=False)
    counts = grouped.agg(tokens=("kl", "size"), files=("source", "nunique"))
    counts.insert(0, "kind", [rows.KINDS[way] for _, way in counts.index])
    tails = {f"kl_{q}": grouped["kl"].quantile(q / 100) for q in (50, 95)} | {"kl_max": grouped["kl"].max()}
    tails |= {f"delta_p_{q}": grouped["delta_p"].quantile(q / 100) for q in (1, 50, 99)}
    tails |= {"bits_equal_share": grouped["bits_equal"].mean()}
    return pd.concat([counts, joined(columns, found).set_index(_CHANGE), pd.DataFrame(tails)], axis=1).reset_index()


def by_texts(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Lay out what the cache does to predictions on each population of texts and each processor."""
    columns = {
        "divergence over that of fp32": (measures.OVER_THE_DTYPE, "{:.2f}"),
        "perplexity over the uncached": (measures.PERPLEXITY_OF_CACHE, "{:.3f}"),
        "probability changes by over a tenth": (measures.OUTSIDE, "{:.1%}"),
        "top-1 token kept": (measures.SAME_TOP.where(way=rows.CACHED), "{:.1%}"),
    }
    table = []
    for name, found in everywhere.items():
        cells = {title: measure.where(dtype="bfloat16")(found) for title, (measure, _) in columns.items()}
        if all(cells.values()):
            texts = texts_of(name)
            about = {"texts": texts or POPULATIONS[STDLIB], "processor": processor(name.removesuffix(f", {texts}"))}
            said = {title: one.estimate.text(columns[title][1]) for title, (one,) in cells.items()}
            table.append(about | {"files": next(iter(cells.values()))[0].units} | said)
    return pd.DataFrame(table)


def quantized(found: Found) -> pd.DataFrame:
    """Lay out what caches of few bits do to predictions: a row a cache, four columns a dtype, all cells text.

    Those that take more bits stand first, so caches of equal bytes are neighbours.
    """
    table = joined(measures.IN_FEW_BITS, found)
    fewest = table["bits"].map(lambda bits: bits.value).groupby(table["way"]).transform("min")
    return _by_dtype(table.loc[fewest.sort_values(ascending=False, kind="stable").index], {
        "bits": lambda row: f"{row.bits.value:.4g}", "divergence": lambda row: spread(row.divergence),
        "moved (%)": lambda row: _whole_percent(row.outside),
        "perplexity": lambda row: row.perplexity.text("{:#.3g}" if row.perplexity.value < 100 else "{:,.0f}"),
    }).rename(columns={"change": "cache"})


def flips(found: Found) -> pd.DataFrame:
    """Lay divergences of texts, seen and expected, side by side for a reader; all cells text."""
    together = _by_key(measures.EQUAL_AT_THE_END, found)
    flipped, expected = (_by_key(measure, found) for measure in (measures.FLIPPED, measures.EXPECTED_FLIPS))
    tied = dict(iter(found["divergences"].groupby(_CHANGE)["tied"]))
    table = []
    for dtype, way in dict.fromkeys((dtype, way) for dtype, _, way in together):
        fixed = dtype, way
        ties = tied.get(fixed, pd.Series(dtype=bool))
        # Not every way and dtype reads the fixed texts.
        table.append({
            "change": way, "dtype": DTYPES[dtype], "flips (%)": _cell(flipped, fixed, _percent),
            "flips, expected (%)": _cell(expected, fixed, _small_percent),
            **{f"equal, {of} (%)": _cell(together, (dtype, of, way), _whole_percent) for of in rows.CHOICES},
            "at a tie": f"{int(ties.sum())} of {len(ties)}" if len(ties) else "",
        })
    return pd.DataFrame(table)


def _by_key(measure: Measure, found: Found) -> dict[tuple, Estimate]:
    return measure.table(found).set_index(list(measure.by))["estimate"].to_dict()


def _cell(known: Mapping[tuple, Estimate], key: tuple, write: Callable[[Estimate], str]) -> str:
    return write(known[key]) if key in known else ""


def moved(found: Found) -> pd.DataFrame:
    """Estimate what each change does to texts, alone or beside other changes, and how often it does so at a tie."""
    keys = list(measures.MOVED.by)
    ties = found["texts that a change moves"].groupby(keys)[["tied", "near"]].sum()
    table = measures.MOVED_BESIDE.table(found).join(ties, on=keys).fillna({"tied": 0, "near": 0})
    return table.assign(label=table["change"] + table["beside"].map(lambda other: f", beside {other}" if other else ""))


def moved_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay out for a reader the share of texts that each change moves, by dtype and choice; all cells text."""
    shown = pd.DataFrame({"change": list(dict.fromkeys(table["label"]))})
    for (choice, dtype), of in table.groupby(["choice", "dtype"], sort=False):
        said = {row.label: _whole_percent(row.estimate) for row in of.itertuples()}
        shown[f"{choice}, {DTYPES[dtype]} (%)"] = shown["change"].map(said).fillna("")
    greedy = table[(table["choice"] == rows.GREEDY) & (table["dtype"] == "bfloat16")].set_index("label")
    return shown.assign(**{"at a tie, bf16": shown["change"].map(greedy["tied"].map("{:.0f}".format)).fillna("")})


def cells(found: Found) -> pd.DataFrame:
    """Count the cells of the factorial: those that make no sense, by the reason, those that were run, and the rest."""
    run, sensible = rows.counts(found["usage_factorial"])
    n_dtypes, first = found["usage_factorial"]["dtype"].nunique(), Counter(map(rows.why_not, rows.cells()))
    table = [(f"makes no sense: {why}", n_dtypes * first[why]) for why in rows.NO_SENSE]
    table += [("was run", run), ("makes sense, and was not run", sensible - run)]
    return pd.DataFrame(table, columns=["what became of it", "combinations"])


def along(found: Found) -> pd.DataFrame:
    """Average the divergence over texts, by way and bin of positions, and over that of the first quarter."""
    grouped = found["drift_by_position"].groupby(list(measures.ALONG.by), sort=False)
    table = grouped[["read_from", "read_to"]].first().join(grouped[["flips", "n_tokens"]].sum())
    for name, measure in (("kl", measures.ALONG), ("over_first", measures.OVER_THE_FIRST_QUARTER)):
        known = _by_key(measure, found)
        table[name] = [known.get(key) for key in table.index]
    return table.assign(middle=(table["read_from"] + table["read_to"]) / 2).reset_index()


def by_position(found: Found) -> pd.DataFrame:
    """Follow divergence, drift and errors along long texts: each over that at the same texts' first positions."""
    grouped = found["by position"].groupby(list(measures.BY_POSITION.by), sort=False)
    table = grouped.agg(
        texts=("sample", "nunique"), read_from=("read_from", "min"), read_to=("read_to", "max"), flips=("flips", "sum"),
        n_tokens=("n_tokens", "sum"),
    )
    columns = {
        "kl": measures.BY_POSITION, "ratio": measures.CACHED_OVER_UNCACHED, "kl_growth": measures.DIVERGENCE_GROWTH,
        "drift_growth": measures.DRIFT_GROWTH, "error_growth": measures.ERROR_GROWTH,
        "uncached_error_growth": measures.UNCACHED_ERROR_GROWTH,
    }
    for name, measure in columns.items():
        known = _by_key(measure, found)
        # What grows does so from the first positions; of passes that never differ nothing is known.
        known = {(dtype, 0): Estimate(1, 1, 1, "range") for dtype, _ in known} | known
        table[name] = [known.get(key) for key in table.index]
    return table.assign(middle=np.sqrt(table["read_from"] * table["read_to"])).reset_index()


def snowball(found: Found) -> pd.DataFrame | None:
    """Average over pairs, by step from the place where they diverge; None where no text diverged."""
    if (pairs := found["after_divergence"]) is None:
        return None
    keys = list(measures.AROUND_FREE.by)
    counts = pairs.groupby(keys, sort=False).agg(pairs=("sample", "nunique"), token_equal=("token_equal", "mean"))
    both = joined({"kl_forced": measures.AROUND_FORCED, "kl_free": measures.AROUND_FREE}, found)
    return pd.concat([counts, both.set_index(keys)], axis=1).reset_index()


def axes_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay the middle of the distributions out for a reader: a row a change, three columns a dtype, all cells text."""
    return _by_dtype(table, {
        "divergence": lambda row: spread(row.kl), "same top-1 (%)": lambda row: _percent(row.same_top),
        "perplexity (%)": lambda row: change(row.perplexity_ratio),
    })


def tails_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay the tails and the other decisions out for a reader: a row a change, three columns a dtype, all cells text."""
    return _by_dtype(table, {
        "99 % below": lambda row: spread(row.kl_99),
        "true token (points)": lambda row: _small(100 * row.rms_delta_p.value),
        "same decision (%)": lambda row: _percent(row.same_decision),
    })


def _by_dtype(table: pd.DataFrame, cells: Mapping[str, Callable]) -> pd.DataFrame:
    shown = pd.DataFrame({"change": list(dict.fromkeys(table["way"]))})
    for name, write in cells.items():
        for dtype, of in table.groupby("dtype", sort=False):
            shown[f"{name}, {DTYPES[dtype]}"] = shown["change"].map({row.way: write(row) for row in of.itertuples()})
    return shown


def _percent(share: Estimate) -> str:
    """Write a share in per cent with its interval, for a column whose header says so."""
    return scaled(share, 100).text("{:.1f}")


def _small_percent(share: Estimate) -> str:
    """Write a share as `_percent` does, or one below its last digit as `spread` does."""
    return _percent(share) if share.value >= 1e-3 else spread(scaled(share, 100))


def _whole_percent(share: Estimate) -> str:
    """Write a share in whole per cent; of few pairs it has no interval."""
    value, low, high = (f"{100 * end:.0f}" for end in (share.value, share.low, share.high))
    return value if np.isnan(share.low) else f"{value} [{low}, {high}]"


def _small(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else power_of_ten(value, 0)
