"""What the rows of the chapter on exact caches say: its measures, then the sentences that they decide."""


from kvreport.chapters.exact_caches.rows import ALL, ATTENTION, BOTH, EXACT, PRODUCTS, SINGLE, STOCK
from kvreport.publishing.estimators import distinct, first, median_of_ratios, part, ratio_of_means, share, total
from kvreport.publishing.measures import Measure, always, here, noted, of_model
from kvreport.publishing.rules import HALF, NONE, Bound

DIFFERING = Measure(
    "rows that are not bitwise identical in {arithmetic} mode", "", "model and dtype", "{:.0f}",
    "all rows that were run", rows="ways", by=("model", "dtype"), estimate=total("differing"),
).where(arithmetic=EXACT)
DIFFERING_AT_LENGTH = DIFFERING.alike(series="dtype", rows="lengths", by=("dtype",))
DIFFERING_ON_RUNG = Measure(
    "rows that are not bitwise identical with both parts row-invariant", "", "dtype", "{:.0f}", rows="ladder",
    by=("dtype",), estimate=total("differing"),
).where(rung=BOTH)
STOCK_TEXTS_AT_LENGTH = Measure(
    "share of texts with a row that is not bitwise identical, {arithmetic}", "file", "dtype", rows="long texts",
    by=("dtype",), estimate=share("differing"),
).where(arithmetic=STOCK)
STOCK_TEXTS = Measure(
    "share of texts whose rows are all bitwise identical, {arithmetic}, {way}", "file", "model", rows="ways",
    by=("model",), estimate=share("identical"),
).where(arithmetic=STOCK, way=SINGLE)
ONE_PART = Measure(
    "share of texts whose rows are all bitwise identical with {rung} alone row-invariant", "file", "dtype",
    rows="ladder", by=("dtype",), estimate=share("identical"),
)
ERROR = Measure(
    "error of the full pass against fp64 in row-invariant mode, over stock's", "file", "dtype", rows="ladder",
    by=("dtype", "rung"), over=("rung", STOCK), estimate=ratio_of_means("error_rms"),
).where(rung=ALL)
ERROR_OF_STEPS = ERROR.alike(
    ERROR.name.replace("the full pass", "tokens fed one by one"), ratio_of_means("step_error_rms")
)
PRICE = Measure(
    "time in row-invariant mode over stock's", "repeat", "phase", rows="times", by=("phase", "arithmetic"),
    over=("arithmetic", STOCK), estimate=median_of_ratios("seconds"),
)

# Facts for the prose.
MODEL = noted("exact_ladder", "models", 0, "name")
N_TOKENS = noted("exact_ways", "settings", "n_tokens")
TEXTS = Measure("texts", rows="exact_ways", estimate=distinct("sample"), form="{:.0f}")
TEXTS_ON_RUNGS, LONG_TEXTS = (TEXTS.alike(rows=rows) for rows in ("exact_ladder", "exact_lengths"))
LONG_LENGTHS = Measure("tokens", rows="exact_lengths", by=("n_tokens",), estimate=first("n_tokens"), form="{:,.0f}")
WAYS = Measure("ways to feed a text", rows="exact_ways", estimate=distinct("way"), form="{:.0f}")
OTHERS = Measure("stand-ins", rows="ways", estimate=distinct("model"), form="{:.0f}").where(own=False)
_IDENTICAL = Measure("rows that are bitwise identical", rows="ways", estimate=part("equal_rows", "rows"))
EXACT_ROWS, EXACT_ROWS_OF_OTHERS = (_IDENTICAL.where(arithmetic=EXACT, own=own) for own in (True, False))
EXACT_ROWS_AT_LENGTH = _IDENTICAL.alike(rows="lengths").where(arithmetic=EXACT)
STOCK_ROWS = _IDENTICAL.where(arithmetic=STOCK, way=SINGLE, own=True)

_ATTENTION_IN_BF16 = ONE_PART.where(rung=ATTENTION, dtype="bfloat16")
_TENTH_MORE = Bound(1.1, "ours", "a tenth more", "ratio")
_QUARTER = Bound(0.25, "ours", "one in four", "share")

STATEMENTS = {
    "no-row-differs": always(DIFFERING, "at most", NONE, headline=True),
    "no-row-differs-at-length": always(DIFFERING_AT_LENGTH, "at most", NONE, headline=True),
    "stock-differs-at-length": here(STOCK_TEXTS_AT_LENGTH, "above", HALF),
    "stock-differs-in-fp32": here(STOCK_TEXTS.where(dtype="float32"), "below", _QUARTER),
    "products-alone-are-not-enough": of_model(
        ONE_PART.where(rung=PRODUCTS, dtype=("float32", "bfloat16")), "below", HALF
    ),
    "attention-alone-is-not-enough-in-fp32": of_model(ONE_PART.where(rung=ATTENTION, dtype="float32"), "below", HALF),
    "attention-alone-is-enough-in-bf16": here(_ATTENTION_IN_BF16, "above", HALF, on="Intel"),
    "attention-alone-is-not-enough-on-amd": here(_ATTENTION_IN_BF16, "below", HALF, on="AMD"),
    "products-and-attention-are-enough": here(DIFFERING_ON_RUNG, "at most", NONE),
    "error-is-no-larger": of_model(ERROR, "at most", _TENTH_MORE),
    "error-of-steps-is-no-larger": of_model(ERROR_OF_STEPS, "at most", _TENTH_MORE),
    "error-in-fp32-is-smaller": of_model(ERROR.where(dtype="float32"), "below", Bound(1, "arithmetic", "as large")),
    "price-is-small": here(PRICE, "below", Bound(1.25, "ours", "a quarter more time", "ratio")),
}
