"""The numbers and statements of the chapter on whether the difference matters."""

from collections.abc import Callable

from kvbook.measuring import estimates
from kvbook.measuring.estimates import Estimate
from kvreport.chapters.does_it_matter import drift_by_position, first_divergence, laid_out, results, tables, variants
from kvreport.chapters.does_it_matter.results import Results
from kvreport.publishing.judging import Measured, fact, with_units
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES, between

EXPERIMENTS = results.EXPERIMENTS
CACHE, OTHER, FAULT = first_divergence.CACHED, variants.OTHER_DTYPE.name, variants.LOST.name
GREEDY, SAMPLED = first_divergence.CHOICES
ASSISTED = first_divergence.ASSISTED
_TENTH = Bound(0.1, "ours", "one in ten", "share")
_FIFTH = Bound(0.2, "ours", "one in five", "share")

Measure = Callable[[Results], list[Measured]]


def _axis(column: str, way: str = CACHE, dtype: str = "") -> Measure:
    """Measure a statistic of a change on the fixed texts, by dtype."""

    def measure(found: Results) -> list[Measured]:
        if found.forced is None:
            return []
        rows = found.axes[(found.axes["way"] == way) & (found.axes["dtype"] == dtype if dtype else True)]
        return [Measured(DTYPES[row.dtype], getattr(row, column), row.files) for row in rows.itertuples()]

    return measure


def _over(under: str, *ways: str, dtype: str = "") -> Measure:
    """Measure the mean divergence of changes over that of another one, by dtype."""

    def measure(found: Results) -> list[Measured]:
        return [
            Measured(
                f"{way} {DTYPES[name]}" if len(ways) > 1 else DTYPES[name],
                estimates.paired_ratio(part.assign(variant=part["way"]), "kl", way, under),
                part["source"].nunique(),
            )
            for name, part in (found.forced.rows.groupby("dtype", sort=False) if found.forced else ())
            for way in ways
            if name == (dtype or name) and {way, under} <= set(part["way"])
        ]

    return measure


def _coarser(way: str) -> Measure:
    """Measure the mean divergence of a change in bf16 over that in fp32."""

    def measure(found: Results) -> list[Measured]:
        rows = found.forced.rows if found.forced else None
        if rows is None or not {"float32", "bfloat16"} <= set(rows.loc[rows["way"] == way, "dtype"]):
            return []
        rows = rows[rows["way"] == way]
        ratio = estimates.paired_ratio(rows.assign(variant=rows["dtype"]), "kl", "bfloat16", "float32")
        return [Measured("", ratio, rows["source"].nunique())]

    return measure


def _equal_rows(way: str, dtype: str) -> Measure:
    def measure(found: Results) -> list[Measured]:
        if found.forced is None:
            return []
        rows = found.axes[(found.axes["way"] == way) & (found.axes["dtype"] == dtype)]
        return [fact(row.bits_equal_share, DTYPES[row.dtype]) for row in rows.itertuples()]

    return measure


def _flip_margins(found: Results) -> list[Measured]:
    """Measure the largest margin in ulps at which only rounding flips the top-1 token."""
    if found.forced is None:
        return []
    lost = found.flips_by_rounding
    return [fact((lost["margin"] / lost["ulp"]).max())] if len(lost) else []


def _diverged(choice: str, dtype: str, way: str = CACHE) -> Measure:
    """Measure the share of texts that have left the baseline's at the end."""

    def measure(found: Results) -> list[Measured]:
        if found.parting is None or (curve := found.curves.get((dtype, choice, way))) is None:
            return []
        value, low, high = (1 - end for end in curve.at(found.written))
        return [Measured("", Estimate(value, high, low), curve.pairs)]

    return measure


def _growth(found: Results) -> list[Measured]:
    """Measure the cache's divergence in the last quarter of long texts over that in the first, by dtype."""
    if found.positions is None:
        return []
    units = found.positions.rows["source"].nunique()
    rows = found.growth[found.growth["way"] == drift_by_position.CHUNKS.name]
    return [Measured(DTYPES[row.dtype], row.ratio, units) for row in rows.itertuples()]


