"""The numbers and statements of the chapter on exact caches."""

from collections.abc import Callable, Sequence

import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.exact_caches import paths, results, tables
from kvreport.chapters.exact_caches.results import Results
from kvreport.publishing.judging import Measured, fact
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES, between

EXPERIMENTS = results.EXPERIMENTS
SINGLE = "token by token"
_NONE = Bound(0, "arithmetic", "none")
_QUARTER = Bound(0.25, "ours", "one in four", "share")

Measure = Callable[[Results], list[Measured]]


def _counted(series: str, rows: pd.DataFrame) -> Measured:
    """Count rows that are not bitwise identical: a fact about all that was run."""
    return fact((rows["rows"] - rows["equal_rows"]).sum(), series)


def _differing(found: Results) -> list[Measured]:
    """Count the rows that differ in row-invariant mode, by model and dtype."""
    if found.ways is None:
        return []
    rows = found.ways.rows[found.ways.rows["arithmetic"] == paths.EXACT]
    return [
        _counted(f"{model} {DTYPES[dtype]}", part)
        for (model, dtype), part in rows.groupby(["model", "dtype"], sort=False)
    ]


def _differing_at_length(found: Results) -> list[Measured]:
    """Count the rows of texts of many lengths that differ in row-invariant mode, by dtype."""
    if found.lengths is None:
        return []
    rows = found.lengths.rows[found.lengths.rows["arithmetic"] == paths.EXACT]
    return [_counted(DTYPES[dtype], part) for dtype, part in rows.groupby("dtype", sort=False)]


def _stock_at_length(found: Results) -> list[Measured]:
    """Measure the share of texts of many lengths with a row that differs with stock arithmetic, by dtype."""
    if found.lengths is None:
        return []
    rows = found.lengths.rows[found.lengths.rows["arithmetic"] == paths.STOCK]
    texts = rows.groupby(["dtype", "sample", "source"], sort=False)[["rows", "equal_rows"]].sum().reset_index()
    return [
        Measured(DTYPES[dtype], *estimates.share_over(part, part["equal_rows"] < part["rows"]))
        for dtype, part in texts.groupby("dtype", sort=False)
    ]


def _stock(found: Results, dtype: str, way: str = SINGLE) -> list[Measured]:
    """Measure the share of texts all of whose rows are identical with stock arithmetic, by model."""
    if found.ways is None:
        return []
    rows = found.ways.rows
    rows = rows[(rows["arithmetic"] == paths.STOCK) & (rows["way"] == way) & (rows["dtype"] == dtype)]
    return [
        Measured(model, *estimates.share_over(part, part["equal_rows"] == part["rows"]))
        for model, part in rows.groupby("model", sort=False)
    ]


def _on(found: Results, rungs: Sequence[str], dtypes: Sequence[str] = ()) -> list[tuple[str, pd.DataFrame]]:
    """Give the ladder's rows of some rungs, by rung and dtype; of all dtypes where none is named."""
    if found.ladder is None:
        return []
    rows = found.ladder.rows[found.ladder.rows["rung"].isin(rungs)]
    rows = rows[rows["dtype"].isin(dtypes)] if dtypes else rows
    grouped = rows.groupby(["rung", "dtype"], sort=False)
    return [(f"{rung}, {DTYPES[dtype]}", part) for (rung, dtype), part in grouped]


def _alone(rung: str, *dtypes: str) -> Measure:
    """Measure the share of texts all of whose rows are identical when one part alone is row-invariant, in some dtypes."""

    def measure(found: Results) -> list[Measured]:
        return [
            Measured(name, *estimates.share_over(part, part["equal_rows"] == part["rows"]))
            for name, part in _on(found, [rung], dtypes)
        ]

    return measure


def _together(found: Results) -> list[Measured]:
    """Count the rows that differ when both parts are row-invariant."""
    return [_counted(name, part) for name, part in _on(found, ["products + attention"])]


def _errors(column: str, *dtypes: str) -> Measure:
    """Measure the mode's error of a pass against double precision over stock's, by dtype; in all where none is named."""

    def measure(found: Results) -> list[Measured]:
        if found.ladder is None:
            return []
        units = found.ladder.rows["source"].nunique()
        return [
            Measured(f"{tables.ERRORS[column]}, {DTYPES[row.dtype]}", row.ratio, units)
            for row in found.errors[column].itertuples()
            if not dtypes or row.dtype in dtypes
        ]

    return measure


_TEXTS = "share of texts whose rows are all bitwise identical"
_DIFFER = "rows that are not bitwise identical"
_ONE_PART = Quantity(f"{_TEXTS} with one part row-invariant", "file", "part and dtype")
_ERROR = Quantity("error against fp64 in row-invariant mode, over stock's", "file", "pass and dtype")
_TENTH_MORE, _AS_LARGE = Bound(1.1, "ours", "a tenth more", "ratio"), Bound(1, "arithmetic", "as large")
_FULL, _STEPS = tables.ERRORS


def _prices(found: Results) -> list[Measured]:
    """Measure the time of each phase over stock's."""
    if found.cost is None:
        return []
    units = found.cost.rows["repeat"].nunique()
    return [Measured(phase, ratio, units) for phase, ratio in found.costs.items()]


