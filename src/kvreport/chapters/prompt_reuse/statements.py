"""The numbers and statements of the chapter on reusing a prompt's cache."""

from collections.abc import Callable

import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.prompt_reuse import continuations, results, split_keys
from kvreport.chapters.prompt_reuse.results import Results
from kvreport.publishing.judging import Measured, fact, with_units
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES, between, listed

EXPERIMENTS = results.EXPERIMENTS
_NONE = Bound(0, "arithmetic", "none")
_FOUR_IN_FIVE = Bound(0.8, "ours", "four in five", "share")
_NINE_IN_TEN = Bound(0.9, "ours", "nine in ten", "share")
_FINE, _COARSE = "float32", "bfloat16"
# Cases whose ids continue the cached ones, in any vocabulary.
_CONTINUES = (continuations.SPACE, continuations.CHAT)


def _picked(found: Results, case: str, way: str, *dtypes: str) -> pd.DataFrame:
    rows = found.written
    rows = rows[(rows["case"] == case) & (rows["way"] == way)]
    return rows[rows["dtype"].isin(dtypes)] if dtypes else rows


def _equal(way: str, cases: tuple[str, ...], *dtypes: str) -> Callable[[Results], list[Measured]]:
    """Measure the share of prompts whose tokens equal those without reuse."""

    def measure(found: Results) -> list[Measured]:
        return [
            Measured(f"{case}, {DTYPES[dtype]}", *estimates.share_over(rows, rows["equal"], "item"))
            for case in cases
            for dtype, rows in _picked(found, case, way, *dtypes).groupby("dtype", sort=False)
        ]

    return measure


def _mismatched(found: Results) -> list[Measured]:
    rows = _picked(found, continuations.DOCUMENTED, continuations.POSTED, found.written["dtype"].iloc[0])
    return [
        Measured(model, *estimates.share_over(of_model, of_model["seam"], "item"))
        for model, of_model in rows.groupby("model", sort=False)
    ]


def _rounded(found: Results) -> list[Measured]:
    """Count prompts whose text differs in bf16 though their ids continue the cached ones."""
    picked = {case: _picked(found, case, continuations.POSTED, _COARSE) for case in _CONTINUES}
    return [fact((~rows["equal"]).sum(), case) for case, rows in picked.items() if len(rows)]


def _fed_again(found: Results) -> list[Measured]:
    rows = _picked(found, continuations.WHOLE, continuations.POSTED)
    return [fact((rows["fed_tokens"] == rows["prompt_tokens"]).mean())] if len(rows) else []


