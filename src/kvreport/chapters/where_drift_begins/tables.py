"""Tables behind the chapter on where drift begins."""

from collections.abc import Iterable

import pandas as pd

from kvbook.measuring import estimates, replay
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import cache_factorial, equal_shapes, operation_replay
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES

ONE_ROW = operation_replay.last(1)
_CASE = ["model", "attention", "dtype"]
# A list of more lengths than these says less than their number.
_MOST_LENGTHS = 12


def _own(rows: pd.DataFrame) -> pd.Series:
    """Tell where an operation differs although it was handed equal inputs."""
    return (rows["differing_calls"] > 0) & (rows["inputs_equal"] == 1)


def operation_shares(replayed: pd.DataFrame) -> pd.DataFrame:
    """Give for every operation of every layer the share of texts in which it differs locally when the last row is alone."""
    keys = ["model", "attention", "dtype", "operation", "kind", "layer"]
    depth = replayed.groupby("model")["layer"].transform("max") + 1
    inner = replayed["order"].where(replayed["layer"].notna()).groupby(replayed["model"]).transform("min")
    outside = depth.where(replayed["order"] > inner, -1)
    rows = replayed.assign(layer=replayed["layer"].fillna(outside).astype(int), own=_own(replayed))
    groups = rows[rows["pass"] == ONE_ROW].groupby(keys, sort=False)
    return groups.agg(order=("order", "min"), share=("own", "mean")).reset_index()


def kinds_by_text(replayed: pd.DataFrame) -> pd.DataFrame:
    """Count the calls of every text that differ locally, by kind of operation."""
    rows = replayed[replayed["pass"] != operation_replay.REAL]
    rows = rows.assign(differing=rows["differing_calls"].where(_own(rows), 0))
    groups = rows.groupby([*_CASE, "pass", "kind", "source", "sample"], sort=False)
    table = groups[["calls", "differing"]].sum().reset_index()
    return table.assign(share=table["differing"] / table["calls"])


def kind_shares(by_text: pd.DataFrame) -> pd.DataFrame:
    """Average `kinds_by_text` over texts, as statements do."""
    return by_text.groupby([*_CASE, "pass", "kind"], sort=False)["share"].mean().reset_index()


def beside(own: pd.DataFrame, book: pd.DataFrame) -> pd.DataFrame:
    """Put the first model of the book after the models of a run, in the run's dtypes."""
    first = book[(book["model"] == book["model"].iloc[0]) & (book["attention"] == book["attention"].iloc[0])]
    first = first[first["dtype"].isin(own["dtype"]) & first["pass"].isin(own["pass"])]
    return pd.concat([own, first.assign(model="the book-" + first["model"].str.partition("-")[0])], ignore_index=True)


def first_by_text(replayed: pd.DataFrame) -> pd.DataFrame:
    """Find for every text the first operation of the real decode step whose result differs, in the order of execution."""
    real = replayed[replayed["pass"] == operation_replay.REAL]
    texts = real[[*_CASE, "source", "sample"]].drop_duplicates()
    differing = real[real["first_differing"].notna()].sort_values("first_differing")
    first = differing.drop_duplicates([*_CASE, "sample"])[[*_CASE, "sample", "layer", "operation", "inputs_equal"]]
    return texts.merge(first, how="left", on=[*_CASE, "sample"])


def first_differences(by_text: pd.DataFrame) -> pd.DataFrame:
    """Say of every case in how many texts a decode step differs, and where it begins most often."""
    table = []
    for keys, texts in by_text.groupby(_CASE, sort=False):
        first = texts[texts["operation"].notna()]
        places = pd.Series([_place(row.layer, row.operation) for row in first.itertuples()], dtype=object)
        table.append(
            {
                **dict(zip(_CASE, keys, strict=True)),
                "samples": len(texts),
                "differing": len(first),
                "local": int((first["inputs_equal"] == 1).sum()),
                "first": places.mode().iloc[0] if len(places) else "none",
                "most": int((places == places.mode().iloc[0]).sum()) if len(places) else 0,
            }
        )
    return pd.DataFrame(table)


def by_torch(runs: Iterable[Run]) -> pd.DataFrame:
    """Lay `first_differences` and the share of calls that differ by themselves out, one line a version, attention and dtype."""
    found = []
    for run in runs:
        shares = kind_shares(kinds_by_text(run.rows))
        for row in first_differences(first_by_text(run.rows)).itertuples():
            own = shares[(shares["attention"] == row.attention) & (shares["dtype"] == row.dtype)]
            found.append(
                {
                    "torch": run.about["machine"]["torch"].partition("+")[0],
                    "attention": row.attention,
                    "dtype": DTYPES[row.dtype],
                    "texts that differ": f"{row.differing} of {row.samples}",
                    "first operation, most often": row.first,
                    "calls that differ locally": _by_kind(own),
                }
            )
    return pd.DataFrame(found)


