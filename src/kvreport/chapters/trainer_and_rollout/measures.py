"""Measures of the chapter on trainer and rollout, then the sentences that they decide."""

from dataclasses import replace

import numpy as np
import pandas as pd

from kvbook.scores import measures as scores
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.chapters.trainer_and_rollout.rows import EXPERIMENTS, ROWS  # noqa: F401
from kvreport.publishing.estimators import computed, counted, distinct, mean, ratio_of_means
from kvreport.publishing.measures import Measure, holds, noted
from kvreport.publishing.rules import Bound, every

# What each comparison of the rollout's own texts gives.
OUTSIDE = Measure(
    "share of tokens whose importance ratio is outside [0.9, 1.1]", "text", "comparison", "{:.1%}", rows="pairs",
    by=("compared",), estimate=mean("outside_narrow"),
)
CLIPPED = replace(
    OUTSIDE, name="share of tokens whose importance ratio is outside [0.8, 1.2]", estimate=mean("outside_ppo_clip")
)
MEAN_ABS = replace(OUTSIDE, name="mean |Δ log p| (nats)", form="{:.2g}", estimate=mean("mean_abs"))
EXP_ABS = replace(MEAN_ABS, name="mean exp|Δ log p|", form="{:.3f}", estimate=mean("mean_exp_abs"))
K1, K2, K3 = (replace(MEAN_ABS, name=f"{name} (nats)", estimate=mean(name)) for name in ("k1", "k2", "k3"))
CHI_SQUARED = replace(MEAN_ABS, name="χ²", estimate=mean("chi_squared"))
OVER_BF16 = replace(
    MEAN_ABS, name="mean |Δ log p|, over that of a bf16 trainer", form="{:.2f}", over=("compared", named.BF16),
    estimate=ratio_of_means("mean_abs"),
)
FP32_TRAINER, FP32_HEAD, LOW_SOFTMAX, FAULT = (
    OVER_BF16.where(compared=name) for name in (named.FULL, named.HEAD, named.LOW, named.SHIFTED)
)
HEAD_OVER_FP32 = replace(
    OVER_BF16, name="mean |Δ log p| with an LM head in fp32, over that of a fp32 trainer", over=("compared", named.FULL)
).where(compared=named.HEAD)

# The beginnings of the texts, in every way.
WAY_OUTSIDE, WAY_ABS = (replace(one, rows="ways") for one in (OUTSIDE, MEAN_ABS))
WAY_LARGEST = replace(WAY_ABS, name="largest |Δ log p| (nats)", unit="", estimate=computed("mean_abs", "max"))
OVER_TOGETHER = replace(
    OVER_BF16, name="mean |Δ log p|, over that of a rollout in a batch", rows="ways",
    over=("compared", named.TOGETHER),
)


def _effective(cap: float):
    return counted(lambda rows: scores.effective_share(np.minimum(rows["sum"], np.log(cap))))


# Whole sequences, by their length.
EFFECTIVE = Measure(
    "effective sample size of sequence ratios, as a share", form="{:.0%}", rows="sequences", by=("compared", "length"),
    estimate=_effective(np.inf),
)
EFFECTIVE_TRUNCATED = replace(
    EFFECTIVE, name=f"effective sample size of sequence ratios truncated at {named.CAP}", estimate=_effective(named.CAP)
)
TRUNCATED = replace(
    EFFECTIVE, name=f"share of sequence ratios above {named.CAP}",
    estimate=counted(lambda rows: (rows["sum"] > np.log(named.CAP)).mean()),
)
MASKED = replace(
    EFFECTIVE, name=f"share of sequence ratios outside [1/{named.CAP}, {named.CAP}]",
    estimate=counted(lambda rows: (rows["sum"].abs() > np.log(named.CAP)).mean()),
)
LOWEST, HIGHEST = (
    replace(EFFECTIVE, name=f"{which} sequence ratio", form="{:.2f}",
        estimate=counted(lambda rows, which=which: np.exp(rows["sum"].agg("min" if which == "lowest" else "max"))))
    for which in ("lowest", "highest")
)
TOKEN_TRUNCATED = replace(
    OUTSIDE, name=f"share of tokens whose ratio is above {named.CAP}", unit="",
    estimate=counted(lambda rows: (rows["log_ratio"] > np.log(named.CAP)).mean()),
)

# What a real engine samples.
ENGINE_OUTSIDE, ENGINE_ABS = (replace(one, rows="engine") for one in (OUTSIDE, MEAN_ABS))

# The policy-gradient run: the reward over all of its updates, against the matched arm of the same repetition.


def _gained(rows: pd.DataFrame, other: pd.DataFrame):
    both = rows.merge(other, on=["repetition", "update"], suffixes=("", "_matched"))
    gained = both.assign(gained=both["reward"] - both["reward_matched"], source=both["repetition"], sample=0)
    return mean("gained")(gained)


REWARD = Measure(
    "reward of the last update", "repetition", "arm", rows="learned", by=("arm",),
    estimate=lambda rows: mean("reward")(rows[rows["update"] == rows["update"].max()].assign(sample=0)),
)
GAINED = Measure(
    "mean reward over all updates, less that of the matched arm", "repetition", "arm", "{:.3f}", rows="learned",
    by=("arm",), over=("arm", named.MATCHED), estimate=_gained,
)
LEARNER_ABS = replace(
    REWARD, name="mean |Δ log p| at the first update (nats)", form="{:.2g}",
    estimate=lambda rows: mean("mean_abs")(rows[rows["update"] == 0].assign(sample=0)),
)

# Facts for the prose.
MODEL = noted("rollout", "models", 0, "name")
PROMPTS = Measure("prompts", rows="rollout", estimate=distinct("sample"), form="{:,.0f}")
TOKENS = replace(PROMPTS, name="tokens sampled", estimate=counted(len))
WAY_PROMPTS = replace(PROMPTS, rows="rollout_ways")
WAY_TOKENS = replace(TOKENS, rows="rollout_ways")
ENGINE_PROMPTS = replace(PROMPTS, rows="engine_rollout")
ENGINE_TOKENS = replace(TOKENS, rows="engine_rollout")
REPETITIONS = replace(PROMPTS, name="repetitions", rows="policy_gradient", estimate=distinct("repetition"))
UPDATES = replace(REPETITIONS, name="updates", estimate=distinct("update"))

_AS_FAR = Bound(1, "arithmetic", "as far")
_HALF = Bound(0.5, "ours", "half as far", "ratio")
_TENFOLD = Bound(10, "ours", "ten times as far", "ratio")
STATEMENTS = {
    "bf16-is-off-policy": holds(
        every(OUTSIDE.where(compared=named.BF16), "above", Bound(0.03, "ours", "three tokens in a hundred", "share")),
        "this model",
    ),
    "fp32-trainer-is-not-enough": holds(every(FP32_TRAINER, "above", _HALF), "this model"),
    "fp32-head-helps": holds(every(FP32_HEAD, "below", _AS_FAR), "this model"),
    "fp32-head-helps-more-than-an-fp32-trainer": holds(every(HEAD_OVER_FP32, "below", _AS_FAR), "this model"),
    "softmax-adds-little": holds(
        every(LOW_SOFTMAX, "inside", Bound(1.25, "ours", "a quarter", "ratio")), "this model"
    ),
    "a-fault-is-far-beyond": holds(every(FAULT, "above", _TENFOLD), "this model"),
}
