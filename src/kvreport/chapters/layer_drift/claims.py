"""The claims of issue 25420, each with the check that its YAML describes."""

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from kvbook.measuring import agreement, estimates
from kvreport.chapters.layer_drift import greedy_paths, tables
from kvreport.chapters.layer_drift.results import Results
from kvreport.publishing.verdicts import Verdict, Word, holds, weights_of
from kvreport.publishing.wording import DTYPES, power_of_ten

# A divergence of 1e-6 nats moves no probability by more than 0.0008 (Pinsker's inequality).
PERCEPTIBLE_KL = 1e-6
_PERCEPTIBLE = f"taken as perceptible: above {power_of_ten(PERCEPTIBLE_KL)} nats"


def _word(results: Results, borne_out: bool, contradicted: bool, *models: dict[str, Any]) -> Word:
    """Choose the verdict's word; it is "in kind" unless every model involved is one of the documents'."""
    return holds(borne_out, contradicted, weights_of(models or results.drift.about["models"]))


def _logits(results: Results) -> pd.DataFrame:
    return results.drift.rows[results.drift.rows["place"] == "logits"]


def _extreme(shares: dict[tuple[str, str], estimates.Estimate], choose: Callable, form: str = "{:.2f}") -> str:
    """Name the series with the smallest or the largest share, and give it."""
    (model, dtype), estimate = choose(shares.items(), key=lambda item: item[1].value)
    return f"{model} {DTYPES[dtype]} {estimate.text(form)}"


def _differing(logits: pd.DataFrame) -> dict[tuple[str, str], estimates.Estimate]:
    """Give the share of samples whose logits differ at all, for each model and dtype."""
    return {
        key: estimates.share(int((rows["differing_share"] > 0).sum()), len(rows))
        for key, rows in logits.groupby(["model", "dtype"])
    }


def drift_everywhere(results: Results) -> Verdict:
    """Count the samples whose logits differ."""
    shares = _differing(_logits(results))
    here = f"{_extreme(shares, min)} of samples, the least of {len(shares)} pairs of model and dtype"
    all_most, all_none = all(e.low > 0.5 for e in shares.values()), all(e.value == 0 for e in shares.values())
    return Verdict(here, _word(results, all_most, all_none))


def _one_law(results: Results, found: Iterable[estimates.Estimate], bound: float, complete: bool) -> Word:
    """Judge intervals against a bound; a series that could not be fitted keeps the claim from being borne out."""
    found = list(found)
    return _word(results, complete and all(e.low > bound for e in found), any(e.high < bound for e in found))


def grows_with_depth(results: Results) -> Verdict:
    """Fit the growth a layer."""
    growth = results.growth
    theirs, _ = results.published_fits
    published = "our fit to its columns, a layer: " + "; ".join(
        f"{r.model.split('/')[-1]} {DTYPES[r.dtype]} {r.fit.text('{:+.1%}')}" for r in theirs.itertuples()
    )
    series = results.drift.rows.groupby(["model", "dtype"]).ngroups
    if growth.empty:
        return Verdict(f"none of {series} series drifts in every layer from 2 on", "not run", published)
    here = "; ".join(f"{r.model} {DTYPES[r.dtype]} {r.sampling.text('{:+.1%}')}" for r in growth.itertuples())
    here += f" ({len(growth)} of {series} series could be fitted)" if len(growth) < series else ""
    return Verdict(here, _one_law(results, growth["sampling"], 0, len(growth) == series), published)


def coarser_is_worse(results: Results) -> Verdict:
    """Compare each dtype with the next finer one."""
    ratios = results.ratios
    expected = (results.drift.rows["dtype"].nunique() - 1) * len(results.drift.about["models"])
    if ratios.empty:
        return Verdict("fewer than 2 dtypes drift in every layer from 2 on", "not run")
    here = "; ".join(
        f"{r.model} {DTYPES[r.coarse]} / {DTYPES[r.fine]} {r.sampling.text('{:,.3g}')}" for r in ratios.itertuples()
    )
    return Verdict(here, _one_law(results, ratios["sampling"], 1, len(ratios) == expected))


