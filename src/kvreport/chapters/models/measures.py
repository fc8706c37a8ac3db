"""What the page on the models says of them: its measures, and the sentence that they decide."""

from kvreport.chapters.models.rows import CAUSAL
from kvreport.chapters.models.tables import as_code
from kvreport.publishing.estimators import counted, distinct, first
from kvreport.publishing.measures import Measure, always, noted, worded
from kvreport.publishing.rules import Bound

OVER_BIGRAM = Measure(
    "bits per byte on held-out text over those of the bigram model", "", "family", census="all families",
    rows="stand ins", by=("family",), estimate=counted(lambda of: (of["model"] / of["bigram_backoff"]).iloc[0]),
).where(objective=CAUSAL)
_QUARTER_FEWER = Bound(0.75, "ours", "a quarter fewer bits", "ratio")
STATEMENTS = {"stand-ins-have-learnt": always(OVER_BIGRAM, "below", _QUARTER_FEWER, headline=True)}

# Facts for the prose.
FAMILIES = Measure("families", form="{:.0f}", rows="stand ins", estimate=distinct("family"))
MILLIONS = FAMILIES.alike(
    "million parameters", counted(lambda of: of["parameters"].iloc[0] / 1e6), form="{:.1f}", by=("family",)
)
LARGE_FP32, LARGE_16, LARGE_4 = (
    Measure("GiB of weights", form="{:.0f}", rows="large models", by=("hub id",), estimate=first(stored))
    for stored in ("fp32", "16-bit", "4-bit")
)
HELD_OUT_FILES = FAMILIES.alike("held-out files", first("held-out files"))
TRAINED_TOKENS = worded(
    "stand ins", lambda of: " and ".join(f"{count / 1e6:.1f}" for count in sorted(of["trained tokens"].unique()))
)
N_NEW_TOKENS = noted("greedy_samples", "settings", "n_new_tokens")
PROMPT = noted("greedy_samples", "settings", "prompt", write=as_code)
