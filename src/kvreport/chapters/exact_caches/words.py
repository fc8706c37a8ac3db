"""What the chapter on exact caches says in words: captions, and the numbers of its prose."""

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.exact_caches import ladder, paths
from kvreport.chapters.exact_caches.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, brackets, power_of_ten

# The rung of stock arithmetic with the library's other attention.
_EAGER = "stock, eager"


def _dtypes(run: Run) -> str:
    return ", ".join(DTYPES[dtype] for dtype in run.about["settings"]["dtypes"])


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    ways, rungs, cost = results.ways, results.ladder, results.cost
    setting = f"{wording.models(ways)}; {_dtypes(ways)}; {wording.samples(ways)}; {wording.machine(ways)}"
    one = f"{wording.models(rungs)}; {_dtypes(rungs)}; {wording.samples(rungs)}; {wording.machine(rungs)}"
    asked, subject = cost.about["settings"], rungs.about["models"][0]
    timed = (
        f"{wording.models(cost)}; {DTYPES[asked['cost_dtype']]}; prefill of {asked['n_prefill']} tokens, its head on a "
        f"contiguous copy of the last row in both arithmetics, "
        f"{asked['n_steps']} steps on {asked['n_context']} cached tokens, {asked['n_repeats']} repeats by turns, whatever "
        f"else ran on the machine; {wording.machine(cost)}"
    )
    said = {
        "fig-exact-ways": (
            f"{_ways_found(results)} Stock's steps are token by token, from the model with the fewest such rows to that with "
            "the most. Share of equal rows (vertical) by model and dtype, filled under the switch and hollow with stock "
            f"arithmetic; each column is one way to feed the tokens. {setting}.",
            "Points of the share of equal rows, one panel a dtype, models from left to right within each way: filled "
            "under the switch, hollow with stock arithmetic.",
        ),
        "tab-exact-ways": (f"Rows of logits equal in every bit to the full pass's, all models. {setting}.", ""),
        "fig-exact-ladder": (
            f"{_ladder_found(results)} This is one model, {subject['name']} of width {subject['width']}; others may take "
            "other parts. Each line makes the parts invariant that it names, from none to all. Left: share of "
            "rows, token by token, equal to the full pass's in every bit. Right: error of both passes together against double "
            f"precision with the same weights. {one}.",
            "Two panels with one row for each rung of the ladder and one colour a dtype: share of equal rows on the left, "
            "relative error on a logarithmic axis on the right.",
        ),
        "tab-exact-ladder": (
            f"The same in numbers. {one}.",
            "",
        ),
        "tab-exact-promises": (
            f"What the switch promises, with the numbers behind each verdict. Rows: {setting}. Error, in brackets "
            f"{brackets(rungs.rows)}: {one}. Times, in brackets {brackets(cost.rows, 'repeat')}: {timed}.",
            "",
        ),
    }
    return wording.published(said)


def _ways_found(results: Results) -> str:
    """Say how many rows are equal to the full pass's, under the switch and without it."""
    table = results.shares
    exact = table[table["arithmetic"] == paths.EXACT]
    equal, rows = exact["equal_rows"].sum(), exact["rows"].sum()
    single = table[(table["arithmetic"] == paths.STOCK) & (table["way"] == "token by token")]
    stock = wording.in_dtypes(
        {
            dtype: " to ".join(dict.fromkeys(wording.percent(end) for end in (of.min(), of.max())))
            for dtype, of in single.groupby("dtype", sort=False)["share"]
        }
    )
    switched = f"all {rows:,}" if equal == rows else f"not all, but {equal:,} of {rows:,}"
    return f"Under the switch {switched} rows have the full pass's bits; of stock's steps, by model, {stock}."


