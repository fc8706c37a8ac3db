"""What the rows of the chapter on where drift begins say: its measures, then the sentences and the claim."""


import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.where_drift_begins import rows
from kvreport.publishing.estimators import computed, counted, distinct, mean, part, share, total
from kvreport.publishing.measures import Measure, always, claim, here, noted, of_model, worded
from kvreport.publishing.rules import HALF, NONE, Bound, anyone, every, refuted, reproduced
from kvreport.publishing.verdicts import Claims

# Operations that treat every row for itself.
_ROW_WISE = ("embedding", "elementwise", "norm")
_PRODUCTS, _COARSE = ("linear", "attention"), ("float16", "bfloat16")


def _draws(forms: pd.DataFrame) -> float:
    """Count the draws of one case."""
    return forms.groupby(["kernel", "dtype", "keys"])["compared_rows"].sum().max() / forms["heads"].max()


# Operations on equal inputs.
CALLS = Measure(
    "share of calls that differ on bitwise identical inputs", "file", "attention and kind", "{:.1%}",
    rows="calls", by=("attention", "kind"),
    estimate=lambda calls: estimates.share_of_rows(calls, calls["share"])[0],
).where(first=True)
ONE_ROW, SIXTEEN_ROWS = (CALLS.where(**{"pass": rows.last(count)}) for count in (1, 16))
LINEAR, ATTENTION = (ONE_ROW.where(attention="sdpa", kind=kind) for kind in ("linear", "attention"))
MOST_CALLS = Measure(
    "largest share of calls that differ on bitwise identical inputs", "", "kind", "{:.1%}", "all calls of all texts",
    rows="calls", by=("kind",), estimate=computed("share", "max"),
)
MOST_PREFILL = MOST_CALLS.where(**{"pass": rows.PREFILL}, first=True)
OTHER_PRODUCTS = CALLS.alike(rows="calls but down proj", by=(), keep=()).where(dtype="bfloat16")
MOST_LINEAR = MOST_CALLS.where(**{"pass": rows.last(1)}, first=True, kind="linear")
MOST_OTHER_PRODUCTS = MOST_CALLS.alike(rows="calls but down proj", by=()).where(dtype="bfloat16")

# The real decode step.
_BEGINS = Measure(
    "share of texts whose cached step begins to differ so", "file", "attention", "{:.0%}", rows="beginnings",
    by=("attention",),
).where(first=True)
BEGINS_AT_Q, BEGINS_LATER, BEGINS_IN_THE_STEP = (
    _BEGINS.alike(estimate=share(column)) for column in ("at_q", "later", "in_the_step")
)

# The new token or the cache.
STEPS = Measure(
    "share of texts whose last token's logits differ", "file", "dtype and length", "{:.0%}", rows="steps",
    by=("dtype", "n_tokens"), estimate=share("differs"),
)
DRIFT = STEPS.alike(
    "relative drift of the last token's logits, in unit roundoffs", mean("units"), form="{:.2f}",
    by=(*STEPS.by, "cache", "query"),
)
ONE_ROW_ALONE = STEPS.where(cache=rows.FROM_FULL, query=rows.ONE_ROW)
PREFILL_ALONE, DECODED_ALONE = (
    STEPS.where(cache=cache, query=rows.ALL_ROWS) for cache in (rows.FROM_PREFILL, rows.FROM_DECODE)
)
DIFFERING_BY_PREFILL = PREFILL_ALONE.alike(unit="", estimate=part("differs"))

# Prompts that are read twice.
DIFFERING = Measure(
    "prompts whose hidden states, keys, values or logits differ in a bit", "", "dtype", "{:.0f}", "all prompts",
    rows="prompts", by=("dtype",), estimate=total("differs"),
).where(shapes=rows.EQUAL)
_PROMPTS = DIFFERING.alike(unit="file", form="{:.2f}", census="", keep=())
EQUAL = _PROMPTS.alike("share of prompts in which none does", share("equal")).where(shapes=rows.EQUAL)
DIFFERING_IF_SHORTER = _PROMPTS.alike(
    "share of prompts whose hidden states, keys or values differ", share("differs"), form="{:.0%}"
).where(shapes=rows.FEWER)