def bf16_worse_than_fp16(results: Results) -> Verdict:
    """Hold the ratio of the two 16-bit dtypes against that of their unit roundoffs."""
    _, theirs = results.published_fits
    of_them = theirs.loc[(theirs["coarse"] == "bfloat16") & (theirs["fine"] == "float16"), "fit"].iloc[0]
    published = f"our fit to its columns: bf16 over fp16 {of_them.text('{:.2f}')}"
    ratios = results.ratios
    ratios = ratios[(ratios["coarse"] == "bfloat16") & (ratios["fine"] == "float16")]
    if ratios.empty:
        return Verdict("bf16 and fp16 that drift in every layer from 2 on are needed", "not run", published)
    roundoffs = agreement.UNIT_ROUNDOFF["bfloat16"] / agreement.UNIT_ROUNDOFF["float16"]
    here = "; ".join(f"{r.model} {r.sampling.text('{:.2f}')}" for r in ratios.itertuples())
    here += f"; unit roundoffs {roundoffs:.0f}"
    return Verdict(
        here, _one_law(results, ratios["sampling"], 1, len(ratios) == len(results.drift.about["models"])), published
    )


def _divergences(results: Results, dtypes: Iterable[str]) -> pd.Series:
    rows = _logits(results)[_logits(results)["dtype"].isin(list(dtypes))]
    return rows.groupby(["model", "dtype"])["kl_nats"].max()


def fp32_imperceptible(results: Results) -> Verdict:
    """Take the largest divergence of the next-token distributions in fp32."""
    largest = _divergences(results, ["float32"])
    if largest.empty:
        return Verdict("float32 is not among the dtypes", "not run")
    here = f"largest divergence of any sample {power_of_ten(largest.max())} nats; {_PERCEPTIBLE}"
    return Verdict(here, _word(results, largest.max() < PERCEPTIBLE_KL, largest.min() > PERCEPTIBLE_KL))


def sixteen_bits_matter(results: Results) -> Verdict:
    """Take the mean divergence of the next-token distributions in 16 bits."""
    rows = _logits(results)[_logits(results)["dtype"].isin(["float16", "bfloat16"])]
    if rows.empty:
        return Verdict("no 16-bit dtype in the run", "not run")
    means = rows.groupby(["model", "dtype"])["kl_nats"].mean()
    here = "; ".join(f"{model} {DTYPES[dtype]} {power_of_ten(kl)} nats" for (model, dtype), kl in means.items())
    here += f"; {_PERCEPTIBLE}"
    return Verdict(here, _word(results, bool((means > PERCEPTIBLE_KL).all()), bool((means < PERCEPTIBLE_KL).all())))


def gpt2_too(results: Results) -> Verdict:
    """Count the samples whose logits differ in GPT-2."""
    models = [model for model in results.drift.about["models"] if model["architecture"] == "gpt2"]
    if not models:
        return Verdict("none of the models of this run is a GPT-2; 0 samples", "not run")
    rows = _logits(results)
    shares = _differing(rows[rows["model"] == models[0]["name"]])
    here = f"{_extreme(shares, min)} of samples, the least of {len(shares)} dtypes"
    all_most, all_none = all(e.low > 0.5 for e in shares.values()), all(e.value == 0 for e in shares.values())
    return Verdict(here, _word(results, all_most, all_none, models[0]))


def prefill_exact(results: Results) -> Verdict:
    """Compare logits bit for bit: the first step, where both ways feed the prompt, and the steps of one row."""
    equal = results.steps_last
    first, later = equal[equal["step"] == 0], equal[(equal["step"] > 0) & equal["same_prefix"]]
    generated = tables.steps_equal(results.greedy.rows, greedy_paths.GENERATE).query("step == 0")
    here = (
        f"logits of the first step: bits equal in {int(first['bits_equal'].sum())} of {len(first)} runs "
        f"({int(generated['bits_equal'].sum())} of {len(generated)} through generate, whose first step computes one row of "
        f"logits); of later steps with equal tokens before them: {int(later['bits_equal'].sum())} of {len(later)}"
    )
    prefill_equal, later_equal = bool(first["bits_equal"].all()), bool(later["bits_equal"].all())
    return Verdict(here, _word(results, prefill_equal and not later_equal, not prefill_equal))


