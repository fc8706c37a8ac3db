"""What the rows of the chapter on reusing a prompt's cache say: its measures, then the sentences and the claims."""

from typing import Any

import pandas as pd

from kvreport.chapters.prompt_reuse import rows as named
from kvreport.publishing.estimators import computed, counted, distinct, first, part, share, total
from kvreport.publishing.found import Found
from kvreport.publishing.measures import Measure, always, claim, either, here, noted, of_model
from kvreport.publishing.rules import ALL, HALF, NONE, Bound, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims
from kvreport.publishing.wording import DTYPES

_FP32, _BF16 = "float32", "bfloat16"

EQUAL = Measure(
    "share of prompts whose tokens equal those without reuse", "prompt", "case and dtype", rows="continuations",
    by=("case", "dtype"), estimate=share("equal", "prompt"),
)
EQUAL_BY_WAY = EQUAL.alike(by=("case", "dtype", "way"))
AFTER_SPACE, BEFORE_SPACE, TEMPLATE = (
    EQUAL.where(way=named.AS_IS, case=case) for case in (named.DOCUMENTED, named.SPACE, named.CHAT)
)
MISMATCHED = Measure(
    "share of prompts whose ids do not begin with the prefix's", "prompt", "model", rows="prompts", by=("model",),
    estimate=share("mismatch", "prompt"),
).where(case=named.DOCUMENTED, finest=True)
ROUNDED = Measure(
    "runs whose ids continue and whose tokens differ in bf16", "", "case", "{:.0f}", rows="prompts", by=("case",),
    estimate=total("differs"),
).where(case=(named.SPACE, named.CHAT), dtype=_BF16)
FED_AGAIN = Measure(
    "share of runs with the whole prompt cached that feed it again", rows="continuations", estimate=part("fed_again")
).where(case=named.WHOLE, way=named.AS_IS)

CHANGED = Measure(
    "share of cuts after which the first part's ids do not begin the whole text's", "file", "vocabulary",
    rows="tokenizer boundaries", by=("tokenizer",), estimate=share("changes"),
)
CHANGED_BY_PLACE = CHANGED.alike(by=("tokenizer", "place"))
LOST = CHANGED.alike(
    "mean number of tokens that a cut leaves unshared", computed("lost", "mean"), unit="", form="{:.1f}"
).where(place=named.ANYWHERE)

DIFFERING = Measure(
    "keys and values of the response that differ, in all layers", "", "model and dtype", "{:,.0f}",
    rows="keys and values", by=("model", "dtype", "variant"), estimate=total("n_differing"),
).where(part="response")
CHANGE = DIFFERING.alike(
    "change of the number of differing elements by the switch",
    counted(lambda switched, posted: abs(switched["n_differing"].sum() - posted["n_differing"].sum())),
    over=("variant", named.POSTED),
)
DEEPER = DIFFERING.alike("keys and values of the response that differ, after the first layer").where(
    variant=named.POSTED, deep=True
)
DEEPER_SHARE = DEEPER.alike(form="{:.0%}", by=("dtype",), estimate=part("n_differing", of="n_elements"))
ROUNDOFFS = DIFFERING.alike(
    "largest difference of a layer, in unit roundoffs of its size",
    computed("relative_roundoffs", "max"), form="{:.0f}",
).where(variant=named.POSTED)

KEYS = Measure(
    "elements of the first layer's keys that differ", "", "model", "{:,.0f}", rows="first layer keys", by=("model",),
    estimate=total("n_differing"),
)
KEYS_AS_POSTED = KEYS.where(variant=named.POSTED, thread_length=True)
KEYS_AS_POSTED_SHARE = KEYS_AS_POSTED.alike(form="{:.0%}", estimate=part("n_differing", of="n_elements"))
PUBLISHED_SHARE = KEYS.alike(
    "published share of the response's keys that differ", first("share"), form="{:.0%}", rows="published shares"
)

# The thread loads its first example in the library's default, which was fp32 then.
POSTED_KEYS = KEYS_AS_POSTED.where(dtype=_FP32).alike(f"{KEYS.name} in fp32 as posted")
KEYS_AT_ANY_LENGTH = KEYS.where(variant=named.POSTED, dtype=_FP32)
KEYS_ANYWHERE = KEYS_AT_ANY_LENGTH.alike("the same at all numbers of tokens fed that were tried, together")

# Facts for the prose.
MODEL = noted("prompt_reuse", "models", 0, "name")
N_NEW_TOKENS = noted("prompt_reuse", "settings", "n_new_tokens")
QUESTIONS = Measure("questions", rows="reused_questions", estimate=distinct("item"), form="{:.0f}")
FORKS = Measure("answers that differ", rows="forks", by=("dtype",), estimate=counted(len), form="{:.0f}")
WIDEST_LEAD = FORKS.alike("largest lead at their first token that differs", computed("widest", "max"), form="{:g}")
TIED_FORKS = FORKS.alike("answers with a tie there", total("tied"))
FILES = Measure("files", rows="seams", estimate=distinct("source"), form="{:.0f}")

