"""The claims of issue 25420, each with the check that its YAML describes."""

from dataclasses import dataclass

import pandas as pd

from kvbook import agreement, fits
from kvbook.analyses import layer_drift as analysis
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
    here = "; ".join(f"{model} {dtype}: {e.text('{:.2f}')} of samples" for (model, dtype), e in shares.items())
    return Verdict(here, holds(all(e.low > 0.5 for e in shares.values()), evidence.weights))


def grows_with_depth(evidence: Evidence) -> Verdict:
    """Fit the growth a layer."""
    growth = analysis.growth_table(evidence.drift)
    here = "; ".join(f"{r.model} {r.dtype}: {r.sampling.text('{:+.1%}')}" for r in growth.itertuples())
    if growth.empty:
        return Verdict("no series with drift in every layer", "not run")
    return Verdict(here, holds(all(e.low > 0 for e in growth["sampling"]), evidence.weights))


def _ratio(evidence: Evidence, coarse: str, fine: str) -> fits.Estimate | None:
    table = analysis.ratio_table(evidence.drift)
    row = table[(table["model"] == evidence.model) & (table["coarse"] == coarse) & (table["fine"] == fine)]
    return None if row.empty else row["sampling"].iloc[0]


def coarser_is_worse(evidence: Evidence) -> Verdict:
    """Compare each dtype with the next finer one."""
    names = _dtypes(evidence)
    found = {(c, f): _ratio(evidence, c, f) for f, c in zip(names, names[1:], strict=False)}
    found = {pair: estimate for pair, estimate in found.items() if estimate is not None}
    if not found:
        return Verdict("fewer than two dtypes with drift in every layer", "not run")
    here = "; ".join(f"{coarse} / {fine}: {e.text('{:.3g}')}" for (coarse, fine), e in found.items())
    return Verdict(here, holds(all(e.low > 1 for e in found.values()), evidence.weights))


def bf16_worse_than_fp16(evidence: Evidence) -> Verdict:
    """Hold the ratio of the two 16-bit dtypes against that of their unit roundoffs."""
    ratio = _ratio(evidence, "bfloat16", "float16")
    if ratio is None:
        return Verdict("bfloat16 and float16 with drift in every layer are needed", "not run")
    expected = agreement.UNIT_ROUNDOFF["bfloat16"] / agreement.UNIT_ROUNDOFF["float16"]
    near = "within" if expected / 2 <= ratio.value <= expected * 2 else "not within"
    here = f"{ratio.text('{:.2f}')}, {near} a factor of two of the unit roundoffs' {expected:.0f}"
    return Verdict(here, holds(ratio.low > 1, evidence.weights))


def _flips(evidence: Evidence, dtype: str | None = None) -> dict[str, fits.Estimate]:
    rows = _logits(evidence)
    rows = rows if dtype is None else rows[rows["dtype"] == dtype]
    return {
        f"{model} {name}": fits.share(int(group["top1_flip"].sum()), len(group))
        for (model, name), group in rows.groupby(["model", "dtype"])
    }


def fp32_imperceptible(evidence: Evidence) -> Verdict:
    """Count top-1 flips in fp32."""
    flips = _flips(evidence, "float32")
    if not flips:
        return Verdict("float32 is not among the dtypes", "not run")
    here = "; ".join(f"{name}: flips in {e.text('{:.3f}')} of samples" for name, e in flips.items())
    return Verdict(here, holds(all(e.high < 0.05 for e in flips.values()), evidence.weights))


def gpt2_too(evidence: Evidence) -> Verdict:
    """Count the samples whose logits differ in the reference model."""
    rows = _logits(evidence)
    rows = rows[rows["model"] == evidence.reference_model]
    shares = {
        dtype: fits.share(int((group["differing_share"] > 0).sum()), len(group)) for dtype, group in rows.groupby("dtype")
    }
    here = "; ".join(f"{dtype}: {e.text('{:.2f}')} of samples" for dtype, e in shares.items())
    return Verdict(here, holds(any(e.low > 0.5 for e in shares.values()), evidence.weights))


def prefill_exact(evidence: Evidence) -> Verdict:
    """Compare logits bit for bit: the shared first step, and the steps of one row."""
    equal = analysis.steps_equal(evidence.greedy, "cache, last token")
    first, later = equal[equal["step"] == 0], equal[(equal["step"] > 0) & equal["same_prefix"]]
    here = (
        f"first step: bits equal in {int(first['bits_equal'].sum())} of {len(first)} runs; "
        f"later steps with the same tokens before them: {int(later['bits_equal'].sum())} of {len(later)}"
    )
    return Verdict(here, holds(bool(first["bits_equal"].all()) and not later["bits_equal"].all(), evidence.weights))


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
        return Verdict(here, holds(posted_positions == runs, evidence.weights))
    return Verdict(here, "other cause" if last > posted else "refuted")


def greedy_often_same(evidence: Evidence) -> Verdict:
    """Count top-1 flips in every dtype."""
    flips = _flips(evidence)
    here = "; ".join(f"{name}: flips in {e.text('{:.3f}')}" for name, e in flips.items())
    return Verdict(here, holds(all(e.high < 0.5 for e in flips.values()), evidence.weights))


def mitigations_do_not_remove(evidence: Evidence) -> Verdict:
    """Take each variant's drift against stock's."""
    if evidence.mitigations is None:
        return Verdict("no model of Llama's classes, or no 16-bit dtype, in the settings", "not run")
    table = analysis.mitigation_table(evidence.mitigations)
    if table.empty:
        return Verdict("stock shows no drift in these dtypes, so there is none to remove", "not run")
    best = table.loc[table["drift_ratio"].map(lambda e: e.value).idxmin()]
    here = (
        f"best: {best['variant']} in {best['dtype']}, drift {best['drift_ratio'].text('{:.2f}')} x stock, "
        f"decode step {best['decode_ratio'].text('{:.2f}')} x stock"
    )
    return Verdict(here, holds(bool(best["drift_ratio"].value > 0), evidence.weights))


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

