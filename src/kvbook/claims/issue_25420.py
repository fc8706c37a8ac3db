"""The claims of issue 25420, each with the check that its YAML describes."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd

from kvbook import agreement, documents, fits
from kvbook.analyses import layer_drift as analysis
from kvbook.analyses.wording import DTYPES
from kvbook.claims.ledger import Verdict, holds
from kvbook.experiments import greedy_paths


@dataclass(frozen=True)
class Evidence:
    """The chapter's rows.

    Attributes
    ----------
    drift, greedy : DataFrame
        Rows of the experiments of these names.
    mitigations : DataFrame or None
        None when the settings left the experiment out.
    model, reference_model : str
        Names in the rows.
    """

    drift: pd.DataFrame
    greedy: pd.DataFrame
    mitigations: pd.DataFrame | None
    model: str
    reference_model: str

    @property
    def weights(self) -> str:
        """Where the first model's weights came from."""
        return self.drift.loc[self.drift["model"] == self.model, "weights"].iloc[0]


def _all_above(estimates: Iterable[fits.Estimate], bound: float) -> tuple[bool, bool]:
    """Tell whether all intervals lie above a bound, and whether one lies below it."""
    estimates = list(estimates)
    return all(e.low > bound for e in estimates), any(e.high < bound for e in estimates)


def _extreme(shares: dict[tuple[str, str], fits.Estimate], choose: Callable, form: str = "{:.2f}") -> str:
    """Name the series with the smallest or the largest share, and give it."""
    (model, dtype), estimate = choose(shares.items(), key=lambda item: item[1].value)
    return f"{model} {DTYPES[dtype]} {estimate.text(form)}"


def _logits(evidence: Evidence) -> pd.DataFrame:
    return evidence.drift[evidence.drift["place"] == "logits"]