# Lengths, sums and forms of the attention.
LENGTHS = Measure(
    "share of lengths with bitwise identical logits", "file", "dtype", "{:.0%}", rows="length_sweep", by=("dtype",),
    estimate=share("logits_equal"),
).where(attention="sdpa")
ALL_LENGTHS = LENGTHS.alike(unit="", census="all lengths of all texts", estimate=part("logits_equal"))
MOST_ROWS = Measure(
    "largest query length at which some row differs", "", "K", "{:.0f}", rows="differing products", by=("K",),
    estimate=computed("differing", "max"),
).where(threads=1)
LONGEST_SUM = MOST_ROWS.where(longest=True, dtype="bfloat16")
DIFFERING_ROWS = Measure(
    "share of rows that differ from the causal pass", "", "kernel and form", "{:.1%}", rows="attention_forms",
    by=("kernel", "form", "dtype"),
    estimate=counted(lambda forms: 1 - forms["equal_rows"].sum() / forms["compared_rows"].sum()),
)
ALONE, MASKED, HIDDEN_KEYS = (
    DIFFERING_ROWS.where(form=form) for form in (rows.ALONE, (rows.BOOLEAN, rows.ADDITIVE), rows.HIDDEN)
)

# Which code runs, as libraries report it.
KERNELS = Measure(
    "kernels that run an operation, over all numbers of rows", "", "dtype and operation", "{:.0f}",
    "all numbers of rows that were tried", rows="kernels by rows", by=("dtype", "operation"),
    estimate=distinct("kernel"),
)
OF_LINEAR, OF_ATTENTION = KERNELS.where(linear=True), KERNELS.where(linear=False)
REPORTED = KERNELS.alike(
    "numbers of rows at which a library reports its kernel",
    counted(lambda of: (of["kernel"] != rows.UNREPORTED).sum()),
).where(linear=True)
TALLEST = KERNELS.alike("most rows in a product of the attention", computed("height", "max"))

# In which order products add up.
_ORDERS = Measure(
    "", "", "dtype", "{:.0f}", "all shapes and numbers of rows that were tried", rows="orders", by=("dtype",),
    estimate=total("other"),
)
OTHER_ORDER = _ORDERS.alike("products of fewer rows that add in another order than that of the most").where(threads=1)
UNEXPLAINED = _ORDERS.alike("products of other bits in an equal order, or equal bits in another", total("unexplained"))
OTHER_BY_THREADS = _ORDERS.alike("products whose order changes with the number of threads", rows="with threads")
OTHER_KERNEL_BY_THREADS = OTHER_BY_THREADS.alike(
    "products whose kernel changes with the number of threads", total("kernel")
)
IN_A_ROW = _ORDERS.alike("most terms that a running sum takes one after another", computed("in_a_row", "max"))
SHORTEST = _ORDERS.alike(
    "shortest running sum of one row over that of the most rows", computed("longer", "min"), form="{:.2f}",
    rows="one against many",
)
LONGEST = SHORTEST.alike("longest running sum of one row over that of the most rows", computed("longer", "max"))
KEPT = _ORDERS.alike("least share of small terms that a sum keeps", computed("kept", "min"), form="{:.2f}").where(
    dtype=_COARSE
)

# Facts for the prose.
MODEL = noted("operation_replay", "models", 0, "name")
KERNELS_MODEL = noted("kernels", "models", 0, "name")
N_TOKENS = worded("calls", lambda calls: calls["tokens"].iloc[0])
LONGEST_SWEPT = noted("length_sweep", "longest")
MAX_ROWS = noted("gemm_map", "settings", "max_rows")
REPLAYED = Measure("texts", rows="operation_replay", estimate=distinct("sample"), form="{:.0f}")
SCORED, SWEPT, READ_TWICE = (REPLAYED.alike(rows=name) for name in ("cache_factorial", "length_sweep", "equal_shapes"))
HEADS = Measure("heads", rows="attention_forms", estimate=computed("heads", "max"), form="{:.0f}")
DRAWS = HEADS.alike("draws", counted(_draws)).where(form=rows.ALONE)