def _cuts(place: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.cuts is None:
            return []
        rows = found.cut_shares
        return [Measured(r.tokenizer, r.estimate, r.files) for r in rows[rows["place"] == place].itertuples()]

    return measure


def _response(found: Results, variant: str, first_keys: bool = False) -> pd.Series:
    """Count elements of the response that differ under a switch: in the first layer's keys, or in all layers."""
    if found.split is None:
        return pd.Series(index=pd.MultiIndex.from_tuples([], names=["model", "dtype"]), dtype=float)
    rows = found.split.rows
    rows = rows[(rows["variant"] == variant) & (rows["part"] == "response")]
    if first_keys:
        rows = rows[(rows["layer"] == 0) & (rows["tensor"] == "keys")]
    return rows.groupby(["model", "dtype"], sort=False)["n_differing"].sum()


def _of_series(counts: pd.Series) -> list[Measured]:
    return [fact(count, f"{model} {DTYPES[dtype]}") for (model, dtype), count in counts.items()]


def _moved(variant: str, first_keys: bool = False) -> Callable[[Results], list[Measured]]:
    """Measure by how many elements a switch changes what differs as posted."""
    return lambda found: _of_series(
        (_response(found, variant, first_keys) - _response(found, split_keys.POSTED, first_keys)).abs()
    )


def _left(*variants: str) -> Callable[[Results], list[Measured]]:
    """Count elements of the response that differ under switches, in all layers."""
    return lambda found: [
        fact(count, f"{model} {DTYPES[dtype]}, {variant}")
        for variant in variants
        for (model, dtype), count in _response(found, variant).items()
    ]


def _deeper(found: Results) -> pd.DataFrame:
    """Count the response's elements as posted in the layers after the first: those that differ, and all."""
    rows = found.split.rows
    rows = rows[(rows["variant"] == split_keys.POSTED) & (rows["part"] == "response") & (rows["layer"] > 0)]
    return rows.groupby(["model", "dtype"], sort=False)[["n_differing", "n_elements"]].sum()


def _deeper_differing(found: Results) -> list[Measured]:
    return _of_series(_deeper(found)["n_differing"]) if found.split else []


def _first_layer(variant: str) -> Callable[[Results], list[Measured]]:
    """Count the first layer's keys that differ in fp32 at the true widths, over all numbers of tokens fed."""

    def measure(found: Results) -> list[Measured]:
        if found.layer is None:
            return []
        rows = found.rows_fed
        rows = rows[(rows["variant"] == variant) & (rows["dtype"] == "float32")]
        return [fact(count, model) for model, count in rows.groupby("model", sort=False)["n_differing"].sum().items()]

    return measure


def _at_the_threads_counts(dtype: str) -> Callable[[Results], list[Measured]]:
    """Count the first layer's keys that differ at the thread's own lengths in a dtype."""

    def measure(found: Results) -> list[Measured]:
        if found.layer is None:
            return []
        rows = found.at_published_rows
        return [fact(row.n_differing, row.model) for row in rows[rows["dtype"] == dtype].itertuples()]

    return measure


_EQUAL = Quantity("share of prompts whose tokens equal those without reuse", "prompt", "case and dtype")
_CHANGED = Quantity(
    "share of cuts after which the first part's ids do not begin the whole text's", "file", "vocabulary"
)
_ELEMENTS = Quantity(
    "keys and values of the response that differ, in all layers", series="model and dtype", form="{:,.0f}"
)
_DEEPER = Quantity(
    "keys and values of the response that differ, after the first layer", series="model and dtype", form="{:,.0f}"
)
_MOVED = Quantity("change of the number of differing elements by the switch", series="model and dtype", form="{:,.0f}")
_KEYS = Quantity("elements of the first layer's keys that differ", series="model", form="{:,.0f}")

STATEMENTS: dict[str, Statement[Results]] = {
    "ids-do-not-continue": Statement(
        every(Quantity("share of prompts whose ids do not begin with the prefix's", "prompt", "model"), "above",
            _FOUR_IN_FIVE),
        _mismatched,
        scope="this model",
        headline=True,
    ),
    "recipe-changes-text": Statement(
        every(_EQUAL, "below", HALF),
        _equal(continuations.POSTED, (continuations.DOCUMENTED,)),
        scope="this model",
        headline=True,
    ),
    "cut-before-the-space-keeps": Statement(
        every(_EQUAL, "above", _FOUR_IN_FIVE),
        _equal(continuations.POSTED, (continuations.SPACE,), _FINE),
        headline=True,
    ),
    "template-keeps": Statement(
        every(_EQUAL, "above", _FOUR_IN_FIVE), _equal(continuations.POSTED, (continuations.CHAT,), _FINE)
    ),
    "common-prefix-restores": Statement(
        every(_EQUAL, "above", _FOUR_IN_FIVE),
        _equal(continuations.SAFE, (continuations.DOCUMENTED, continuations.CORPUS), _FINE),
    ),
    "rounding-in-bf16": Statement(
        every(Quantity("runs whose ids continue and whose tokens differ in bf16", series="case", form="{:.0f}"),
            "above", _NONE),
        _rounded,
        scope="this model",
    ),
    "whole-prompt-fed-again": Statement(
        every(
            Quantity("share of runs with the whole prompt cached that feed it again"),
            "at least",
            Bound(1, "arithmetic", "all"),
        ),
        _fed_again,
    ),
    "any-cut": Statement(every(_CHANGED, "above", HALF), _cuts("anywhere"), headline=True),
    "cut-after-a-space": Statement(every(_CHANGED, "above", _NINE_IN_TEN), _cuts("after a space"), headline=True),
    "cut-before-a-space": Statement(
        every(_CHANGED, "below", Bound(0.1, "ours", "one cut in ten", "share")), _cuts("before a space")
    ),
    "first-layer-ignores-the-cache": Statement(
        every(_MOVED, "at most", _NONE), _moved(split_keys.OVERWRITTEN, first_keys=True)
    ),
    "first-layer-at-the-threads-counts": Statement(
        every(_KEYS, "above", _NONE), _at_the_threads_counts(_FINE), scope="this processor", on="Intel"
    ),
    "first-layer-at-the-threads-counts-on-amd": Statement(
        every(_KEYS, "at most", _NONE), _at_the_threads_counts(_FINE), scope="this processor", on="AMD"
    ),
    "first-layer-at-the-threads-counts-in-bf16": Statement(
        every(_KEYS, "at most", _NONE), _at_the_threads_counts(_COARSE), scope="this processor"
    ),
    "first-layer-at-some-counts": Statement(
        every(_KEYS, "above", _NONE), _first_layer(split_keys.POSTED), scope="this processor"
    ),
    "equal-query-lengths-equal-keys": Statement(every(_KEYS, "at most", _NONE), _first_layer(split_keys.FULL_ROWS)),
    "deeper-layers-differ": Statement(every(_DEEPER, "above", _NONE), _deeper_differing, scope="this processor"),
    "both-switches-leave-none": Statement(
        every(_ELEMENTS, "at most", _NONE), _left(split_keys.BOTH), scope="this processor"
    ),
    "one-switch-leaves-some": Statement(
        every(_ELEMENTS, "above", _NONE), _left(split_keys.WHOLE_CACHE, split_keys.FULL_ROWS), scope="this processor",
            on="Intel"
    ),
    "linear-layers-are-not-on-amd": Statement(
        every(_MOVED, "at most", _NONE), _moved(split_keys.FULL_ROWS), scope="this processor", on="AMD"
    ),
    "one-switch-is-enough-on-amd": Statement(
        every(_ELEMENTS, "at most", _NONE), _left(split_keys.WHOLE_CACHE), scope="this processor", on="AMD"
    ),
}


def _kept(case: str, way: str, *dtypes: str) -> Callable[[Results], str]:
    """Count prompts that keep their text with a dynamic cache."""

    def give(found: Results) -> str:
        rows = _picked(found, case, way, *dtypes)
        rows = rows[rows["cache"] == "dynamic"]
        return f"{int(rows['equal'].sum())} of {len(rows)}"

    return give


def _kept_share(case: str) -> Callable[[Results], str]:
    return lambda found: with_units(_equal(continuations.POSTED, (case,), _FINE)(found), "prompts")


def _differing(dtype: str) -> Callable[[Results], str]:
    def give(found: Results) -> str:
        differing, every_one = _deeper(found).xs(dtype, level="dtype").sum()
        return f"{differing / every_one:.0%}"

    return give


def _at_threads(found: Results) -> str:
    rows = found.at_published_rows
    return listed([f"{share:.0%}" for share in rows.loc[rows["dtype"] == _FINE, "share"]])


def _most_roundoffs(found: Results) -> str:
    rows = found.layers[found.layers["part"] == "response"]
    return between(rows.groupby(["model", "dtype"])["relative_roundoffs"].max(), "{:.0f}")


NUMBERS: dict[str, Callable[[Results], str]] = {
    "model": lambda found: found.reuse.about["models"][0]["name"],
    "n_questions": lambda found: str(found.questions.rows["item"].nunique()),
    "n_new_tokens": lambda found: str(found.reuse.about["settings"]["n_new_tokens"]),
    "n_files": lambda found: str(found.cuts.rows["source"].nunique()),
    "recipe_fp32": _kept(continuations.DOCUMENTED, continuations.POSTED, _FINE),
    "before_fp32": _kept(continuations.SPACE, continuations.POSTED, _FINE),
    "recipe_fp32_share": _kept_share(continuations.DOCUMENTED),
    "before_fp32_share": _kept_share(continuations.SPACE),
    "before_bf16": _kept(continuations.SPACE, continuations.POSTED, _COARSE),
    "template_fp32": _kept(continuations.CHAT, continuations.POSTED, _FINE),
    "template_bf16": _kept(continuations.CHAT, continuations.POSTED, _COARSE),
    "corpus_safe": _kept(continuations.CORPUS, continuations.SAFE),
    "corpus_posted": _kept(continuations.CORPUS, continuations.POSTED),
    "lost": lambda found: between(found.cut_shares.loc[found.cut_shares["place"] == "anywhere", "lost"], "{:.1f}"),
    "published_shares": lambda found: " and ".join(f"{share:.0%}" for share in found.published_shares["share"]),
    "differing_at_threads": _at_threads,
    "differing_fp32": _differing(_FINE),
    "differing_bf16": _differing(_COARSE),
    "roundoffs": _most_roundoffs,
}