def _behind(column: str, dtype: str = "bfloat16") -> Measure:
    """Measure what pairs of texts are like after they have diverged."""

    def measure(found: Results) -> list[Measured]:
        if found.behind is None:
            return []
        rows = found.behind.rows[(found.behind.rows["offset"] > 0) & (found.behind.rows["dtype"] == dtype)]
        return [Measured("", estimates.mean_resampled(rows, column), rows["source"].nunique())] if len(rows) else []

    return measure


_DIVERGENCE = "mean divergence from the baseline"
_OVER_THE_CACHE = Quantity(f"{_DIVERGENCE}, over the cache's", "file", "change", "{:.3g}")
_FEW_BITS = (variants.KV_INT4.name, variants.WEIGHTS_8.name, variants.WEIGHTS_4.name)
_TIMES = Quantity(f"{_DIVERGENCE}, over that of computing in the other dtype", "file", form="{:.2g}")
_SHARE = Quantity("share of texts that have diverged at the end", "prompt")
_EQUAL = Quantity("share of tokens whose prediction is bitwise identical")
_COARSER = Quantity(f"{_DIVERGENCE} in bf16, over that in fp32", "file", form="{:.3g}")

_ALL = Bound(1, "arithmetic", "all")
_STATIC = Quantity(f"{_DIVERGENCE} with a static cache, over that with a dynamic one", "file", "dtype")
_STATIC_OVER_DYNAMIC = _over(variants.CHUNKS.name, variants.STATIC.name)
STATEMENTS: dict[str, Statement[Results]] = {
    "perplexity-stays": Statement(
        every(
            Quantity("perplexity with a cache, over that without", "file", "dtype", "{:.4f}"), "inside",
            Bound(1.01, "ours", "one per cent", "ratio"),
        ),
        _axis("perplexity_ratio"), headline=True,
    ),
    "bf16-as-the-dtype": Statement(
        every(_TIMES, "inside", Bound(2, "ours", "a factor of two", "ratio")),
        _over(OTHER, CACHE, dtype="bfloat16"), scope="this model", headline=True,
    ),
    "fp32-far-below-the-dtype": Statement(
        every(_TIMES, "below", Bound(1e-4, "ours", "a ten-thousandth")), _over(OTHER, CACHE, dtype="float32"), headline=True
    ),
    "fp8-moves-further": Statement(
        every(
            Quantity(f"{_DIVERGENCE}, over the cache's", "file", form="{:.2g}"), "above",
            Bound(2, "ours", "twice as far", "ratio"),
        ),
        _over(CACHE, variants.KV_FP8.name, dtype="bfloat16"), scope="this model",
    ),
    "fp8-further-than-int8": Statement(
        every(
            Quantity(f"{_DIVERGENCE} of keys and values in fp8, over that in 8 bits", "file", "dtype"), "above",
            Bound(1, "arithmetic", "as far"),
        ),
        _over(variants.KV_INT8.name, variants.KV_FP8.name), scope="this model",
    ),
    "few-bits-move-further": Statement(
        every(_OVER_THE_CACHE, "above", Bound(5, "ours", "five times as far", "ratio")),
        _over(CACHE, *_FEW_BITS, dtype="bfloat16"), scope="this model",
    ),
    "rounded-moves-further": Statement(
        every(_OVER_THE_CACHE, "above", Bound(1, "arithmetic", "as far")),
        _over(CACHE, variants.KV_FP8.name, variants.KV_INT8.name, *_FEW_BITS, dtype="bfloat16"), scope="this model",
    ),
    "int8-as-the-cache": Statement(
        every(
            Quantity(f"{_DIVERGENCE}, over the cache's", "file", form="{:.2f}"), "below", Bound(2, "ours", "twice as far", "ratio")
        ),
        _over(CACHE, variants.KV_INT8.name, dtype="bfloat16"), scope="this model",
    ),
    "static-moves-as-far": Statement(
        every(_STATIC, "inside", Bound(1.1, "ours", "a tenth", "ratio")), _STATIC_OVER_DYNAMIC,
        scope="this processor", on="Intel",
    ),
    "static-moves-less-on-amd": Statement(
        every(_STATIC, "below", Bound(0.2, "ours", "a fifth", "ratio")), _STATIC_OVER_DYNAMIC, scope="this processor", on="AMD",
    ),
    "a-batch-changes-nothing": Statement(
        every(_EQUAL, "at least", _ALL), _equal_rows(variants.BATCHED.name, "float32"), scope="this processor",
    ),
    "a-batch-changes-all-in-bf16": Statement(
        every(_EQUAL, "at most", Bound(0, "arithmetic", "none")), _equal_rows(variants.BATCHED.name, "bfloat16"),
        scope="this processor", on="Intel",
    ),
    "a-batch-changes-nothing-on-amd": Statement(
        every(_EQUAL, "at least", _ALL), _equal_rows(variants.BATCHED.name, "bfloat16"),
        scope="this processor", on="AMD",
    ),
    "rounding-shrinks": Statement(
        every(_COARSER, "above", Bound(1000, "ours", "a thousand times")), _coarser(CACHE), headline=True
    ),
    "a-fault-stays": Statement(
        every(_COARSER, "inside", Bound(1.25, "ours", "a quarter", "ratio")), _coarser(FAULT), headline=True
    ),
    "a-fault-looks-like-few-bits": Statement(
        every(
            Quantity(f"{_DIVERGENCE} of 4-bit weights, over the fault's", "file", "dtype"), "above",
            Bound(1, "arithmetic", "as far"),
        ),
        _over(FAULT, variants.WEIGHTS_4.name), scope="this model",
    ),
    "flips-at-small-margins": Statement(
        every(
            Quantity("largest margin in ulps at which only rounding flips the top-1 token", form="{:.3g}"), "at most",
            Bound(8, "ours", "a few ulps"),
        ),
        _flip_margins,
    ),
    "fp32-expects-no-flip": Statement(
        every(
            Quantity("share of top-1 flips expected from margins and shifts", "file", form="{:.1e}"), "below",
            Bound(1e-4, "ours", "one token in ten thousand"),
        ),
        _axis("expected_flips", dtype="float32"),
    ),
    "bf16-texts-diverge": Statement(
        every(_SHARE, "above", _FIFTH), _diverged(GREEDY, "bfloat16"), scope="this model", headline=True
    ),
    "fp32-texts-stay": Statement(every(_SHARE, "below", _TENTH), _diverged(GREEDY, "float32"), headline=True),
    "sampled-texts-diverge": Statement(
        every(_SHARE, "above", HALF), _diverged(SAMPLED, "bfloat16"), scope="this model"
    ),
    "assisted-texts-diverge": Statement(
        every(_SHARE, "above", _FIFTH), _diverged(GREEDY, "bfloat16", ASSISTED), scope="this model"
    ),
    "length-adds-little": Statement(
        every(
            Quantity("divergence in the last quarter of the positions, over that in the first", "file", "dtype"), "below",
            Bound(1.5, "ours", "half as much again", "ratio"),
        ),
        _growth,
    ),
    "texts-go-their-own-way": Statement(
        every(
            Quantity("divergence between texts that have diverged, each after its own tokens (nats)", "file"), "above",
            Bound(0.1, "ours", "a tenth of a nat"),
        ),
        _behind("kl_free"),
    ),
}  # fmt: skip


