"""Measures of the chapter on whether the difference matters, then the sentences that they decide."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import scipy

from kvbook.measuring import estimates
from kvreport.chapters.does_it_matter import rows as named
from kvreport.publishing.estimators import counted, distinct, geometric_mean, mean, part, ratio_of_means, share, total
from kvreport.publishing.measures import Measure, always, here, noted, of_model, worded
from kvreport.publishing.rules import ALL, HALF, NONE, Bound

# Draws for what has to be sorted anew in each.
_DRAWS = 200
# Share of the smallest margins below which their density is taken as even, so that margins smaller than any that was
# met have their chance too.
_EVEN = 0.05


def of_all_rows(statistic: Callable[..., float], *columns: str):
    """Statistic of columns' rows with its bootstrap interval over files, or of few files with its range over them."""

    def estimate(rows: pd.DataFrame) -> estimates.Estimate:
        files = [part[list(columns)].to_numpy() for _, part in rows.groupby("source", sort=True)]
        return estimates.of_units(lambda rows: statistic(*rows.T), files, _DRAWS)

    return estimate


def expected_flips(margins: np.ndarray, shifts: np.ndarray) -> float:
    """Predict the share of flips from how large margins are and how much they are shifted.

    The second choice overtakes the first where the margin is smaller than the loss that the shift brings.  Margins and
    shifts are taken as independent, so a single number of the one is held against the whole distribution of the other;
    and below the smallest twentieth of the margins their density is taken as even.  Both make an estimate possible
    where no flip was seen at all, and it is no better than they are.  In 16 bits many margins are exactly 0; those are
    spread as far as the smallest one that is not, for no shift loses nothing.
    """
    places, counts = np.unique(margins, return_counts=True)
    shares = np.cumsum(counts) / len(margins)
    known = (places > 0) & (shares >= _EVEN)
    # The distribution function of margins, even from 0 to the edge.
    places, shares = (np.concatenate([[0.0], values[known]]) for values in (places, shares))
    return float(np.interp(np.maximum(-shifts, 0.0), places, shares).mean())


def _one_in(rows: pd.DataFrame) -> float:
    share = expected_flips(rows["margin"].to_numpy(), rows["shift"].to_numpy())
    return estimates.two_digits(1 / share) if share else np.inf


def _over_what_differs(rows: pd.DataFrame, other: pd.DataFrame) -> estimates.Estimate | None:
    return ratio_of_means("kl")(rows, other) if other["kl"].min() > 0 else None


def _over_the_same_texts(column: str):
    """Ratio of means to those of other rows, such as the first positions', of the texts that have both."""
    return lambda rows, other: ratio_of_means(column)(rows, other[other["sample"].isin(rows["sample"])])


def equal_at_the_end(texts: pd.DataFrame) -> estimates.Estimate:
    """Share of texts that have not diverged, with Greenwood's interval on the log-log scale; of few their range.

    It is the last point of Kaplan and Meier's curve, for every text was watched to its end.
    """
    # Each pair goes on from a prompt of its own.
    equal = (texts["parted"] == 0).astype(float)
    n, share = len(texts), float(equal.mean())
    if n < estimates.FEWEST_UNITS:
        return estimates.Estimate(share, equal.min(), equal.max(), "range")
    # The variance is 0 where none has diverged, and undefined where all have.
    if share in (0, 1):
        return estimates.wilson(share, n)
    half = scipy.special.ndtri((1 + estimates.CONFIDENCE) / 2) * np.sqrt((1 - share) / (n * share)) / np.log(share)
    return estimates.Estimate(share, *(float(share ** np.exp(side * half)) for side in (-1, 1)))


def _rest(share_of: Callable[[pd.DataFrame], estimates.Estimate]):
    """Share of the others."""

    def estimate(rows: pd.DataFrame) -> estimates.Estimate:
        of = share_of(rows)
        return estimates.Estimate(1 - of.value, 1 - of.high, 1 - of.low, of.kind, of.units)

    return estimate


