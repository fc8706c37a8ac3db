"""The claims of the blog post about past_key_values, each with the check that its YAML describes."""

import pandas as pd

from kvbook.measuring import estimates as fits
from kvreport.chapters.blog_past import past_tables, tables
from kvreport.chapters.blog_past.results import Results
from kvreport.publishing.verdicts import Verdict, holds, weights_of

# A sum over a few hundred numbers in each of a dozen layers gives tens; a missing context gives hundreds in the coarsest dtype.
ROUNDING = 100


def _weights(results: Results) -> str:
    """Say whose weights the models have."""
    return weights_of(results.past.about["models"])


def _of(results: Results, family: str, variant: str, quantization: str | None = None) -> pd.DataFrame:
    """Choose rows of a family and its variant; of all quantizations where none is named."""
    rows = results.rows[(results.rows["family"] == family) & (results.rows["variant"] == variant)]
    return rows if quantization is None else rows[rows["quantization"] == quantization]


def _spread(rows: pd.DataFrame) -> str:
    return (
        f"{rows['relative_spread'].max():.1e} of the logits' spread at most, {rows['roundoffs'].max():,.0f} roundoffs of the "
        "coarsest arithmetic in use"
    )


def _share_alone(rows: pd.DataFrame) -> str:
    return f"{int((rows['alone_max_abs'] == 0).sum())} of {len(rows)}"


def _within_rounding(rows: pd.DataFrame) -> tuple[bool, bool]:
    small = rows["roundoffs"] <= ROUNDING
    return bool(small.all()), fits.share(int(small.sum()), len(small)).high < 0.5


def gpt2_compatible(results: Results) -> Verdict:
    """Measure the native difference without quantization."""
    rows = _of(results, "gpt2", past_tables.NATIVE, "none")
    if rows.empty:
        return Verdict("0 runs of GPT-2 without quantization", "not run")
    return Verdict(_spread(rows), holds(*_within_rounding(rows), _weights(results)))


def quantization_keeps_past(results: Results) -> Verdict:
    """Measure the native difference with 4-bit weights."""
    rows = _of(results, "gpt2", past_tables.NATIVE, "4bit")
    if rows.empty:
        return Verdict("0 runs of GPT-2 in 4 bits", "not run")
    return Verdict(_spread(rows), holds(*_within_rounding(rows), _weights(results)))


def roberta_fails_bidirectional(results: Results) -> Verdict:
    """Hand a past over, and make the model causal."""
    handed = _of(results, "roberta", past_tables.HANDED)
    causal = _of(results, "roberta", past_tables.DECODER)
    # In one layer nothing lies above the keys that a later token would have changed.
    handed = handed[handed["layers"] > 1]
    if handed.empty or causal.empty:
        return Verdict("0 runs of RoBERTa with a past handed over, or made causal", "not run")
    here = f"a past handed over: {_spread(handed)}; made causal: {_spread(causal)}"
    rounding, _ = _within_rounding(causal)
    far = bool((handed["roundoffs"] > ROUNDING).all())
    return Verdict(here, holds(far and rounding, _within_rounding(handed)[0], _weights(results)))


def roberta_number_shows_it(results: Results) -> Verdict:
    """Hold the posted call against the last token alone, and hand a past over."""
    posted = _of(results, "roberta", past_tables.NO_PAST)
    handed = _of(results, "roberta", past_tables.HANDED)
    if posted.empty:
        return Verdict("0 runs of RoBERTa", "not run")
    depths, without = handed.groupby("layers")["relative_spread"].mean(), posted["relative_spread"].mean()
    here = (
        f"posted call equals the last token alone in {_share_alone(posted)} texts and differs by "
        f"{without:.2g} of the logits' spread (mean over texts); with a past handed over by "
        + ", ".join(f"{value:.2g} ({layers} layer{'s' * (layers > 1)})" for layers, value in depths.items())
    )
    if (posted["alone_max_abs"] == 0).all() and (depths < without).all():
        return Verdict(here, "other cause")
    had_past = bool((posted["held"] > 0).all())
    return Verdict(here, holds(had_past, False, _weights(results)))


def relative_difference(results: Results) -> Verdict:
    """Compute the statistic both ways."""
    worst = results.apart.groupby(["model", "quantization"])["apart"].max()
    if worst.empty:
        return Verdict("0 tables with a difference", "not run")
    share = fits.share(int((worst > 2).sum()), len(worst))
    here = (
        f"the two are up to a factor of {worst.max():,.0f} apart; more than two in {int((worst > 2).sum())} of "
        f"{len(worst)} tables ({share.text('{:.2f}')})"
    )
    return Verdict(here, holds(bool((worst <= 2).all()), share.low > 0.5, _weights(results)))


def mpt_cannot(results: Results) -> Verdict:
    """Turn the cache on."""
    off, on = _of(results, "mpt", past_tables.CACHE_OFF), _of(results, "mpt", past_tables.NATIVE)
    if off.empty:
        return Verdict("0 runs of MPT", "not run")
    here = f"use_cache off: equal to the last token alone in {_share_alone(off)} texts; on: {_spread(on)}"
    rounding, far = _within_rounding(on)
    if (off["alone_max_abs"] == 0).all() and rounding:
        return Verdict(here, "other cause")
    return Verdict(here, holds(far, False, _weights(results)))


def falcon_cannot(results: Results) -> Verdict:
    """Put the two lines back, one at a time."""
    native = _of(results, "falcon", past_tables.NATIVE)
    if native.empty:
        return Verdict("0 runs of Falcon", "not run")
    broken = {name: _of(results, "falcon", name) for name in (past_tables.UPPER_LEFT, past_tables.NO_OFFSET)}
    here = f"native: {_spread(native)}; " + "; ".join(
        f"{name}: {rows['relative_spread'].median():.2g} of the spread in the median" for name, rows in broken.items()
    )
    rounding, far = _within_rounding(native)
    if rounding and all(_within_rounding(rows)[1] for rows in broken.values()):
        return Verdict(here, "other cause")
    return Verdict(here, holds(far, False, _weights(results)))


def large_models_unsafe(results: Results) -> Verdict:
    """Look at both, as they are now and as they were."""
    native = {family: _of(results, family, past_tables.NATIVE) for family in ("mpt", "falcon")}
    native = {family: rows for family, rows in native.items() if not rows.empty}
    if not native:
        return Verdict("0 runs of MPT and Falcon", "not run")
    before = {family: _of(results, family, past_tables.AS_IN_2023[family]) for family in native}
    here = "; ".join(
        f"{tables.FAMILIES[family]}: {_spread(rows)}, as in mid-2023 {before[family]['relative_spread'].median():.2g} of "
        "the spread in the median"
        for family, rows in native.items()
    )
    safe = [_within_rounding(rows) for rows in native.values()]
    if all(rounding for rounding, _ in safe) and all(_within_rounding(rows)[1] for rows in before.values()):
        return Verdict(here, "other cause")
    return Verdict(here, holds(any(far for _, far in safe), all(rounding for rounding, _ in safe), _weights(results)))


CHECKS = {
    "gpt2-compatible": gpt2_compatible,
    "roberta-fails-bidirectional": roberta_fails_bidirectional,
    "roberta-number-shows-it": roberta_number_shows_it,
    "quantization-keeps-past": quantization_keeps_past,
    "relative-difference": relative_difference,
    "mpt-cannot": mpt_cannot,
    "falcon-cannot": falcon_cannot,
    "large-models-unsafe": large_models_unsafe,
}