def _ladder_found(results: Results) -> str:
    """Say which fewest parts make all rows equal, where none has to, and what the whole switch does to the error."""
    said, eager = {}, []
    for dtype, rows in results.rungs.groupby("dtype", sort=False):
        # Another attention implementation is another model, as far as bits go, and is named beside.
        enough = [rung for rung in rows.loc[rows["share"] == 1, "rung"] if ladder.RUNGS[rung][0] is None]
        fewest = min(enough, key=lambda rung: len(ladder.RUNGS[rung][1] or ()), default=None)
        said[dtype] = f"“{fewest}”" if fewest else "nothing tried"
        if (rows.loc[rows["rung"] == _EAGER, "share"] == 1).all() and fewest != ladder.STOCK:
            eager.append(DTYPES[dtype])
    full, step = (
        wording.between(ratio.value for ratio in results.errors[error]["ratio"])
        for error in ("error_rms", "step_error_rms")
    )
    beside = f"; “{_EAGER}” has them in {wording.listed(eager)} too" if eager else ""
    return (
        f"Equal bits take {wording.in_dtypes(said)}{beside}. The switch's error is {full} of stock's full pass's, {step} of "
        "its steps'."
    )


def _of_errors(ratios: pd.DataFrame) -> str:
    return "; ".join(f"{DTYPES[row.dtype]} {row.ratio.text('{:.2f}')}" for row in ratios.itertuples())


def _never_different(stock: pd.DataFrame) -> str:
    """Name the ways whose rows stock arithmetic gives the full pass's bits throughout: they try nothing here."""
    added = stock.groupby("way", sort=False)[["equal_rows", "rows"]].sum()
    return wording.listed(list(added.index[added["equal_rows"] == added["rows"]])) or "none"


def _stock_single(shares: pd.DataFrame) -> pd.DataFrame:
    """Add up by dtype the rows that stock arithmetic gives token by token."""
    single = shares[(shares["arithmetic"] == paths.STOCK) & (shares["way"] == "token by token")]
    return single.groupby("dtype", sort=False)[["equal_rows", "rows", "flips"]].sum()


def _stopped(device: str) -> str:
    """Say that no bit differs, and where that was seen."""
    kind = device.partition(":")[0]
    return f"On a {'GPU' if kind == 'cuda' else kind.upper()}, yes."


def numbers(results: Results) -> dict[str, str]:
    """Write the numbers of the prose."""
    # All of a chapter's runs are on one device.
    device = str(results.cost.about["machine"]["device"])
    ways, cost, table = results.ways.rows, results.cost.rows, results.shares
    exact, stock = (table[table["arithmetic"] == name] for name in (paths.EXACT, paths.STOCK))
    times, single = results.costs, _stock_single(table)
    seconds = cost[cost["arithmetic"] == paths.STOCK][["prefill_s", "decode_s"]].median()
    return {
        "models": f"{ways['model'].nunique()}",
        "stop_in_short": _stopped(device) if exact["equal_rows"].sum() == exact["rows"].sum() else "Not everywhere.",
        "exact_rows": f"{exact['equal_rows'].sum():,} of {exact['rows'].sum():,}",
        "n_ways": f"{exact['way'].nunique()}",
        "stock_exact_ways": _never_different(stock),
        "stock_steps": f"{single['equal_rows'].sum():,} of {single['rows'].sum():,}",
        "stock_flips": "; ".join(f"{DTYPES[d]} {r.flips:,} of {r.rows:,}" for d, r in single.iterrows()),
        "stock_largest": "; ".join(
            f"{DTYPES[d]} {power_of_ten(value)}"
            for d, value in stock.groupby("dtype", sort=False)["max_abs"].max().items()
        ),
        "n_tokens": wording.between(ways["n_tokens"], "{:,.0f}"),
        "exact_largest": power_of_ten(exact["max_abs"].max()),
        "error_ratio": _of_errors(results.errors["error_rms"]),
        "step_error_ratio": _of_errors(results.errors["step_error_rms"]),
        "error_brackets": brackets(results.ladder.rows),
        "cost_brackets": brackets(cost, "repeat"),
        "decode_cost": times["decode"].text("{:.2f}"),
        "prefill_cost": times["prefill"].text("{:.2f}"),
        "cost_dtype": DTYPES[results.cost.about["settings"]["cost_dtype"]],
        "stock_decode": f"{1e3 * seconds['decode_s']:.0f} ms",
        "stock_prefill": f"{1e3 * seconds['prefill_s']:.0f} ms",
    }
