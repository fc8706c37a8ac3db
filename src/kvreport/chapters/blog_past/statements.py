"""The numbers and statements of the chapter on the blog post about past_key_values."""

from collections.abc import Callable

import pandas as pd

from kvreport.chapters.blog_past import claims, past_tables, results, tables
from kvreport.chapters.blog_past.results import Results
from kvreport.publishing.judging import Measured, fact
from kvreport.publishing.rules import Bound, Quantity, every
from kvreport.publishing.statements import Statement

EXPERIMENTS = results.EXPERIMENTS
_WITH_PAST = (past_tables.NATIVE, past_tables.DECODER)
_WITHOUT_PAST = {"mpt": past_tables.CACHE_OFF, "roberta": past_tables.NO_PAST}
_UNIT = "difference of the last token's logits in unit roundoffs of the dtype, or of fp16 if quantized"
_BY_MODEL = Quantity(_UNIT, "file", "model", "{:,.3g}")
_SPREAD = Quantity("difference of the last token's logits over their standard deviation", "file", "model", "{:.2g}")
_BY_DEPTH = Quantity(_UNIT, "file", "depth", "{:,.3g}")
_NOT_ALONE = Quantity("texts in which the logits differ from those of the last token alone", "", "family", "{:.0f}")
_OTHER = Quantity("texts in which the rotary embedding of mid-2023 changes the difference", "", "precision", "{:.0f}")


def _rows(found: Results, quantized: bool = False, **where: str) -> pd.DataFrame:
    rows = found.rows[(found.rows["quantization"] != "none") == quantized]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows


def _with_past(found: Results) -> list[Measured]:
    rows = _rows(found)
    return claims.by(rows[rows["variant"].isin(_WITH_PAST)], "model", str)


def _quantized(
    quantization: str, value: str = "roundoffs", trained: bool | None = None
) -> Callable[[Results], list[Measured]]:
    """Measure models with their past in one precision; where asked, trained ones of a real size or the others alone."""

    def measure(found: Results) -> list[Measured]:
        rows = _rows(found, quantized=True, variant=past_tables.NATIVE, quantization=quantization)
        if trained is not None:
            rows = rows[rows["weights"].isin(["stand-in", "untrained"]) != trained]
        return claims.by(rows, "model", str, value)

    return measure


def _alone(found: Results) -> list[Measured]:
    parts = {family: found.rows[(found.rows["family"] == family) & (found.rows["variant"] == variant)]
             for family, variant in _WITHOUT_PAST.items()}  # fmt: skip
    return [fact((rows["alone_max_abs"] > 0).sum(), tables.FAMILIES[f]) for f, rows in parts.items() if len(rows)]


def _variant(family: str, variant: str) -> Callable[[Results], list[Measured]]:
    return lambda found: claims.by(_rows(found, family=family, variant=variant), "model", str)


def _handed(deep: bool) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        rows = _rows(found, variant=past_tables.HANDED)
        return claims.by(rows[(rows["layers"] > 1) == deep], "layers", claims.layers)

    return measure


def _masked(found: Results) -> list[Measured]:
    falcon = found.rows[found.rows["family"] == "falcon"]
    both = falcon.pivot_table(index=["quantization", "source", "sample"], columns="variant", values="max_abs")
    if both.empty:
        return []
    differs = both[past_tables.UPPER_LEFT] != both[past_tables.BOTH]
    return [fact(part.sum(), claims.bits(name)) for name, part in differs.groupby(level="quantization")]


_ROUNDING, _NONE = claims.ROUNDING, claims.NO_TEXT
STATEMENTS: dict[str, Statement[Results]] = {
    "with-a-past-it-is-rounding": Statement(every(_BY_MODEL, "below", _ROUNDING), _with_past, headline=True),
    "four-bits-too": Statement(every(_BY_MODEL, "below", _ROUNDING), _quantized("4bit")),
    "eight-bits-in-small-models": Statement(
        every(_BY_MODEL, "below", _ROUNDING), _quantized("8bit", trained=False)
    ),
    "eight-bits-cost-more": Statement(
        every(_SPREAD, "above", Bound(0.01, "ours", "a hundredth of the spread of the logits")),
        _quantized("8bit", "relative_spread", trained=True),
        scope="this model",
    ),
    "no-past-is-the-last-token-alone": Statement(every(_NOT_ALONE, "at most", _NONE), _alone),
    "mask-loses-context": Statement(
        every(_BY_MODEL, "above", _ROUNDING), _variant("falcon", past_tables.UPPER_LEFT)
    ),
    "positions-lost-too": Statement(
        every(_BY_MODEL, "above", _ROUNDING), _variant("falcon", past_tables.NO_OFFSET)
    ),
    "mask-hides-positions": Statement(
        every(_OTHER, "at most", Bound(0, "arithmetic", "one key leaves nothing to choose")), _masked
    ),
    "one-layer-loses-nothing": Statement(every(_BY_DEPTH, "below", _ROUNDING), _handed(False)),
    "deeper-layers-lose": Statement(every(_BY_DEPTH, "above", _ROUNDING), _handed(True)),
}  # fmt: skip


def _most_apart(found: Results) -> pd.Series:
    """Give the row of the page's table whose two relative differences are furthest apart."""
    return found.apart.loc[found.apart["apart"].idxmax()]


def _spread(family: str, variant: str, quantization: str = "none") -> Callable[[Results], str]:
    def give(found: Results) -> str:
        table = found.variants
        rows = table[(table["family"] == family) & (table["variant"] == variant)]
        rows = rows[rows["quantization"] == quantization]
        return ", ".join(estimate.text("{:.2g}") for estimate in rows["spread"])

    return give


NUMBERS: dict[str, Callable[[Results], str]] = {
    "real_model": lambda found: found.past.about["models"][0]["name"],
    "n_texts": lambda found: str(len(found.rows[["source", "sample"]].drop_duplicates())),
    "mpt_off": _spread("mpt", past_tables.CACHE_OFF),
    "roberta_posted": _spread("roberta", past_tables.NO_PAST),
    "falcon_mask": _spread("falcon", past_tables.UPPER_LEFT),
    "falcon_rotary": _spread("falcon", past_tables.NO_OFFSET),
    "eight_bits": _spread("llama", past_tables.NATIVE, "8bit"),
    # Two digits.
    "relative_apart": lambda found: f"{float(format(_most_apart(found)['apart'], '.2g')):,.0f}",
    "relative_apart_names": lambda found: "{case}: {statistic}".format(**_most_apart(found)),
}