def _by_kind(shares: pd.DataFrame) -> str:
    differing = shares[shares["share"] > 0]
    return (
        "; ".join(f"{row['kind']}, {row['pass']}: {wording.percent(row['share'])}" for _, row in differing.iterrows())
        or "none"
    )


def _place(layer: float, operation: str) -> str:
    return operation if pd.isna(layer) else f"layer {int(layer)} {operation}"


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


def length_shares(swept: pd.DataFrame) -> pd.DataFrame:
    """Give for every length the share of texts whose logits differ, and of those whose prefill wrote another cache."""
    means = swept.groupby(["attention", "dtype", "n_tokens"], sort=False)[["logits_equal", "cache_equal"]].mean()
    return (1 - means).rename(columns={"logits_equal": "logits", "cache_equal": "cache"}).reset_index()


def form_shares(attention: pd.DataFrame) -> pd.DataFrame:
    """Give the share of rows whose bits are not those of the causal pass, by kernel, dtype, form and number of keys."""
    sums = attention.groupby(["kernel", "dtype", "form", "keys"], sort=False)[["equal_rows", "compared_rows"]].sum()
    return (1 - sums["equal_rows"] / sums["compared_rows"]).rename("share").reset_index()


def equal_shares(attention: pd.DataFrame) -> pd.DataFrame:
    """Give the share of rows whose bits equal the causal pass's, over all numbers of keys, by form, dtype and kernel."""
    sums = attention.groupby(["form", "dtype", "kernel"], sort=False)[["equal_rows", "compared_rows"]].sum()
    return (sums["equal_rows"] / sums["compared_rows"]).rename("share").reset_index()


def factorial_table(factorial: pd.DataFrame) -> pd.DataFrame:
    """Average the drift of every way to score the last token, in units of the dtype's unit roundoff.

    Texts at their length make one group, whatever it is, and the same with one token more another.
    """
    table = []
    for (dtype, _longer), rows in factorial.groupby(["dtype", "longer"], sort=False):
        n_tokens = wording.between(rows["n_tokens"], "{}")
        units = rows.assign(
            way=rows["cache"] + "|" + rows["query"],
            units=rows["relative_rms"] / UNIT_ROUNDOFF[dtype],
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


def equal_prefills(prefills: pd.DataFrame, shapes: str = equal_shapes.EQUAL) -> pd.DataFrame:
    """Say of every prompt and dtype whether all that was compared is bitwise identical."""
    rows = prefills[prefills["shapes"] == shapes]
    found = rows.groupby(["dtype", "source", "sample"], sort=False)[["elements", "differing"]].sum().reset_index()
    return found.assign(equal=found["differing"] == 0)


def prefills_shown(prefills: pd.DataFrame) -> pd.DataFrame:
    """Count the prompts in which anything differs, by what is compared, for equal shapes and for one token fewer."""
    differs = prefills.assign(differs=prefills["differing"] > 0)
    table = []
    for (shapes, what), rows in differs.groupby(["shapes", "what"], sort=False):
        cells = {
            DTYPES[dtype]: f"{int(of['differs'].sum())} of {len(of)}" for dtype, of in rows.groupby("dtype", sort=False)
        }
        table.append({"shapes": shapes, "compared": what} | cells)
    return pd.DataFrame(table)


def kinds(table: pd.DataFrame) -> list[str]:
    """List the kinds of operation in a table, in the order of `replay.KINDS`."""
    return [kind for kind in replay.KINDS if kind in set(table["kind"])]


def first_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `first_differences` out for reading."""
    return pd.DataFrame(
        {
            "model": row.model,
            "attention": row.attention,
            "dtype": DTYPES[row.dtype],
            "texts that differ": f"{row.differing} of {row.samples}",
            "begun by the step itself": f"{row.local} of {row.differing}" if row.differing else "",
            "first operation, most often": f"{row.first} ({row.most})" if row.differing else "",
        }
        for row in table.itertuples()
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


def factorial_shown(drifts: pd.DataFrame) -> pd.DataFrame:
    """Lay `factorial_table` out: each of the two causes alone and both, with the count of texts that differ."""
    full, prefill, decode = cache_factorial.SOURCES
    alone, among = cache_factorial.ONE_ROW, cache_factorial.ALL_ROWS
    columns = {
        "one row alone": (full, alone), "prefill's cache alone": (prefill, among), "both": (prefill, alone),
        "decoded cache alone": (decode, among),
    }
    table = []
    for (dtype, n_tokens), rows in drifts.groupby(["dtype", "n_tokens"], sort=False):
        by = rows.set_index(["cache", "query"])
        cells = {name: _drift(by.loc[way]) for name, way in columns.items()}
        table.append({"dtype": DTYPES[dtype], "tokens": n_tokens} | cells)
    return pd.DataFrame(table)


def _drift(row: pd.Series) -> str:
    drift = row["drift"].text("{:.2f}") if row["drift"].high else "0"
    return f"{drift}; {row['samples'] - row['equal']} of {row['samples']} texts"