# What oneDNN was held to, on a processor that has later instructions.
_NO_BF16_INSTRUCTIONS, _AVX2 = "ONEDNN_MAX_CPU_ISA=AVX512_CORE", "ONEDNN_MAX_CPU_ISA=AVX2"
_PORTABLE = "MKL_CBWR=COMPATIBLE"
_ALIKE = Bound(1, "arithmetic", "as long")
_ONE = Bound(1, "arithmetic", "one for all")
_FOUR_IN_FIVE = Bound(0.8, "ours", "four in five", "share")
_ONE_IN_FIVE = Bound(0.2, "ours", "one in five", "share")
_SIXTEEN_ROWS = Bound(16, "ours", "as in the replay of 16 rows")

STATEMENTS = {
    "one-row-linear-fp32": here(ONE_ROW.where(dtype="float32", kind="linear"), "above", _FOUR_IN_FIVE, headline=True),
    "one-row-attention-fp32": here(ATTENTION.where(dtype="float32"), "above", _FOUR_IN_FIVE),
    "one-row-bf16": here(ONE_ROW.where(dtype="bfloat16", kind=_PRODUCTS), "below", _ONE_IN_FIVE, headline=True),
    "other-products-differ-in-bf16": here(OTHER_PRODUCTS, "above", NONE, on="Intel"),
    "down-proj-alone-in-bf16-on-amd": here(MOST_OTHER_PRODUCTS, "at most", NONE, on="AMD"),
    "row-wise-never": always(MOST_CALLS.where(kind=_ROW_WISE), "at most", NONE, headline=True),
    "control": always(MOST_CALLS.where(**{"pass": rows.ALL}), "at most", NONE),
    "sixteen-rows-linear-fp32": here(SIXTEEN_ROWS.where(dtype="float32", kind="linear"), "below", _ONE_IN_FIVE),
    "prefill-linear-never": here(MOST_PREFILL.where(dtype="float32", kind="linear"), "at most", NONE),
    "equal-shapes-equal-bits": always(DIFFERING, "at most", NONE),
    "one-token-fewer-differs": here(DIFFERING_IF_SHORTER.where(dtype="bfloat16"), "above", _ONE_IN_FIVE),
    "begins-at-q": of_model(BEGINS_AT_Q.where(dtype="float32"), "above", _FOUR_IN_FIVE),
    "bf16-begins-later": here(BEGINS_LATER.where(dtype="bfloat16"), "above", _FOUR_IN_FIVE),
    "bf16-begins-in-the-step": here(BEGINS_IN_THE_STEP.where(dtype="bfloat16"), "above", HALF),
    "one-row-is-enough": here(ONE_ROW_ALONE.where(dtype="float32"), "above", _FOUR_IN_FIVE, headline=True),
    "one-row-is-enough-in-bf16": here(ONE_ROW_ALONE.where(dtype="bfloat16"), "above", HALF),
    "prefill-is-not-enough": here(PREFILL_ALONE.where(dtype="float32"), "below", HALF),
    "decoded-cache-is-enough": here(DECODED_ALONE.where(dtype="float32"), "above", _FOUR_IN_FIVE),
    "no-length-agrees-fp32": here(ALL_LENGTHS.where(dtype="float32"), "at most", NONE),
    "some-lengths-agree-bf16": here(LENGTHS.where(dtype="bfloat16"), "above", NONE),
    "short-products-fp32": here(MOST_ROWS.where(dtype="float32"), "below", _SIXTEEN_ROWS),
    "short-sums-never-bf16": here(MOST_ROWS.where(dtype="bfloat16", longest=False), "at most", NONE),
    "a-long-sum-differs-bf16": here(LONGEST_SUM, "above", Bound(16, "ours", "more rows than in fp32"), on="Intel"),
    "a-long-sum-differs-for-one-row-on-amd": here(LONGEST_SUM, "at most", Bound(1, "arithmetic", "one row"), on="AMD"),
    "one-query-fp32": here(ALONE.where(dtype="float32"), "above", HALF),
    "one-query-bf16": here(ALONE.where(dtype="bfloat16"), "below", _ONE_IN_FIVE),
    "one-routine-for-linear": here(OF_LINEAR.where(dtype=("float32", "bfloat16")), "at most", _ONE, on="Intel"),
    "two-routines-for-linear-in-fp16": here(OF_LINEAR.where(dtype="float16"), "above", _ONE, on="Intel"),
    "two-routines-for-attention-in-bf16": here(OF_ATTENTION.where(dtype="bfloat16"), "above", _ONE, on="Intel"),
    "no-library-reports-linear-in-16-bits-on-zen-3": here(REPORTED.where(dtype=_COARSE), "at most", NONE, on="Zen 3"),
    "another-kernel-differs-in-other-products": here(OTHER_PRODUCTS, "above", NONE, on=_NO_BF16_INSTRUCTIONS),
    "no-library-reports-linear-in-bf16-held-to-avx2": here(REPORTED.where(dtype="bfloat16"), "at most", NONE, on=_AVX2),
    "no-linear-layer-differs-held-to-avx2": here(MOST_LINEAR.where(dtype="bfloat16"), "at most", NONE, on=_AVX2),
    "order-tells-bits": here(UNEXPLAINED, "at most", NONE),
    "down-proj-adds-in-another-order": here(OTHER_ORDER.where(dtype="bfloat16", last=True, rows=1), "above", NONE),
    "others-add-in-one-order": here(OTHER_ORDER.where(dtype="bfloat16", last=False), "at most", NONE, on="Zen 4"),
    "fp16-adds-in-one-order": here(OTHER_ORDER.where(dtype="float16"), "at most", NONE, on="Zen 4"),
    "others-too-on-intel": here(OTHER_ORDER.where(dtype="bfloat16", last=False, rows=1), "above", NONE, on="Intel"),
    "one-row-of-fp16-on-intel": here(OTHER_ORDER.where(dtype="float16", rows=1), "above", NONE, on="Intel"),
    "all-sums-are-shorter-on-intel": here(LONGEST.where(dtype="float32"), "below", _ALIKE, on="Intel"),
    "some-sums-are-shorter-in-fp32": here(SHORTEST.where(dtype="float32"), "below", _ALIKE, on="Zen 4"),
    "some-sums-are-longer-in-fp32": here(LONGEST.where(dtype="float32"), "above", _ALIKE, on="Zen 4"),
    "all-sums-are-longer-in-portable-code": here(SHORTEST.where(dtype="float32"), "above", _ALIKE, on=_PORTABLE),
    "sums-in-16-bits-keep-small-terms": here(KEPT, "above", Bound(0.9, "ours", "nine in ten", "share")),
    "threads-change-no-kernel": here(OTHER_KERNEL_BY_THREADS, "at most", NONE),
    "threads-change-orders-in-fp32": here(OTHER_BY_THREADS.where(dtype="float32"), "above", NONE),
    "threads-change-no-order-in-16-bits": here(OTHER_BY_THREADS.where(dtype=_COARSE), "at most", NONE, on="Zen 4"),
    "one-order-held-to-avx2": here(OTHER_ORDER.where(dtype="bfloat16"), "at most", NONE, on=_AVX2),
    "masks-alike": here(MASKED.where(dtype=("float32", "bfloat16")), "at most", NONE),
    "hidden-keys-change-rows": here(HIDDEN_KEYS.where(dtype="float32"), "above", NONE),
}

_EXACTLY = Bound(0, "document", "“exactly the same”")
CHECKS = {
    "prefill-exact": claim(
        refuted(anyone(DIFFERING, "above", _EXACTLY), one_is_enough=True),
        reproduced(every(DIFFERING, "at most", _EXACTLY), every(EQUAL, "above", HALF)),
        beside=lambda _: "what every operation of the pass gives is compared too",
    )
}
CLAIMS = Claims("issue-25420", CHECKS, chapter="05_where_drift_begins", words="where-drift-begins")
