"""Tables behind the chapter on where drift begins."""

from collections.abc import Iterable

import pandas as pd

from kvbook.measuring import agreement, estimates, replay
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import cache_factorial, operation_replay
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES

# What becomes of an operation, from the least to the most.
EQUAL = "bits equal"
HANDED = "only handed on"
OWN_PREFILL = "by itself: one row fewer behind"
OWN_ROW = "by itself: one row alone"
OWN_BOTH = "by itself: both"
STATES = (EQUAL, HANDED, OWN_PREFILL, OWN_ROW, OWN_BOTH)
ONE_ROW = operation_replay.last(1)
# A list of more lengths than these says less than their number.
_MOST_LENGTHS = 12


def _own(rows: pd.DataFrame) -> pd.Series:
    """Tell where an operation differs although it was handed equal inputs."""
    return (rows["differing_calls"] > 0) & (rows["inputs_equal"] == 1)


def operation_states(replayed: pd.DataFrame) -> pd.DataFrame:
    """Say of every operation of every layer what becomes of its bits, over all samples."""
    keys = ["model", "attention", "dtype", "operation", "kind", "layer"]
    depth = replayed.groupby("model")["layer"].transform("max") + 1
    inner = replayed["order"].where(replayed["layer"].notna()).groupby(replayed["model"]).transform("min")
    outside = depth.where(replayed["order"] > inner, -1)
    rows = replayed.assign(
        layer=replayed["layer"].fillna(outside).astype(int),
        own=_own(replayed),
        differs=replayed["differing_calls"] > 0,
    )

    def state(group: pd.DataFrame) -> str:
        row = bool(group.loc[group["pass"] == ONE_ROW, "own"].any())
        prefill = bool(group.loc[group["pass"] == operation_replay.PREFILL, "own"].any())
        if row or prefill:
            return OWN_BOTH if row and prefill else OWN_ROW if row else OWN_PREFILL
        return HANDED if group.loc[group["pass"] == operation_replay.REAL, "differs"].any() else EQUAL

    groups = rows.groupby(keys, sort=False)
    table = pd.DataFrame({"order": groups["order"].min(), "state": groups.apply(state, include_groups=False)})
    return table.reset_index()


def kind_shares(replayed: pd.DataFrame) -> pd.DataFrame:
    """Count the calls that differ by themselves, by kind of operation."""
    rows = replayed[replayed["pass"] != operation_replay.REAL]
    rows = rows.assign(differing=rows["differing_calls"].where(_own(rows), 0))
    groups = rows.groupby(["model", "attention", "dtype", "pass", "kind"], sort=False)
    table = groups[["calls", "differing"]].sum().reset_index()
    return table.assign(share=table["differing"] / table["calls"])


def first_differences(replayed: pd.DataFrame) -> pd.DataFrame:
    """Find the first operation of the real decode step whose result differs, in the order of execution."""
    table = []
    for keys, rows in replayed.groupby(["model", "attention", "dtype"], sort=False):
        real = rows[(rows["pass"] == operation_replay.REAL) & rows["first_differing"].notna()]
        first = real.sort_values("first_differing").groupby("sample").first()
        names = [_place(row.layer, row.operation) for row in first.itertuples()]
        causes = ["its own arithmetic" if row.inputs_equal else "the cache it reads" for row in first.itertuples()]
        table.append(
            {
                **dict(zip(("model", "attention", "dtype"), keys, strict=True)),
                "samples": rows["sample"].nunique(),
                "differing": len(first),
                "first": ", ".join(dict.fromkeys(names)) or "none",
                "cause": ", ".join(dict.fromkeys(causes)) or "none",
            }
        )
    return pd.DataFrame(table)


def by_torch(runs: Iterable[Run]) -> pd.DataFrame:
    """Lay `first_differences` and the share of calls that differ by themselves out, one line a version, attention and dtype."""
    found = []
    for run in runs:
        shares = kind_shares(run.rows)
        for row in first_differences(run.rows).itertuples():
            own = shares[(shares["attention"] == row.attention) & (shares["dtype"] == row.dtype)]
            found.append(
                {
                    "torch": run.about["machine"]["torch"].partition("+")[0],
                    "attention": row.attention,
                    "dtype": DTYPES[row.dtype],
                    "texts that differ": f"{row.differing} of {row.samples}",
                    "first operation": row.first,
                    "because of": row.cause,
                    "calls that differ locally": _by_kind(own),
                }
            )
    return pd.DataFrame(found)


