"""The numbers and statements of the chapter on where drift begins."""

import dataclasses
from collections.abc import Callable, Collection

import pandas as pd

from kvbook import lengths
from kvbook.measuring import estimates
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    equal_shapes,
    operation_replay,
    results,
    tables,
)
from kvreport.chapters.where_drift_begins.results import Results
from kvreport.publishing.judging import Measured, fact, with_units
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES

EXPERIMENTS = results.EXPERIMENTS
PREFILL, ALL, ONE_ROW = operation_replay.PREFILL, operation_replay.ALL, tables.ONE_ROW
# Operations that treat every row for itself.
ROW_WISE = ("embedding", "elementwise", "norm")

_NONE = Bound(0, "arithmetic", "none")
_FOUR_IN_FIVE = Bound(0.8, "ours", "four in five", "share")
_ONE_IN_FIVE = Bound(0.2, "ours", "one in five", "share")

_CALLS = Quantity("share of calls that differ on bitwise identical inputs", "file", "case", "{:.1%}")
_MOST_CALLS = Quantity(
    "largest share of calls that differ on bitwise identical inputs", "", "case", "{:.1%}", "all calls of all texts"
)
_BEGINS = Quantity("share of texts whose cached step begins to differ so", "file", form="{:.0%}")
_STEP = Quantity("share of texts whose last token's logits differ", "file", "dtype and length", "{:.0%}")
_LENGTHS = Quantity("share of lengths with bitwise identical logits", "file", "dtype", "{:.0%}")
_ROWS = Quantity("share of rows that differ from the causal pass", series="kernel", form="{:.1%}")
_PROMPTS = Quantity("share of prompts whose hidden states, keys or values differ", "file", "dtype", "{:.0%}")
_ANY_PROMPT = Quantity("prompts in which anything that is compared differs", "", "dtype", "{:.0f}", "all prompts")
_MOST_ROWS = Quantity("largest query length at which some row differs", series="K", form="{:.0f}")


def _kinds(
    dtype: str, name: str, kinds: Collection[str], attention: Collection[str] = ("sdpa", "eager")
) -> Callable[[Results], list[Measured]]:
    """Measure of the first model the share of calls of some kinds that differ locally in a pass."""

    def measure(found: Results) -> list[Measured]:
        if found.replayed is None:
            return []
        rows = found.by_text
        rows = rows[(rows["model"] == found.model) & (rows["dtype"] == dtype) & (rows["pass"] == name)]
        rows = rows[rows["kind"].isin(kinds) & rows["attention"].isin(attention)]
        return [
            Measured(f"{kind}, {of_attention}", *estimates.share_of_rows(of, of["share"]))
            for (of_attention, kind), of in rows.groupby(["attention", "kind"], sort=False)
        ]

    return measure


def _not_down_proj(found: Results) -> pd.DataFrame:
    """Choose bf16 calls of one row in the first model's linear layers, but for the last product of each MLP."""
    rows = found.replayed.rows
    rows = rows[(rows["model"] == found.model) & (rows["dtype"] == "bfloat16") & (rows["pass"] == ONE_ROW)]
    return rows[(rows["kind"] == "linear") & ~rows["operation"].str.endswith("down_proj", na=False)]


def _most_of_them(found: Results) -> list[Measured]:
    rows = _not_down_proj(found)
    return [fact((rows["differing_calls"] / rows["calls"]).max())]


def _share_of_them(found: Results) -> list[Measured]:
    rows = _not_down_proj(found)
    return [Measured("", *estimates.share_of_rows(rows, rows["differing_calls"] / rows["calls"]))]


def _most_calls(choose: Callable[[pd.DataFrame], pd.Series], by: str = "kind") -> Callable[[Results], list[Measured]]:
    """Measure in which share of calls anything of some rows differs at most, over models, dtypes, passes and texts."""

    def measure(found: Results) -> list[Measured]:
        if found.replayed is None:
            return []
        rows = found.by_text[choose(found.by_text)]
        return [fact(of["share"].max(), str(name)) for name, of in rows.groupby(by, sort=False)]

    return measure