def _dtypes(evidence: Evidence) -> list[str]:
    """Give the dtypes of the run, finest first."""
    return sorted(evidence.drift["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)


def drift_everywhere(evidence: Evidence) -> Verdict:
    """Count the samples whose logits differ at all."""
    shares = {
        (model, dtype): fits.share(int((rows["differing_share"] > 0).sum()), len(rows))
        for (model, dtype), rows in _logits(evidence).groupby(["model", "dtype"])
    }
    here = f"{_extreme(shares, min)} of samples, the least of {len(shares)} pairs of model and dtype"
    return Verdict(here, holds(*_all_above(shares.values(), 0.5), evidence.weights))


def grows_with_depth(evidence: Evidence) -> Verdict:
    """Fit the growth a layer."""
    growth = analysis.growth_table(evidence.drift)
    theirs, _ = analysis.published_fits(documents.published_drift())
    published = "; ".join(
        f"{r.model.split('/')[-1]} {DTYPES[r.dtype]} {r.fit.text('{:+.1%}')}" for r in theirs.itertuples()
    )
    if growth.empty:
        return Verdict("no series with drift in every layer", "not run", published)
    here = "; ".join(f"{r.model} {DTYPES[r.dtype]} {r.sampling.text('{:+.1%}')}" for r in growth.itertuples())
    return Verdict(here, holds(*_all_above(growth["sampling"], 0), evidence.weights), published)


def _ratio(evidence: Evidence, coarse: str, fine: str) -> fits.Estimate | None:
    table = analysis.ratio_table(evidence.drift)
    row = table[(table["model"] == evidence.model) & (table["coarse"] == coarse) & (table["fine"] == fine)]
    return None if row.empty else row["sampling"].iloc[0]


def coarser_is_worse(evidence: Evidence) -> Verdict:
    """Compare each dtype with the next finer one."""
    names = _dtypes(evidence)
    found = {(c, f): _ratio(evidence, c, f) for f, c in itertools.pairwise(names)}
    found = {pair: estimate for pair, estimate in found.items() if estimate is not None}
    if not found:
        return Verdict("fewer than two dtypes with drift in every layer", "not run")
    here = "; ".join(f"{DTYPES[coarse]} / {DTYPES[fine]} {e.text('{:,.3g}')}" for (coarse, fine), e in found.items())
    return Verdict(here, holds(*_all_above(found.values(), 1), evidence.weights))


def bf16_worse_than_fp16(evidence: Evidence) -> Verdict:
    """Hold the ratio of the two 16-bit dtypes against that of their unit roundoffs."""
    ratio = _ratio(evidence, "bfloat16", "float16")
    if ratio is None:
        return Verdict("bfloat16 and float16 with drift in every layer are needed", "not run")
    expected = agreement.UNIT_ROUNDOFF["bfloat16"] / agreement.UNIT_ROUNDOFF["float16"]
    near = "within" if expected / 2 <= ratio.value <= expected * 2 else "not within"
    here = f"{ratio.text('{:.2f}')}, {near} a factor of two of the unit roundoffs' {expected:.0f}"
    _, theirs = analysis.published_fits(documents.published_drift())
    published = (
        theirs.loc[(theirs["coarse"] == "bfloat16") & (theirs["fine"] == "float16"), "fit"].iloc[0].text("{:.2f}")
    )
    return Verdict(here, holds(*_all_above([ratio], 1), evidence.weights), published)


def fp32_imperceptible(evidence: Evidence) -> Verdict:
    """Count top-1 flips in fp32, over all models of the run."""
    rows = _logits(evidence)
    rows = rows[rows["dtype"] == "float32"]
    if rows.empty:
        return Verdict("float32 is not among the dtypes", "not run")
    flips = fits.share(int(rows["top1_flip"].sum()), len(rows))
    here = f"flips in {flips.text('{:.3f}')} of {len(rows)} samples; largest difference {rows['max_abs'].max():.2g}"
    return Verdict(here, holds(flips.high < 0.05, flips.low > 0.05, evidence.weights))


def gpt2_too(evidence: Evidence) -> Verdict:
    """Count the samples whose logits differ in the reference model."""
    rows = _logits(evidence)
    rows = rows[rows["model"] == evidence.reference_model]
    shares = {
        dtype: fits.share(int((group["differing_share"] > 0).sum()), len(group))
        for dtype, group in rows.groupby("dtype")
    }
    here = "; ".join(f"{dtype}: {e.text('{:.2f}')} of samples" for dtype, e in shares.items())
    return Verdict(
        here,
        holds(any(e.low > 0.5 for e in shares.values()), all(e.high < 0.5 for e in shares.values()), evidence.weights),
    )


def prefill_exact(evidence: Evidence) -> Verdict:
    """Compare logits bit for bit: the shared first step, and the steps of one row."""
    equal = analysis.steps_equal(evidence.greedy, "cache, last token")
    first, later = equal[equal["step"] == 0], equal[(equal["step"] > 0) & equal["same_prefix"]]
    here = (
        f"first step: bits equal in {int(first['bits_equal'].sum())} of {len(first)} runs; "
        f"later steps with the same tokens before them: {int(later['bits_equal'].sum())} of {len(later)}"
    )
    prefill_equal, later_equal = bool(first["bits_equal"].all()), bool(later["bits_equal"].all())
    return Verdict(here, holds(prefill_equal and not later_equal, not prefill_equal, evidence.weights))


def positions_missing(evidence: Evidence) -> Verdict:
    """Take the two switches apart: what is fed, and whether positions are passed."""
    table = analysis.divergence_table(evidence.greedy)
    runs = len(table[table["method"] == greedy_paths.GENERATE])
    equal = table[table["first_divergence"].isna()].groupby("method").size()
    count = {name: int(equal.get(name, 0)) for name in greedy_paths.LOOPS}
    here = "tokens equal to no cache: " + "; ".join(f"{name}: {n} of {runs}" for name, n in count.items())
    posted, posted_positions = count["cache, as posted"], count["cache, as posted + position ids"]
    last = count["cache, last token"]
    # The thread's cause would show as: posted wrong, posted with positions right.
    if posted_positions > posted:
        return Verdict(here, holds(posted_positions == runs, False, evidence.weights))
    return Verdict(here, "other cause" if last > posted else "undecided")


def greedy_often_same(evidence: Evidence) -> Verdict:
    """Count top-1 flips in every dtype."""
    flips = {
        (model, dtype): fits.share(int(group["top1_flip"].sum()), len(group))
        for (model, dtype), group in _logits(evidence).groupby(["model", "dtype"])
    }
    here = f"flips in {_extreme(flips, max, '{:.3f}')} of samples, the most of {len(flips)} pairs of model and dtype"
    return Verdict(
        here,
        holds(all(e.high < 0.5 for e in flips.values()), any(e.low > 0.5 for e in flips.values()), evidence.weights),
    )


def mitigations_do_not_remove(evidence: Evidence) -> Verdict:
    """Take each variant's drift against stock's."""
    if evidence.mitigations is None:
        return Verdict("no model of Llama's classes, or no 16-bit dtype, in the settings", "not run")
    table = analysis.mitigation_table(evidence.mitigations)
    if table.empty:
        return Verdict("stock shows no drift in these dtypes, so there is none to remove", "not run")
    best = table.loc[table["drift_ratio"].map(lambda e: e.value).idxmin()]
    here = (
        f"best: {best['variant']} in {DTYPES[best['dtype']]}, drift {best['drift_ratio'].text('{:.2f}')} x stock, "
        f"decode step {best['decode_ratio'].text('{:.2f}')} x stock"
    )
    removed = bool(best["drift_ratio"].value == 0)
    return Verdict(here, holds(not removed, removed, evidence.weights))


CHECKS = {
    "drift-everywhere": drift_everywhere,
    "grows-with-depth": grows_with_depth,
    "coarser-is-worse": coarser_is_worse,
    "bf16-worse-than-fp16": bf16_worse_than_fp16,
    "fp32-imperceptible": fp32_imperceptible,
    "gpt2-too": gpt2_too,
    "prefill-exact": prefill_exact,
    "positions-missing": positions_missing,
    "greedy-often-same": greedy_often_same,
    "mitigations-do-not-remove": mitigations_do_not_remove,
}