def _by_kind(shares: pd.DataFrame) -> str:
    differing = shares[shares["differing"] > 0]
    return (
        "; ".join(f"{row['kind']}, {row['pass']}: {wording.percent(row['share'])}" for _, row in differing.iterrows())
        or "none"
    )


def _place(layer: float, operation: str) -> str:
    return operation if pd.isna(layer) else f"layer {int(layer)} {operation}"


def inputs_unequal(replayed: pd.DataFrame) -> pd.DataFrame:
    """List the replayed operations that could not be handed equal inputs, so that no verdict is passed on them."""
    rows = replayed[(replayed["pass"] != operation_replay.REAL) & (replayed["inputs_equal"] == 0)]
    return rows[["model", "pass", "operation"]].drop_duplicates().reset_index(drop=True)


ALL_EQUAL, FIRST_EQUAL, NONE_EQUAL = "every row equal", "first row equal, others not", "first row differs"
GEMM_STATES = (ALL_EQUAL, FIRST_EQUAL, NONE_EQUAL)


def gemm_states(mapped: pd.DataFrame) -> pd.DataFrame:
    """Say for every number of rows how the product stands to that of the most rows."""
    state = mapped["first_row_equal"].map({1: FIRST_EQUAL, 0: NONE_EQUAL})
    return mapped.assign(state=state.where(mapped["equal_rows"] < mapped["rows"], ALL_EQUAL))


def runs_of_numbers(numbers: list[int]) -> str:
    """Write numbers as runs: 1–3, 5–7, 12."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


CACHE_DIFFERS, LOGITS_DIFFER = "the prefill's cache differs", "cache equal, logits differ"
SWEEP_STATES = (EQUAL, LOGITS_DIFFER, CACHE_DIFFERS)


def sweep_states(swept: pd.DataFrame) -> pd.DataFrame:
    """Say for every length whether the step gave the full pass's bits, and if not, whether its cache had them."""
    state = swept["cache_equal"].map({1: LOGITS_DIFFER, 0: CACHE_DIFFERS})
    return swept.assign(state=state.where(swept["logits_equal"] == 0, EQUAL))


def form_shares(attention: pd.DataFrame) -> pd.DataFrame:
    """Give the share of rows whose bits equal the causal pass's, by kernel, dtype, form and number of keys."""
    return attention.assign(share=attention["equal_rows"] / attention["compared_rows"])


def equal_shares(attention: pd.DataFrame) -> pd.Series:
    """Give the share of rows whose bits equal the causal pass's, over all numbers of keys, by form, dtype and kernel."""
    sums = attention.groupby(["form", "dtype", "kernel"], sort=False)[["equal_rows", "compared_rows"]].sum()
    return sums["equal_rows"] / sums["compared_rows"]


def factorial_table(factorial: pd.DataFrame) -> pd.DataFrame:
    """Average the drift of every way to score the last token, in units of the dtype's unit roundoff.

    Texts at their length make one group, whatever it is, and the same with one token more another.
    """
    table = []
    for (dtype, _longer), rows in factorial.groupby(["dtype", "longer"], sort=False):
        n_tokens = wording.between(rows["n_tokens"], "{}")
        units = rows.assign(
            way=rows["cache"] + "|" + rows["query"],
            units=rows["relative_rms"] / agreement.UNIT_ROUNDOFF[dtype],
        )
        resampled = estimates.resample(units, "units", by="way")
        low, high = resampled.interval()
        drift = {
            way: estimates.Estimate(float(m), float(a), float(b), resampled.kind)
            for way, m, a, b in zip(resampled.layers, resampled.mean, low, high, strict=True)
        }
        for way, of_way in units.groupby("way", sort=False):
            cache, query = way.split("|")
            table.append(
                {
                    "dtype": dtype,
                    "n_tokens": n_tokens,
                    "cache": cache,
                    "query": query,
                    "drift": drift[way],
                    "equal": int((of_way["differing_share"] == 0).sum()),
                    "samples": len(of_way),
                }
            )
    return pd.DataFrame(table)


BOTH, CACHE, QUERY, NEITHER = "each alone is enough", "the cache alone", "the new token alone", "neither"