def _begins(dtype: str, at: Callable[[pd.DataFrame], pd.Series]) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.replayed is None:
            return []
        rows = found.first_by_text
        rows = rows[(rows["model"] == found.model) & (rows["dtype"] == dtype)]
        return [
            Measured(str(attention), *estimates.share_over(of, at(of)))
            for attention, of in rows.groupby("attention", sort=False)
        ]

    return measure


def _factorial(cache: str, query: str, *dtypes: str) -> Callable[[Results], list[Measured]]:
    """Measure the share of texts whose logits differ for a source of the cache and a way to run the last token."""

    def measure(found: Results) -> list[Measured]:
        if found.factorial is None:
            return []
        rows = found.factorial.rows
        rows = rows[(rows["cache"] == cache) & (rows["query"] == query)]
        rows = rows[rows["dtype"].isin(dtypes)] if dtypes else rows
        return [
            Measured(
                f"{DTYPES[dtype]}{', one token more' if longer else ''}",
                *estimates.share_over(of, of["differing_share"] > 0),
            )
            for (dtype, longer), of in rows.groupby(["dtype", "longer"], sort=False)
        ]

    return measure


def _lengths(dtype: str, column: str = "logits_equal") -> Callable[[Results], list[Measured]]:
    """Measure the share of lengths with equal bits, in the model's own attention."""

    def measure(found: Results) -> list[Measured]:
        if found.swept is None:
            return []
        rows = found.swept.rows
        rows = rows[(rows["dtype"] == dtype) & (rows["attention"] == rows["attention"].iloc[0])]
        return [Measured(DTYPES[dtype], *estimates.share_over(rows, rows[column]))] if len(rows) else []

    return measure


def _all_lengths(dtype: str) -> Callable[[Results], list[Measured]]:
    """Measure `_lengths` as a fact about the texts at hand, for what is said of all of them."""
    return lambda found: [fact(one.estimate.value, one.series) for one in _lengths(dtype)(found)]


def _begins_at_q(rows: pd.DataFrame) -> pd.Series:
    return (rows["layer"] == 0) & rows["operation"].str.endswith("q_proj", na=False)