# The same texts, token by token: how far each change moves the predictions.
_BY_CHANGE = ("dtype", "way")
DIVERGENCE = Measure(
    "mean divergence from the baseline", "file", "dtype and change", "{:.2g}", rows="changes", by=_BY_CHANGE,
    estimate=mean("kl"),
)
TAIL = DIVERGENCE.alike(
    "divergence below which 99 % of the tokens lie", of_all_rows(lambda kl: np.quantile(kl, 0.99), "kl")
)
PERPLEXITY = DIVERGENCE.alike("perplexity, over the baseline's", mean("dlogp", lambda of: np.exp(-of)), form="{:.4f}")
PERPLEXITY_BEFORE = DIVERGENCE.alike("perplexity of the baseline", mean("nll", np.exp))
PERPLEXITY_AFTER = DIVERGENCE.alike("perplexity", mean("nll_way", np.exp))
DELTA_P = DIVERGENCE.alike("change of the true token's probability", mean("delta_p"))
RMS_DELTA_P = DELTA_P.alike("its root mean square", mean("delta_p_squared", np.sqrt))
SAME_TOP = DIVERGENCE.alike("share of tokens with the baseline's top-1 token", share("same_top"))
SAME_DECISION = DIVERGENCE.alike("share of tokens with the same decision", share("same_decision"))
FLIPPED = DIVERGENCE.alike("share of top-1 flips", _rest(share("same_top")))
EXPECTED_FLIPS = DIVERGENCE.alike(
    "share of top-1 flips expected from margins and shifts", of_all_rows(expected_flips, "margin", "shift"),
    form="{:.1e}",
)
EQUAL = Measure(
    "share of tokens whose prediction is bitwise identical", rows="changes", by=_BY_CHANGE, estimate=part("bits_equal")
)


OUTSIDE = SAME_TOP.alike(
    "share of tokens whose probability changes by more than a tenth", share("outside"), form="{:.1%}"
).where(way=named.CACHED)


def _over(way: str, whose: str) -> Measure:
    """Compare changes with another one."""
    return DIVERGENCE.alike(f"{DIVERGENCE.name}, over {whose}", ratio_of_means("kl"), over=("way", way))


OVER_THE_DTYPE = _over(named.OTHER_DTYPE, "that of computing in the other dtype").where(way=named.CACHED)
OVER_THE_CACHE = _over(named.CACHED, "the cache's").where(dtype="bfloat16")
FP8_OVER_THE_CACHE = OVER_THE_CACHE.where(way=named.KV_FP8)
STATIC_OVER_DYNAMIC = _over(named.CHUNKS, "that of a dynamic cache").where(way=named.STATIC)
IN_BF16 = DIVERGENCE.alike(
    f"{DIVERGENCE.name} in bf16, over that in fp32", ratio_of_means("kl"), over=("dtype", "float32")
).where(dtype="bfloat16")
PERPLEXITY_OF_CACHE, PERPLEXITY_OF_FP8 = (PERPLEXITY.where(way=way) for way in (named.CACHED, named.KV_FP8))
DIVERGENCE_OF_CACHE = DIVERGENCE.where(way=named.CACHED)
ONE_IN = EQUAL.alike("tokens to one flip that is expected", counted(_one_in), form="{:,.0f}").where(way=named.CACHED)
LARGEST_MARGIN = Measure(
    "largest margin in ulps at which only rounding flips the top-1 token", form="{:.3g}", rows="rounding",
    estimate=counted(lambda rows: rows["ulps"].max()),
).where(flip=1)
NARROW = EQUAL.alike(
    "share of tokens with a narrow margin", lambda rows: part("narrow")(rows.assign(narrow=rows["ulps"] <= _FEW.value))
).where(way=named.CACHED)
FLIPS_AT_A_TIE = LARGEST_MARGIN.alike("share of these flips at a tie", part("at_a_tie"), form="{:.0%}")