def whose_fault(drifts: pd.DataFrame) -> pd.DataFrame:
    """Say which of the two drifts when the other is the full pass's: the cache of a prefill, or the one-row query."""
    found = []
    for (dtype, n_tokens), rows in drifts.groupby(["dtype", "n_tokens"], sort=False):
        by = rows.set_index(["cache", "query"])
        query = by.loc[(cache_factorial.FULL, cache_factorial.ONE_ROW)]
        cache = by.loc[(cache_factorial.PREFILL, cache_factorial.ALL_ROWS)]
        both = by.loc[(cache_factorial.PREFILL, cache_factorial.ONE_ROW)]
        drifts = (query["equal"] < query["samples"], cache["equal"] < cache["samples"])
        found.append(
            {
                "dtype": dtype,
                "n_tokens": n_tokens,
                "query": query["drift"],
                "cache": cache["drift"],
                "both": both["drift"],
                "fault": {(True, True): BOTH, (False, True): CACHE, (True, False): QUERY, (False, False): NEITHER}[
                    drifts
                ],
            }
        )
    return pd.DataFrame(found)


def kinds(table: pd.DataFrame) -> list[str]:
    """List the kinds of operation in a table, in the order of `replay.KINDS`."""
    return [kind for kind in replay.KINDS if kind in set(table["kind"])]


def first_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `first_differences` out for reading."""
    return pd.DataFrame(
        {
            "model": table["model"],
            "attention": table["attention"],
            "dtype": table["dtype"].map(DTYPES),
            "samples that differ": [f"{row.differing} of {row.samples}" for row in table.itertuples()],
            "first operation": table["first"],
            "because of": table["cause"],
        }
    )


def identical_lengths(swept: pd.DataFrame) -> pd.DataFrame:
    """Give the share of lengths at which a cached step has the full pass's bits, and how it scatters over texts."""
    table = []
    for (attention, dtype), rows in swept.groupby(["attention", "dtype"], sort=False):
        of_texts = rows.groupby("sample")[["logits_equal", "cache_equal"]].mean()
        in_all = rows.groupby("n_tokens")["logits_equal"].min()
        table.append(
            {
                "attention": attention,
                "dtype": dtype,
                "texts": len(of_texts),
                "lengths": len(in_all),
                "identical": float(of_texts["logits_equal"].mean()),
                "least": float(of_texts["logits_equal"].min()),
                "most": float(of_texts["logits_equal"].max()),
                "prefill": float(of_texts["cache_equal"].mean()),
                "differing": sorted(in_all.index[in_all == 0]),
            }
        )
    return pd.DataFrame(table)


def lengths_shown(identical: pd.DataFrame) -> pd.DataFrame:
    """Lay `identical_lengths` out."""
    return pd.DataFrame(
        {
            "attention": row.attention,
            "dtype": DTYPES[row.dtype],
            "lengths": row.lengths,
            "texts": row.texts,
            "step identical": wording.percent(row.identical),
            "lowest and highest text": wording.between([row.least, row.most], "{:.0%}")
            if row.texts > 1
            else "one text",
            "prefill identical": wording.percent(row.prefill),
            "lengths that differ in some text": (runs_of_numbers(row.differing) or "none")
            if len(row.differing) <= _MOST_LENGTHS
            else "many",
        }
        for row in identical.itertuples()
    )


def factorial_shown(drifts: pd.DataFrame, faults: pd.DataFrame) -> pd.DataFrame:
    """Lay `factorial_table` and `whose_fault` out: each of the two alone, both, and keys and values from decoding."""
    decoded = drifts[(drifts["cache"] == cache_factorial.DECODE) & (drifts["query"] == cache_factorial.ALL_ROWS)]
    decoded = decoded.set_index(["dtype", "n_tokens"])["drift"]
    return pd.DataFrame(
        {
            "dtype": DTYPES[row.dtype],
            "tokens": row.n_tokens,
            "one row alone": _drift(row.query),
            "prefill's cache alone": _drift(row.cache),
            "both": _drift(row.both),
            "decoded cache alone": _drift(decoded[row.dtype, row.n_tokens]),
            "enough for a difference": row.fault,
        }
        for row in faults.itertuples()
    )


def _drift(estimate: estimates.Estimate) -> str:
    return estimate.text("{:.2f}") if estimate.high else "0"
