"""Measures of the chapter on trainer and rollout, then the sentences that they decide."""

from dataclasses import replace

from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.chapters.trainer_and_rollout.rows import EXPERIMENTS, ROWS  # noqa: F401
from kvreport.publishing.estimators import counted, distinct, mean
from kvreport.publishing.measures import Measure, holds, noted
from kvreport.publishing.rules import Bound, every

OUTSIDE = Measure(
    "share of tokens whose importance ratio is outside [0.9, 1.1]", "text", "comparison", "{:.1%}", rows="pairs",
    by=("compared",), estimate=mean("outside_narrow"),
)
CLIPPED = replace(
    OUTSIDE, name="share of tokens whose importance ratio is outside [0.8, 1.2]", estimate=mean("outside_ppo_clip")
)
MEAN_ABS = replace(OUTSIDE, name="mean |Δ log p| (nats)", form="{:.2g}", estimate=mean("mean_abs"))
K3 = replace(MEAN_ABS, name="k3 (nats)", estimate=mean("k3"))

MODEL = noted("rollout", "models", 0, "name")
PROMPTS = Measure("prompts", rows="rollout", estimate=distinct("sample"), form="{:,.0f}")
TOKENS = replace(PROMPTS, name="tokens sampled", estimate=counted(len))

STATEMENTS = {
    "bf16-is-off-policy": holds(
        every(OUTSIDE.where(compared=named.BF16), "above", Bound(0.03, "ours", "three tokens in a hundred", "share"))
    ),
}