def _said(measure: Measure, write: Callable[[Estimate], str]) -> Callable[[Results], str]:
    return lambda found: ", ".join(write(one.estimate) for one in measure(found)) or "not run"


def _count(column: str, dtype: str) -> Callable[[Results], str]:
    """Count tokens at which the cache changes something."""

    def give(found: Results) -> str:
        rows = found.forced.rows
        rows = rows[(rows["way"] == CACHE) & (rows["dtype"] == dtype)]
        return f"{int(rows[column].sum()):,} of {len(rows):,}"

    return give


def _parted(choice: str, dtype: str, way: str = CACHE) -> Callable[[Results], str]:
    def give(found: Results) -> str:
        curve = found.curves.get((dtype, choice, way))
        return f"{curve.parted} of {curve.pairs}" if curve else "not run"

    return give


def _at_a_tie(dtype: str) -> Callable[[Results], str]:
    """Count greedy texts that diverge with a cache, and those among them at an exact tie."""

    def give(found: Results) -> str:
        rows = tables.ties(found.parting.rows)
        return tables.counted(rows.loc[(rows["dtype"] == dtype) & (rows["way"] == CACHE), "tied"])

    return give


def _ties(found: Results) -> str:
    lost = found.flips_by_rounding
    return f"{(lost['margin'] == 0).mean():.0%}"