# The same on caches of few bits.
IN_FEW_BITS = {
    "divergence": DIVERGENCE.alike(rows="quantized"), "perplexity": PERPLEXITY.alike(rows="quantized"),
    "same_top": SAME_TOP.alike(rows="quantized"), "outside": OUTSIDE.alike(rows="quantized", keep=()),
    "bits": DIVERGENCE.alike("bits of a number", counted(lambda of: of["bits"].iloc[0]), unit="", rows="quantized"),
}
QUANTIZED = IN_FEW_BITS["divergence"]
PERPLEXITY_IN_TWO_BITS = IN_FEW_BITS["perplexity"].alike(rows="on all backends").where(way=named.TWO_BITS)
# Of equal bytes: the pairs have as many bits.
HQQ_OVER_QUANTO, ROWS_OVER_STRIDES = (
    QUANTIZED.alike(
        f"divergence by “{way}”, over that by “{other}”", ratio_of_means("kl"), form="{:.1f}",
        by=("dtype", "bits", "way"), over=("way", other),
    ).where(way=way)
    for way, other in ((named.HQQ_4, named.QUANTO_4), (named.HQQ_ROWS, named.HQQ_4))
)
KEYS_OVER_VALUES = HQQ_OVER_QUANTO.alike(
    "divergence with keys in few bits, over that with values", keep=(),
    over=("way", lambda way, _: way.replace("keys", "values")),
)
OVER_DRIFT = QUANTIZED.alike(
    "divergence, over that of a plain cache fed 5 tokens at once", ratio_of_means("kl"), form="{:.1f}",
    over=("way", named.CHUNKS),
)
DRIFT_BESIDE, HQQ_8_OVER_DRIFT = QUANTIZED.where(way=named.CHUNKS), OVER_DRIFT.where(way=named.HQQ_8)

# The model writes: which texts have left the baseline's at the end.
EQUAL_AT_THE_END = Measure(
    "share of texts that equal the baseline's at the end", "prompt", "dtype", rows="texts",
    by=("dtype", "choice", "way"), estimate=equal_at_the_end,
)
_DIVERGED = EQUAL_AT_THE_END.alike("share of texts that have diverged at the end", _rest(equal_at_the_end))
DIVERGED, DIVERGED_TOGETHER, DIVERGED_IN_ONE_PASS = (
    _DIVERGED.where(choice=named.GREEDY, way=way) for way in (named.CACHED, named.TOGETHER, named.ONE_PASS)
)
DIVERGED_SAMPLED = _DIVERGED.where(choice=named.SAMPLED, way=named.CACHED)
AT_A_TIE = Measure(
    "share of greedy divergences at an exact tie", "prompt", "dtype", rows="divergences", by=("dtype", "way"),
    estimate=share("tied", "prompt"),
).where(way=named.CACHED)

# What a user changes, one change at a time, beside the reference or beside other changes.
MOVED_BESIDE = Measure(
    "share of texts that a change moves", "prompt", "dtype and change", "{:.0%}", rows="one change",
    by=("dtype", "choice", "change", "beside"), estimate=share("differs", "prompt"),
)
MOVED = MOVED_BESIDE.where(choice=named.GREEDY, beside="")
MOVED_AT_A_TIE = Measure(
    "share of greedy divergences at an exact tie", "prompt", "dtype", "{:.0%}", rows="texts that a change moves",
    by=("dtype",), estimate=part("tied"),
)
MOVED_NEAR_A_TIE = MOVED_AT_A_TIE.alike("share of them at most one ulp from a tie", part("near"))
# Of a dtype the rows have what `planned` chose.
COMBINATIONS = worded("usage_factorial", lambda of: "{} of {}".format(*named.counts(of)))
USAGE_PROMPTS = Measure("prompts", rows="usage_factorial", estimate=distinct("sample"), form="{:.0f}")
USAGE_WRITTEN = USAGE_PROMPTS.alike("tokens written", counted(lambda rows: rows["path"].str.split().str.len().max()))

# Along a text, and around the place where two texts diverge.
ALONG = DIVERGENCE.alike(rows="drift_by_position", by=("dtype", "way", "bin"))
OVER_THE_FIRST_QUARTER = Measure(
    "divergence in some positions, over that in the first quarter of them", "file", "dtype", rows="places",
    by=("dtype", "way", "place"), over=("place", named.FIRST), estimate=_over_what_differs,
)
GROWTH = OVER_THE_FIRST_QUARTER.where(way=named.LONG_CHUNKS, place=named.LAST)
# Up to the model's context, each text beside its own first positions after the first piece.
BY_POSITION = Measure(
    "divergence of the cached pass from the uncached one", "file", "dtype and positions", "{:.1e}", rows="by position",
    by=("dtype", "bin"), estimate=mean("kl"),
)