STATEMENTS: dict[str, Statement[Results]] = {
    "no-row-differs": Statement(
        every(
            Quantity(f"{_DIFFER} in row-invariant mode", "", "model and dtype", "{:.0f}", "all rows that were run"),
            "at most", _NONE,
        ),
        _differing, headline=True,
    ),
    "no-row-differs-at-length": Statement(
        every(
            Quantity(f"{_DIFFER} in row-invariant mode", "", "dtype", "{:.0f}", "all rows that were run"), "at most", _NONE
        ),
        _differing_at_length, headline=True,
    ),
    "stock-differs-at-length": Statement(
        every(Quantity("share of texts with a row that is not bitwise identical, stock", "file", "dtype"), "above", HALF),
        _stock_at_length, scope="this processor",
    ),
    "stock-differs-in-fp32": Statement(
        every(Quantity(f"{_TEXTS}, stock, token by token", "file", "model"), "below", _QUARTER),
        lambda found: _stock(found, "float32"), scope="this processor",
    ),
    "products-alone-are-not-enough": Statement(
        every(_ONE_PART, "below", HALF), _alone("products", "float32", "bfloat16"), scope="this model"
    ),
    "attention-alone-is-not-enough-in-fp32": Statement(
        every(_ONE_PART, "below", HALF), _alone("attention", "float32"), scope="this model"
    ),
    "attention-alone-is-enough-in-bf16": Statement(
        every(_ONE_PART, "above", HALF), _alone("attention", "bfloat16"), scope="this processor", on="Intel"
    ),
    "attention-alone-is-not-enough-on-amd": Statement(
        every(_ONE_PART, "below", HALF), _alone("attention", "bfloat16"), scope="this processor", on="AMD"
    ),
    "products-and-attention-are-enough": Statement(
        every(Quantity(f"{_DIFFER} with both parts row-invariant", "", "dtype", "{:.0f}"), "at most", _NONE),
        _together, scope="this processor",
    ),
    "error-is-no-larger": Statement(
        every(_ERROR, "at most", _TENTH_MORE), _errors(_FULL), scope="this model"
    ),
    "error-of-steps-is-no-larger": Statement(
        every(_ERROR, "at most", _TENTH_MORE), _errors(_STEPS), scope="this model"
    ),
    "error-in-fp32-is-smaller": Statement(
        every(_ERROR, "below", _AS_LARGE), _errors(_FULL, "float32"), scope="this model"
    ),
    "price-is-small": Statement(
        every(
            Quantity("time in row-invariant mode over stock's", "repeat", "phase"), "below",
            Bound(1.25, "ours", "a quarter more time", "ratio"),
        ),
        _prices, scope="this processor",
    ),
}  # fmt: skip


def _rows(arithmetic: str, way: str | None = None, dtype: str | None = None) -> Callable[[Results], str]:
    """Count identical rows of all that the chapter's model was fed in every way."""

    def give(found: Results) -> str:
        table = found.shares[(found.shares["arithmetic"] == arithmetic) & _is_own(found.shares)]
        table = table[table["way"] == way] if way else table
        table = table[table["dtype"] == dtype] if dtype else table
        return _of(table)

    return give


def _is_own(rows: pd.DataFrame) -> pd.Series:
    """Tell which rows are of the first model, the others being its company of other families."""
    return rows["model"] == rows["model"].iloc[0]


def _of(rows: pd.DataFrame) -> str:
    return f"{rows['equal_rows'].sum():,} of {rows['rows'].sum():,}"


def _others(found: Results) -> str:
    return _of(found.shares[(found.shares["arithmetic"] == paths.EXACT) & ~_is_own(found.shares)])


def _at_length(found: Results) -> str:
    """Count identical rows of the texts of many lengths."""
    return _of(found.lengths.rows[found.lengths.rows["arithmetic"] == paths.EXACT])


def _price(found: Results) -> str:
    if found.cost is None:
        return "not run"
    return " and ".join(f"{ratio.text('{:.2f}')} in {name}" for name, ratio in found.costs.items())


NUMBERS: dict[str, Callable[[Results], str]] = {
    "model": lambda found: found.ladder.about["models"][0]["name"],
    "n_texts": lambda found: str(found.ways.rows["sample"].nunique()),
    "n_tokens": lambda found: str(found.ways.rows["n_tokens"].max()),
    "n_ways": lambda found: str(found.ways.rows["way"].nunique()),
    "n_rungs_texts": lambda found: str(found.ladder.rows["sample"].nunique()),
    "n_others": lambda found: str(found.ways.rows["model"].nunique() - 1),
    "n_long_texts": lambda found: str(found.lengths.rows["sample"].nunique()),
    "long_lengths": lambda found: between(found.lengths.rows["n_tokens"], "{:,.0f}"),
    "exact_rows": _rows(paths.EXACT),
    "exact_rows_others": _others,
    "exact_rows_long": _at_length,
    "stock_steps_fp32": _rows(paths.STOCK, SINGLE, "float32"),
    "stock_steps_bf16": _rows(paths.STOCK, SINGLE, "bfloat16"),
    "error_ratio": lambda found: between((one.estimate.value for one in _errors(_FULL)(found)), "{:.2f}"),
    "step_error_ratio": lambda found: ", ".join(one.estimate.text() for one in _errors(_STEPS, "float32")(found)),
    "price": _price,
}
