"""Measures of the chapter on trainer and rollout, then the sentences that they decide."""


import numpy as np

from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.publishing.estimators import counted, distinct, mean, part, ratio_of_means, share
from kvreport.publishing.measures import Measure, noted, of_model
from kvreport.publishing.rules import NONE, Bound

# What each comparison of the rollout's own texts gives.
OUTSIDE = Measure(
    "share of tokens whose importance ratio is outside [0.9, 1.1]", "file", "comparison", "{:.1%}", rows="pairs",
    by=("compared",), estimate=share("outside_narrow"),
)
CLIPPED = OUTSIDE.alike("share of tokens whose importance ratio is outside [0.8, 1.2]", share("outside_ppo_clip"))
MEAN_ABS = OUTSIDE.alike("mean |Δ log p| (nats)", mean("mean_abs"), form="{:.2g}")
EXP_ABS = MEAN_ABS.alike("mean exp|Δ log p|", mean("mean_exp_abs"), form="{:.3f}")
K1, K2, K3 = (MEAN_ABS.alike(f"{name} (nats)", mean(name)) for name in ("k1", "k2", "k3"))
CHI_SQUARED = MEAN_ABS.alike("χ²", mean("chi_squared"))
OVER_BF16 = MEAN_ABS.alike(
    "mean |Δ log p|, over that of a bf16 trainer", ratio_of_means("mean_abs"), form="{:.2f}",
    over=("compared", named.BF16),
)
FP32_TRAINER, FP32_HEAD = (OVER_BF16.where(compared=name) for name in (named.FULL, named.HEAD))
HEAD_OVER_FP32 = OVER_BF16.alike(
    "mean |Δ log p| with an LM head in fp32, over that of a fp32 trainer", over=("compared", named.FULL)
).where(compared=named.HEAD)

# The beginnings of the texts, in every way.
WAY_OUTSIDE, WAY_ABS = (one.alike(rows="ways") for one in (OUTSIDE, MEAN_ABS))
WAY_COUNTED = WAY_OUTSIDE.alike(estimate=part("outside_narrow"), unit="")

# Of what another engine samples.
ENGINE_OUTSIDE, ENGINE_ABS = (one.alike(rows="engine") for one in (OUTSIDE, MEAN_ABS))
ENGINE_AGAIN = ENGINE_ABS.where(compared=named.ENGINE_ITSELF)
ENGINE_OVER_BF16 = OVER_BF16.alike(rows="engine", over=("compared", named.ENGINE_BF16))

# What a policy learns; a repetition has its prompts and random numbers in common between arms.
LEARNED = Measure(
    "mean reward of the last quarter of updates", "repetition", "arm", "{:.2f}", rows="late", by=("arm",),
    estimate=mean("reward"),
)
LEARNED_OVER = LEARNED.alike(
    "mean reward of the last quarter of updates, over that of matched log-probabilities", ratio_of_means("reward"),
    over=("arm", named.MATCHED),
)
LEARNED_FAULTY = LEARNED_OVER.where(arm=named.FAULTY)
REPETITIONS = Measure("repetitions", rows="policy_gradient", estimate=distinct("repetition"), form="{:.0f}")
UPDATES = REPETITIONS.alike("updates", distinct("update"))

TOKEN_TRUNCATED = OUTSIDE.alike(
    f"share of tokens whose ratio is above {named.CAP}",
    counted(lambda rows: (rows["log_ratio"] > np.log(named.CAP)).mean()), unit="",
)

# Facts for the prose.
MODEL = noted("rollout", "models", 0, "name")
PROMPTS, WAY_PROMPTS, ENGINE_PROMPTS = (
    Measure("prompts", rows=rows, estimate=distinct("sample"), form="{:,.0f}") for rows in ("rollout", "ways", "engine")
)
TOKENS = PROMPTS.alike("tokens sampled", counted(len))

_AS_FAR = Bound(1, "arithmetic", "as far")
_THREE_IN_A_HUNDRED = Bound(0.03, "ours", "three tokens in a hundred", "share")
_HALF = Bound(0.5, "ours", "half as far", "ratio")
_TENFOLD = Bound(10, "ours", "ten times as far", "ratio")
_QUARTER = Bound(1.25, "ours", "a quarter", "ratio")

STATEMENTS = {
    "bf16-is-off-policy": of_model(OUTSIDE.where(compared=named.BF16), "above", _THREE_IN_A_HUNDRED),
    "fp32-trainer-is-not-enough": of_model(FP32_TRAINER, "above", _HALF),
    "fp32-head-helps": of_model(FP32_HEAD, "below", _AS_FAR),
    "fp32-head-helps-more-than-an-fp32-trainer": of_model(HEAD_OVER_FP32, "below", _AS_FAR),
    "softmax-adds-little": of_model(OVER_BF16.where(compared=named.LOW), "inside", _QUARTER),
    "fp16-stays-close": of_model(WAY_COUNTED.where(compared=named.BOTH_FP16), "at most", NONE),
    "row-invariant-is-on-policy": of_model(WAY_ABS.where(compared=named.BOTH_INVARIANT), "at most", NONE),
    "vllm-is-off-policy-too": of_model(ENGINE_OUTSIDE.where(compared=named.ENGINE_BF16), "above", _THREE_IN_A_HUNDRED),
    "vllm-reads-its-own-text-bit-for-bit": of_model(ENGINE_AGAIN, "at most", NONE, on="Zen 3"),
    "arms-learn-alike": of_model(LEARNED_OVER, "inside", _QUARTER),
    "a-fault-is-far-beyond": of_model(OVER_BF16.where(compared=named.SHIFTED), "above", _TENFOLD),
}