def _growth(name: str, column: str) -> Measure:
    """Compare some positions with the same texts' first ones."""
    over = f"{name}, over that at the same texts' first positions"
    rows = "long ways" if column.startswith("error") else "passes apart"
    growth = BY_POSITION.alike(over, _over_the_same_texts(column), form="{:.2f}", rows=rows, over=("bin", 0))
    return growth.where(way=named.DYNAMIC)


DIVERGENCE_GROWTH, DRIFT_GROWTH = _growth(BY_POSITION.name, "kl"), _growth("drift between the two passes", "drift")
ERROR_GROWTH = _growth("error of the cached pass against fp64", "error")
UNCACHED_ERROR_GROWTH = _growth("error of the uncached pass against fp64", "error_full")
MOST_DIVERGENCE = BY_POSITION.alike(
    "most of these divergences", counted(lambda rows: rows.groupby("bin")["kl"].mean().max()), unit="", by=("dtype",),
    form="{:.0e}",
)
CACHED_OVER_UNCACHED = BY_POSITION.alike(
    "error of the cached pass against fp64, over that of the uncached one", geometric_mean("ratio"), form="{:.2f}"
)
STATIC_DRIFT = BY_POSITION.alike(
    "drift of a static cache's pass, over that of a dynamic one's", _over_the_same_texts("drift"), form="{:.2f}",
    rows="passes apart", by=("dtype", "way", "bin"), over=("way", named.DYNAMIC),
).where(way=named.PREALLOCATED)
PIECES_EQUAL = Measure(
    "share of long texts whose logits in pieces are bitwise identical to one pass's", rows="in whole pieces",
    by=("dtype",), estimate=part("equal"),
)
# Past a window that slides along the same texts.
_EXCESS = Measure(
    "loss above that of the window read anew (nats a token)", "file", "dtype and way", "{:.2f}", rows="windows",
    by=("dtype", "way"), estimate=mean("excess"),
)
FORGOTTEN = _EXCESS.where(way=named.OLDEST_DROPPED)
FIRST_KEPT = _EXCESS.alike(form="{:.3f}").where(way=named.FIRST_KEPT)
NEXT_KEPT = _EXCESS.where(way=named.NEXT_KEPT)
LOST_ALONG = _EXCESS.alike(by=("dtype", "way", "bin"))
WINDOW_KL = _EXCESS.alike("divergence from the window read anew (nats)", mean("kl"))
AFTER = Measure(
    "divergence between texts that have diverged, each after its own tokens (nats)", "file", "dtype", "{:.1f}",
    rows="after", by=("dtype",), estimate=mean("kl_free"),
)
EQUAL_AFTER = AFTER.alike("share of tokens that are equal", mean("token_equal"), form="{:.0%}")
AROUND_FREE = AFTER.alike(rows="after_divergence", by=("dtype", "offset"))
AROUND_FORCED = AROUND_FREE.alike("divergence on one text's tokens (nats)", mean("kl_forced"))

# Facts for the prose.
MODEL = noted("teacher_forced", "models", 0, "name")
N_TOKENS = noted("teacher_forced", "settings", "n_tokens")
TEXTS = Measure("texts", rows="teacher_forced", estimate=distinct("sample"), form="{:,.0f}")
QUANTIZED_TEXTS = TEXTS.alike(rows="quantized")
KEPT_EXACT = TEXTS.alike("newest tokens kept exact", counted(lambda rows: rows["exact"].max()), rows="quantized")
QUANTIZED_TOKENS = noted("quantized_caches", "settings", "n_tokens")
SCORED = TEXTS.alike("tokens scored", counted(len), by=_BY_CHANGE).where(way=named.CACHED)
FLIPS = SCORED.alike("tokens at which the cache flips the top-1 token", total("flip"))
OTHER_DECISIONS = SCORED.alike("tokens at which the cache changes a decision", total("decision_flip"))
HEAD_RIGHT = TEXTS.alike("share of decisions that are right", part("decision_right"), form="{:.0%}")
PROMPTS = TEXTS.alike("prompts", rows="first_divergence")
WRITTEN = TEXTS.alike("tokens written", counted(lambda texts: texts["written"].iloc[0]), rows="texts")
LONG_TEXTS = TEXTS.alike("long texts", rows="drift_by_position")
LONGEST = LONG_TEXTS.alike("their tokens", counted(lambda rows: rows["read_to"].max() + 1))
# Files, of which a few were cut twice.
POSITION_TEXTS = LONG_TEXTS.alike(rows="by position", by=("dtype", "bin"), estimate=distinct("source"))
LIMIT = noted("long_contexts", "models", 0, "context_length", write="{:,}".format)
POSITION_LENGTH = POSITION_TEXTS.alike("tokens of the longest", counted(lambda of: of["length"].max()), by=())
WINDOW_TEXTS = POSITION_TEXTS.alike(rows="windows", by=("bin",))
PAIRS = TEXTS.alike("pairs of texts that diverged", rows="after_divergence", by=("dtype",))