NUMBERS: dict[str, Callable[[Results], str]] = {
    "model": lambda found: found.forced.about["models"][0]["name"],
    "n_texts": lambda found: str(found.forced.rows["sample"].nunique()),
    "n_tokens": lambda found: str(found.forced.about["settings"]["n_tokens"]),
    "n_scored": lambda found: f"{found.forced.rows.groupby(['dtype', 'way']).size().iloc[0]:,}",
    "n_prompts": lambda found: str(found.parting.rows["sample"].nunique()),
    "n_written": lambda found: str(found.written),
    "n_long": lambda found: str(found.positions.rows["sample"].nunique()),
    "n_longest": lambda found: f"{found.positions.rows['read_to'].max() + 1:,}",
    "n_pairs": lambda found: between(
        found.behind.rows.groupby("dtype")["sample"].nunique(), "{:.0f}"
    ),
    "head_right": lambda found: f"{found.forced.rows['decision_right'].mean():.0%}",
    "cache_perplexity_bf16": _said(_axis("perplexity_ratio", dtype="bfloat16"), lambda e: f"{laid_out.change(e)} %"),
    "cache_kl_fp32": _said(_axis("kl", dtype="float32"), laid_out.spread),
    "over_the_dtype": _said(_over(OTHER, CACHE, dtype="bfloat16"), lambda e: e.text("{:.1f}")),
    "fp8_over_the_cache": _said(_over(CACHE, variants.KV_FP8.name, dtype="bfloat16"), lambda e: e.text("{:.1f}")),
    "fp8_perplexity_bf16": _said(
        _axis("perplexity_ratio", variants.KV_FP8.name, "bfloat16"), lambda e: f"{laid_out.change(e)} %"
    ),
    "flips_fp32": _count("flip", "float32"),
    "flips_bf16": _count("flip", "bfloat16"),
    "decisions_bf16": _count("decision_flip", "bfloat16"),
    "ties": _ties,
    "one_in_fp32": _said(_axis("expected_flips", dtype="float32"), lambda e: laid_out.tokens(1 / e.value)),
    "parted_fp32": _parted(GREEDY, "float32"),
    "parted_bf16": _parted(GREEDY, "bfloat16"),
    "parted_fp32_share": lambda found: with_units(_diverged(GREEDY, "float32")(found), "prompts"),
    "parted_bf16_share": lambda found: with_units(_diverged(GREEDY, "bfloat16")(found), "prompts"),
    "parted_fp16": _parted(GREEDY, "float16"),
    "batched_bf16": _parted(GREEDY, "bfloat16", first_divergence.BATCHED),
    "one_pass_bf16": _parted(GREEDY, "bfloat16", first_divergence.ONE_PASS.name),
    "at_a_tie": _at_a_tie("bfloat16"),
    "at_a_tie_fp16": _at_a_tie("float16"),
    "sampled_bf16": _parted(SAMPLED, "bfloat16"),
    "assisted_bf16": _parted(GREEDY, "bfloat16", ASSISTED),
    "growth": lambda found: ", ".join(f"{one.series} {one.estimate.text('{:.2f}')}" for one in _growth(found)),
    "behind_kl": _said(_behind("kl_free"), lambda e: e.text("{:.1f}")),
    "behind_equal": _said(_behind("token_equal"), lambda e: f"{e.value:.0%}"),
}  # fmt: skip