def positions_missing(results: Results) -> Verdict:
    """Take the two switches apart: what is fed, and whether positions are passed."""
    table = results.divergence
    runs = len(table[table["method"] == greedy_paths.GENERATE])
    count = {name: int(table.loc[table["method"] == name, "equal"].sum()) for name in greedy_paths.LOOPS}
    here = "tokens equal to no cache: " + "; ".join(f"{name} {n} of {runs}" for name, n in count.items())
    posted, with_positions = count["cache, as posted"], count["cache, as posted + position ids"]
    if with_positions == 0 and count["cache, last token"] == runs and posted == 0:
        return Verdict(here, "other cause")
    # The thread's cause would show as: posted wrong, posted with positions right.
    return Verdict(here, _word(results, with_positions == runs and posted < runs, False))


def greedy_keeps_its_choice(results: Results) -> Verdict:
    """Count top-1 flips in every dtype."""
    flips = {
        key: estimates.share(int(rows["top1_flip"].sum()), len(rows))
        for key, rows in _logits(results).groupby(["model", "dtype"])
    }
    here = f"flips in {_extreme(flips, max, '{:.3f}')} of samples, the most of {len(flips)} pairs of model and dtype"
    all_few, any_most = all(e.high < 0.5 for e in flips.values()), any(e.low > 0.5 for e in flips.values())
    return Verdict(here, _word(results, all_few, any_most))


def _mitigations(results: Results) -> pd.DataFrame | Verdict:
    """Give the table of mitigations, or say why there is none."""
    if results.mitigated is None:
        return Verdict("0 rows: no model of Llama's classes, or no 16-bit dtype", "not run")
    nothing = Verdict("stock shows 0 drift in these dtypes: there is none to remove", "not run")
    return nothing if results.effects.empty else results.effects


def _best(table: pd.DataFrame) -> pd.Series:
    return table.loc[table["drift_ratio"].map(lambda e: e.value).idxmin()]


def no_mitigation_removes(results: Results) -> Verdict:
    """Look whether one of them leaves every bit equal."""
    if isinstance(table := _mitigations(results), Verdict):
        return table
    best = _best(table)
    here = (
        f"best: {best['variant']} in {DTYPES[best['dtype']]}, drift {best['drift_ratio'].text('{:.2f}')} of stock's, logits "
        f"equal in every bit in {best['equal_share'].text('{:.0%}')} of samples"
    )
    removed = bool(best["equal_share"].value == 1)
    return Verdict(here, _word(results, not removed, removed))


def most_mitigations_idle(results: Results) -> Verdict:
    """Count the variants whose interval holds 1."""
    if isinstance(table := _mitigations(results), Verdict):
        return table
    ratios = table["drift_ratio"]
    idle = int(ratios.map(lambda e: e.low <= 1 <= e.high).sum())
    less, more = int(ratios.map(lambda e: e.high < 1).sum()), int(ratios.map(lambda e: e.low > 1).sum())
    here = (
        f"of {len(table)} pairs of mitigation and dtype {idle} show no effect, {less} lower the drift, {more} raise it"
    )
    return Verdict(here, _word(results, idle > len(table) / 2, idle < len(table) / 2))


def mitigations_cost(results: Results) -> Verdict:
    """Time those that lower the drift."""
    if isinstance(table := _mitigations(results), Verdict):
        return table
    lower = table[table["drift_ratio"].map(lambda e: e.high < 1)]
    if lower.empty:
        return Verdict(f"0 of {len(table)} lower the drift", "undecided")
    here = "; ".join(
        f"{r.variant} {DTYPES[r.dtype]}: full pass {r.full_ratio.text('{:.2f}')}, decode step {r.decode_ratio.text('{:.2f}')}"
        for r in lower.itertuples()
    )
    times = [*lower["full_ratio"], *lower["decode_ratio"]]
    # What an upcast costs is the hardware's to say; on another machine than the document's nothing can be refuted.
    slower, contradicted = all(e.low > 1.1 for e in times), False
    return Verdict(here, _word(results, slower, contradicted))


CHECKS = {
    "drift-everywhere": drift_everywhere,
    "grows-with-depth": grows_with_depth,
    "coarser-is-worse": coarser_is_worse,
    "bf16-worse-than-fp16": bf16_worse_than_fp16,
    "fp32-imperceptible": fp32_imperceptible,
    "sixteen-bits-matter": sixteen_bits_matter,
    "gpt2-too": gpt2_too,
    "prefill-exact": prefill_exact,
    "positions-missing": positions_missing,
    "greedy-keeps-its-choice": greedy_keeps_its_choice,
    "no-mitigation-removes": no_mitigation_removes,
    "most-mitigations-idle": most_mitigations_idle,
    "mitigations-cost": mitigations_cost,
}