_AS_FAR = Bound(1, "arithmetic", "as far")
_HALF_MORE = Bound(1.5, "ours", "half as much again", "ratio")
_TWICE = Bound(2, "ours", "twice as far", "ratio")
_FIVE_TIMES = Bound(5, "ours", "five times as far", "ratio")
_FIFTH_OF_A_NAT, _FIFTIETH_OF_A_NAT = Bound(0.2, "ours", "a fifth of a nat"), Bound(0.02, "ours", "a fiftieth of a nat")
_TENTH = Bound(0.1, "ours", "one in ten", "share")
_FIFTH = Bound(0.2, "ours", "one in five", "share")
_ONE_PER_CENT = Bound(1.01, "ours", "one per cent", "ratio")
_FACTOR_OF_TWO = Bound(2, "ours", "a factor of two", "ratio")
_TEN_THOUSANDTH = Bound(1e-4, "ours", "a ten-thousandth")
_THOUSANDFOLD = Bound(1000, "ours", "a thousand times")
_QUARTER = Bound(1.25, "ours", "a quarter", "ratio")
_FEW = Bound(8, "ours", "a few ulps")
_RARELY = Bound(1e-4, "ours", "one token in ten thousand")
# Of the bins of positions, the last one that four texts reach: from 1,448 tokens on.
_FAR = 5
# The last one of a chat, from 192 tokens on; of longer texts it is the one that ends at 1,024.
_END_OF_A_CHAT = 3
_FEW_BITS = (named.KV_INT4, named.WEIGHTS_8, named.WEIGHTS_4)
_BATCHED = {dtype: EQUAL.where(way=named.BATCHED, dtype=dtype) for dtype in ("float32", "bfloat16")}
STATEMENTS = {
    "perplexity-stays": always(PERPLEXITY_OF_CACHE, "inside", _ONE_PER_CENT, headline=True),
    "bf16-as-the-dtype": of_model(OVER_THE_DTYPE.where(dtype="bfloat16"), "inside", _FACTOR_OF_TWO, headline=True),
    "fp32-far-below-the-dtype": always(OVER_THE_DTYPE.where(dtype="float32"), "below", _TEN_THOUSANDTH, headline=True),
    "fp8-moves-further": of_model(FP8_OVER_THE_CACHE, "above", _TWICE),
    "fp8-further-than-int8": of_model(
        _over(named.KV_INT8, "that of our 8 bits").where(way=named.KV_FP8), "above", _AS_FAR
    ),
    "few-bits-move-further": of_model(OVER_THE_CACHE.where(way=_FEW_BITS), "above", _FIVE_TIMES),
    "rounded-moves-further": of_model(OVER_THE_CACHE.where(way=named.FEWER_BITS), "above", _AS_FAR),
    "keys-need-more-bits": of_model(KEYS_OVER_VALUES, "above", _AS_FAR),
    "five-bits-beyond-drift": of_model(OVER_DRIFT.alike(rows="in five bits"), "above", _FIVE_TIMES),
    "hqq-along-rows": of_model(ROWS_OVER_STRIDES, "below", Bound(0.5, "ours", "half as far", "ratio")),
    "hqq-further-than-quanto": of_model(HQQ_OVER_QUANTO, "above", _AS_FAR),
    "two-bits-double-the-perplexity": of_model(PERPLEXITY_IN_TWO_BITS, "above", Bound(2, "ours", "twice", "ratio")),
    "int8-as-the-cache": of_model(OVER_THE_CACHE.where(way=named.KV_INT8), "below", _TWICE),
    "static-moves-as-far": here(STATIC_OVER_DYNAMIC, "inside", Bound(1.1, "ours", "a tenth", "ratio"), on="Intel"),
    "static-moves-less-on-amd": here(STATIC_OVER_DYNAMIC, "below", Bound(0.2, "ours", "a fifth", "ratio"), on="AMD"),
    "a-batch-changes-nothing": here(_BATCHED["float32"], "at least", ALL),
    "a-batch-changes-all-in-bf16": here(_BATCHED["bfloat16"], "at most", NONE, on="Intel"),
    "a-batch-changes-nothing-on-amd": here(_BATCHED["bfloat16"], "at least", ALL, on="AMD"),
    "rounding-shrinks": always(IN_BF16.where(way=named.CACHED), "above", _THOUSANDFOLD, headline=True),
    "a-fault-stays": always(IN_BF16.where(way=named.FAULT), "inside", _QUARTER, headline=True),
    "a-fault-looks-like-few-bits": of_model(
        _over(named.FAULT, "the fault's").where(way=named.WEIGHTS_4), "above", _AS_FAR
    ),
    "flips-at-small-margins": always(LARGEST_MARGIN, "at most", _FEW),
    "fp32-expects-no-flip": always(EXPECTED_FLIPS.where(way=named.CACHED, dtype="float32"), "below", _RARELY),
    "bf16-texts-diverge": of_model(DIVERGED.where(dtype="bfloat16"), "above", _FIFTH, headline=True),
    "fp32-texts-stay": always(DIVERGED.where(dtype="float32"), "below", _TENTH, headline=True),
    "sampled-texts-diverge": of_model(DIVERGED_SAMPLED.where(dtype="bfloat16"), "above", HALF),
    "fp32-texts-stay-whatever-changes": of_model(MOVED.where(dtype="float32"), "below", _FIFTH),
    "a-batch-moves-few-texts-on-amd": here(MOVED.where(dtype="bfloat16", change=named.EIGHT), "below", HALF, on="AMD"),
    "what-moves-is-near-a-tie": always(MOVED_NEAR_A_TIE.where(dtype="bfloat16"), "at least", ALL),
    "length-adds-little": always(GROWTH, "below", _HALF_MORE),
    # Up to 4,096 tokens: English prose has two files that are longer.
    "divergence-stays-along-texts": always(DIVERGENCE_GROWTH.where(bin=tuple(range(1, 8))), "below", _HALF_MORE),
    "drift-stays-along-texts": always(DRIFT_GROWTH.where(bin=(_END_OF_A_CHAT, _FAR)), "inside", _HALF_MORE),
    "pieces-give-equal-bits": here(PIECES_EQUAL.where(dtype="float32"), "at least", ALL, on="Intel"),
    "zen-4-pieces-differ": here(PIECES_EQUAL.where(dtype="float32"), "at most", NONE, on="Zen 4"),
    "errors-grow-along-long-texts": of_model(UNCACHED_ERROR_GROWTH.where(dtype="float32", bin=_FAR), "above", _TWICE),
    "errors-stay-in-bf16": of_model(UNCACHED_ERROR_GROWTH.where(dtype="bfloat16", bin=_FAR), "inside", _HALF_MORE),
    "a-static-cache-drifts-as-far": here(STATIC_DRIFT.where(bin=_FAR), "inside", _HALF_MORE),
    "the-oldest-tokens-are-missed": of_model(FORGOTTEN, "above", _FIFTH_OF_A_NAT),
    "the-first-tokens-are-enough": of_model(FIRST_KEPT, "below", _FIFTIETH_OF_A_NAT),
    "other-early-tokens-are-not": of_model(NEXT_KEPT, "above", _FIFTH_OF_A_NAT),
    "texts-go-their-own-way": always(AFTER.where(dtype="bfloat16"), "above", Bound(0.1, "ours", "a tenth of a nat")),
}