_FOUR_IN_FIVE = Bound(0.8, "ours", "four in five", "share")
_NINE_IN_TEN = Bound(0.9, "ours", "nine in ten", "share")
_ONE_SWITCH = (named.WHOLE_CACHE, named.FULL_ROWS)
_ONE_IN_TEN = Bound(0.1, "ours", "one cut in ten", "share")
STATEMENTS = {
    "ids-do-not-continue": of_model(MISMATCHED, "above", _FOUR_IN_FIVE, headline=True),
    "recipe-changes-text": of_model(AFTER_SPACE, "below", HALF, headline=True),
    "cut-before-the-space-keeps": always(BEFORE_SPACE.where(dtype=_FP32), "above", _FOUR_IN_FIVE, headline=True),
    "template-keeps": always(TEMPLATE.where(dtype=_FP32), "above", _FOUR_IN_FIVE),
    "common-prefix-restores": always(
        EQUAL.where(case=(named.DOCUMENTED, named.CORPUS), way=named.SHARED, dtype=_FP32), "above", _FOUR_IN_FIVE
    ),
    "rounding-in-bf16": of_model(ROUNDED, "above", NONE),
    "whole-prompt-fed-again": always(FED_AGAIN, "at least", ALL),
    "any-cut": always(CHANGED.where(place=named.ANYWHERE), "above", HALF, headline=True),
    "cut-after-a-space": always(CHANGED.where(place="after a space"), "above", _NINE_IN_TEN, headline=True),
    "cut-before-a-space": always(CHANGED.where(place="before a space"), "below", _ONE_IN_TEN),
    "first-layer-ignores-the-cache": always(
        CHANGE.where(variant=named.OVERWRITTEN, deep=False, tensor="keys"), "at most", NONE
    ),
    "first-layer-at-the-threads-counts": here(KEYS_AS_POSTED.where(dtype=_FP32), "above", NONE, on="Intel"),
    "first-layer-at-the-threads-counts-on-amd": here(KEYS_AS_POSTED.where(dtype=_FP32), "at most", NONE, on="AMD"),
    "first-layer-at-the-threads-counts-in-bf16": here(KEYS_AS_POSTED.where(dtype=_BF16), "at most", NONE),
    "first-layer-at-some-counts": here(KEYS_AT_ANY_LENGTH, "above", NONE),
    "equal-query-lengths-equal-keys": always(KEYS.where(variant=named.FULL_ROWS, dtype=_FP32), "at most", NONE),
    "deeper-layers-differ": here(DEEPER, "above", NONE),
    "both-switches-leave-none": here(DIFFERING.where(variant=named.BOTH), "at most", NONE),
    "one-switch-leaves-some": here(DIFFERING.where(variant=_ONE_SWITCH), "above", NONE, on="Intel"),
    "linear-layers-are-not-on-amd": here(CHANGE.where(variant=named.FULL_ROWS), "at most", NONE, on="AMD"),
    "one-switch-is-enough-on-amd": here(DIFFERING.where(variant=named.WHOLE_CACHE), "at most", NONE, on="AMD"),
}

OWN_PROMPTS = Measure(
    "share of runs on the thread's own prompts whose tokens differ", rows="prompts", estimate=part("differs")
).where(case=named.THREAD)


def _differing(prompts: str, **of: Any) -> Measure:
    name = f"share of prompts {prompts}"
    return Measure(name, "prompt", rows="prompts", estimate=share("differs", "prompt")).where(**of)


FINE = _differing("with a boundary mismatch whose tokens differ in the finest dtype", mismatch=True, finest=True)
COARSE = _differing("with a boundary mismatch whose tokens differ in a coarser dtype", mismatch=True, finest=False)
CONTINUED_IDS = _differing(
    "whose ids continue the cached ones and whose tokens differ in the finest dtype", mismatch=False, finest=True
)
_MISMATCH = "a vocabulary in which the thread's own prompts change the prefix's ids"


def _at_published_lengths(found: Found) -> str:
    counts = KEYS_AS_POSTED_SHARE.groups(found)
    return "at the published widths: " + "; ".join(
        f"{row.model} {DTYPES[row.dtype]}, {row.rows_fed} tokens fed: {row.n_differing:,} of {row.n_elements:,}"
        for (rows,) in counts.values() for row in rows.itertuples()
    )


def _differ(prompts: pd.DataFrame) -> str:
    return f"{prompts['differs'].sum()} of {len(prompts)}"


def _chosen_prompts(found: Found) -> str:
    chosen = found["prompts"].query("mismatch")
    return f"on the prompts whose ids leave the prefix's, chosen for that, tokens differ in {_differ(chosen)} runs"


def _mismatch_of_own(found: Found) -> frozenset[str]:
    return frozenset({_MISMATCH} if found["prompts"].query("case == @named.THREAD")["mismatch"].all() else ())


def _rounding(found: Found) -> str:
    rounding = found["prompts"].query("not mismatch and not finest")
    if not len(rounding):
        return ""
    each = (f"{named.CASES[case]} {_differ(rows)}" for case, rows in rounding.groupby("case", sort=False))
    runs = f"tokens differ in {_differ(rounding)} runs in coarser dtypes ({', '.join(each)})"
    return f"rounding adds to it: where ids continue, {runs}"


CHECKS = {
    "first-layer-differs": claim(
        reproduced(every(POSTED_KEYS, "above", NONE)),
        refuted(every(POSTED_KEYS, "at most", NONE), every(KEYS_ANYWHERE, "at most", NONE)),
        missing=lambda found: "" if KEYS_ANYWHERE(found) else "the thread's dtype, fp32, was not run",
        beside=_at_published_lengths,
    ),
    "reused-cache-changes-text": claim(
        *either(OWN_PROMPTS, "above", HALF, every), needs=(_MISMATCH,), has=_mismatch_of_own, beside=_chosen_prompts
    ),
    "precision-explains": claim(
        other_cause(every(FINE, "above", HALF), every(CONTINUED_IDS, "below", HALF)),
        reproduced(every(FINE, "below", HALF), every(COARSE, "above", HALF)), refuted(every(FINE, "above", HALF)),
        unseen="the thread's own prompts do not show its symptom in the vocabulary that was run",
        missing=lambda found: "" if FINE(found) else "0 prompts whose ids leave the prefix's in this vocabulary",
        beside=_rounding,
    ),
}
CLAIMS = Claims(named.DOCUMENT, CHECKS)