def _forms(dtype: str, *forms: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.attention is None:
            return []
        table = found.equal
        table = table[(table["dtype"] == dtype) & table["form"].isin(forms)]
        return [fact(1 - row.share, f"{row.kernel}, {row.form}") for row in table.itertuples()]

    return measure


def _most_rows(dtype: str, longest: bool | None = None) -> Callable[[Results], list[Measured]]:
    """Measure on one thread the most rows at which one differs, by the length of the sums; of the longest, or of the others."""

    def measure(found: Results) -> list[Measured]:
        if found.mapped is None:
            return []
        table = found.products
        table = table[(table["dtype"] == dtype) & (table["threads"] == 1)]
        return [
            fact(of["rows"].where(of["state"] != tables.ALL_EQUAL, 0).max(), f"K = {size}")
            for size, of in table.groupby("inner_size")
            if longest is None or longest == (size == table["inner_size"].max())
        ]

    return measure


def _prefills(
    found: Results, shapes: str, measured: Callable[[str, pd.DataFrame], Measured], *dtypes: str
) -> list[Measured]:
    """Measure of each dtype, or of some, the prompts that were read twice."""
    if found.prefills is None:
        return []
    table = tables.equal_prefills(found.prefills.rows, shapes)
    return [
        measured(DTYPES[dtype], of) for dtype, of in table.groupby("dtype", sort=False) if not dtypes or dtype in dtypes
    ]


STATEMENTS: dict[str, Statement[Results]] = {
    "one-row-linear-fp32": Statement(
        every(_CALLS, "above", _FOUR_IN_FIVE), _kinds("float32", ONE_ROW, ["linear"]), "this processor", headline=True
    ),
    "one-row-attention-fp32": Statement(
        every(_CALLS, "above", _FOUR_IN_FIVE), _kinds("float32", ONE_ROW, ["attention"], ["sdpa"]), "this processor"
    ),
    "one-row-bf16": Statement(
        every(_CALLS, "below", _ONE_IN_FIVE), _kinds("bfloat16", ONE_ROW, ["linear", "attention"]), "this processor",
        headline=True,
    ),
    "other-products-differ-in-bf16": Statement(
        every(_CALLS, "above", _NONE), _share_of_them, "this processor", on="Intel"
    ),
    "down-proj-alone-in-bf16-on-amd": Statement(
        every(_MOST_CALLS, "at most", _NONE), _most_of_them, "this processor", on="AMD"
    ),
    "row-wise-never": Statement(
        every(_MOST_CALLS, "at most", _NONE), _most_calls(lambda rows: rows["kind"].isin(ROW_WISE)), headline=True
    ),
    "control": Statement(every(_MOST_CALLS, "at most", _NONE), _most_calls(lambda rows: rows["pass"] == ALL)),
    "sixteen-rows-linear-fp32": Statement(
        every(_CALLS, "below", _ONE_IN_FIVE), _kinds("float32", operation_replay.last(16), ["linear"]), "this processor"
    ),
    "prefill-linear-never": Statement(
        every(_MOST_CALLS, "at most", _NONE),
        _most_calls(
            lambda rows: (rows["pass"] == PREFILL) & (rows["kind"] == "linear") & (rows["dtype"] == "float32")
            & (rows["model"] == rows["model"].iloc[0])
        ),
        "this processor",
    ),
    "equal-shapes-equal-bits": Statement(
        every(_ANY_PROMPT, "at most", _NONE),
        lambda found: _prefills(found, equal_shapes.EQUAL, lambda dtype, of: fact((~of["equal"]).sum(), dtype)),
    ),
    "one-token-fewer-differs": Statement(
        every(_PROMPTS, "above", _ONE_IN_FIVE),
        lambda found: _prefills(
            found, equal_shapes.FEWER,
            lambda dtype, of: Measured(dtype, *estimates.share_over(of, ~of["equal"])), "bfloat16",
        ),
        "this processor",
    ),
    "begins-at-q": Statement(
        every(_BEGINS, "above", _FOUR_IN_FIVE),
        _begins("float32", _begins_at_q),
        "this model",
    ),
    "bf16-begins-later": Statement(
        every(_BEGINS, "above", _FOUR_IN_FIVE),
        _begins("bfloat16", lambda rows: rows["operation"].notna() & ~_begins_at_q(rows)), "this processor",
    ),
    "bf16-begins-in-the-step": Statement(
        every(_BEGINS, "above", HALF), _begins("bfloat16", lambda rows: rows["inputs_equal"] == 1), "this processor"
    ),
    "one-row-is-enough": Statement(
        every(_STEP, "above", _FOUR_IN_FIVE), _factorial(cache_factorial.FULL, cache_factorial.ONE_ROW, "float32"),
        "this processor", headline=True,
    ),
    "one-row-is-enough-in-bf16": Statement(
        every(_STEP, "above", HALF),
        _factorial(cache_factorial.FULL, cache_factorial.ONE_ROW, "bfloat16"),
        "this processor",
    ),
    "prefill-is-not-enough": Statement(
        every(_STEP, "below", HALF), _factorial(cache_factorial.PREFILL, cache_factorial.ALL_ROWS, "float32"),
        "this processor",
    ),
    "decoded-cache-is-enough": Statement(
        every(_STEP, "above", _FOUR_IN_FIVE), _factorial(cache_factorial.DECODE, cache_factorial.ALL_ROWS, "float32"),
        "this processor",
    ),
    "no-length-agrees-fp32": Statement(
        every(dataclasses.replace(_LENGTHS, unit="", census="all lengths of all texts"), "at most", _NONE),
        _all_lengths("float32"), "this processor",
    ),
    "some-lengths-agree-bf16": Statement(every(_LENGTHS, "above", _NONE), _lengths("bfloat16"), "this processor"),
    "short-products-fp32": Statement(
        every(_MOST_ROWS, "below", Bound(16, "ours", "as in the replay of 16 rows")), _most_rows("float32"),
        "this processor",
    ),
    "short-sums-never-bf16": Statement(
        every(_MOST_ROWS, "at most", _NONE), _most_rows("bfloat16", longest=False), "this processor"
    ),
    "a-long-sum-differs-bf16": Statement(
        every(_MOST_ROWS, "above", Bound(16, "ours", "more rows than in fp32")),
        _most_rows("bfloat16", longest=True), "this processor", on="Intel",
    ),
    "a-long-sum-differs-for-one-row-on-amd": Statement(
        every(_MOST_ROWS, "at most", Bound(1, "arithmetic", "one row")), _most_rows("bfloat16", longest=True),
        "this processor", on="AMD",
    ),
    "one-query-fp32": Statement(
        every(_ROWS, "above", HALF), _forms("float32", "1 row, no mask"), "this processor"
    ),
    "one-query-bf16": Statement(
        every(_ROWS, "below", _ONE_IN_FIVE), _forms("bfloat16", "1 row, no mask"), "this processor"
    ),
    "masks-alike": Statement(
        every(_ROWS, "at most", _NONE),
        lambda found: [
            one for dtype in ("float32", "bfloat16")
            for one in _forms(dtype, "all rows, boolean mask", "all rows, additive mask")(found)
        ],
        "this processor",
    ),
    "hidden-keys-change-rows": Statement(
        every(_ROWS, "above", _NONE), _forms("float32", "all rows, 64 hidden keys"), "this processor"
    ),
}


def _largest(found: Results) -> str:
    """Give the most rows at which one of the longest sums differs in bf16."""
    (one,) = _most_rows("bfloat16", longest=True)(found) or [None]
    return "not run" if one is None else f"{one.estimate.value:.0f}"


def _prefill(longer: int) -> Callable[[Results], str]:
    """Count the texts whose logits differ in bf16 with a prefill's keys and values alone."""

    def give(found: Results) -> str:
        rows = found.factorial.rows
        rows = rows[(rows["dtype"] == "bfloat16") & (rows["longer"] == longer)]
        rows = rows[(rows["cache"] == cache_factorial.PREFILL) & (rows["query"] == cache_factorial.ALL_ROWS)]
        return f"{int((rows['differing_share'] > 0).sum())} of {len(rows)}"

    return give


def _texts(name: str) -> Callable[[Results], str]:
    return lambda found: str(getattr(found, name).rows["sample"].nunique())


def _one_row(dtype: str, kind: str, write: Callable[[list[Measured]], str]) -> Callable[[Results], str]:
    """Write the share of calls of one row of the first model, in its own attention."""
    return lambda found: write(_kinds(dtype, ONE_ROW, (kind,), (found.by_text["attention"].iloc[0],))(found))


def _value(measured: list[Measured]) -> str:
    return "".join(f"{one.estimate.value:.1%}" for one in measured) or "not run"


def _with_files(measured: list[Measured]) -> str:
    return with_units(measured, "files", "{:.1%}")


NUMBERS: dict[str, Callable[[Results], str]] = {
    "model": lambda found: found.model,
    "n_replayed": _texts("replayed"),
    "longest_swept": lambda found: str(found.swept.rows["n_tokens"].max()),
    "n_factorial": _texts("factorial"),
    "n_swept": _texts("swept"),
    "n_prefills": _texts("prefills"),
    "n_tokens": lambda found: lengths.said(found.replayed.about["settings"]["n_tokens"]),
    "linear_fp32": _one_row("float32", "linear", _value),
    "linear_bf16": _one_row("bfloat16", "linear", _value),
    "linear_fp32_share": _one_row("float32", "linear", _with_files),
    "linear_bf16_share": _one_row("bfloat16", "linear", _with_files),
    "attention_bf16_share": _one_row("bfloat16", "attention", _with_files),
    "prefill_bf16": _prefill(0),
    "prefill_bf16_longer": _prefill(1),
    "lengths_bf16": lambda found: (
        "".join(f"{one.estimate.value:.0%}" for one in _lengths("bfloat16")(found)) or "not run"
    ),
    "long_sum_rows": _largest,
    "max_rows": lambda found: str(int(found.mapped.rows["rows"].max())),
    "n_draws": lambda found: str(attention_forms.DRAWS * found.attention.rows.get("seed", pd.Series([0])).nunique()),
    "heads": lambda _: str(attention_forms.HEADS),
}
