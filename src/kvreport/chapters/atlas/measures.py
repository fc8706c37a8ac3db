"""What the rows of the chapter on the atlas say: its measures, then the sentences that they decide."""


import pandas as pd

from kvbook.atlas import CHUNKED, LENGTH, PADDED, STATIC, WHOLE, WINDOW, table
from kvreport.publishing.estimators import counted, lacking, part, total
from kvreport.publishing.measures import Measure, always, here, noted
from kvreport.publishing.rules import HALF, NONE, Bound


def _lead_of_chunks(paths: pd.DataFrame) -> float:
    wrong = paths.groupby("path")["wrong"].sum()
    return wrong[[CHUNKED, STATIC]].min() - wrong.drop([CHUNKED, STATIC]).max()


# Counts for the prose.
VERSION = noted("atlas", "machine", "transformers")
TORCH = noted("atlas", "machine", "torch", write=lambda version: version.partition("+")[0])
LISTED = Measure("architectures", form="{:.0f}", rows="architectures", estimate=counted(len))
RAN, JUDGED, SOUND, WRONG, RAISING, TRIED, EXACT, REFUSED, UNDECLARED = (
    LISTED.alike(estimate=total(column))
    for column in ("ran", "judged", "sound", "bug", "raises", "tried", "exact", "refused", "undeclared")
)
NOT_RUN = LISTED.alike(estimate=lacking("ran"))
UNDECLARED_ONLY = UNDECLARED.where(elsewhere=False)
REFUSED_NAMES = LISTED.alike(by=("architecture",)).where(refused=True)
WRONG_IN_CHUNKS, WRONG_STATIC = (
    LISTED.alike(rows="paths", estimate=total("wrong")).where(path=path) for path in (CHUNKED, STATIC)
)
OTHERS_WRONG = LISTED.alike(
    "paths on which Mamba 2, RWKV or xLSTM is wrong", total("wrong"), rows="paths", census="all paths that were tried"
).where(architecture=("mamba2", "rwkv", "xlstm"))
STATIC_RAISING = WRONG_STATIC.alike(estimate=total("error"))
PADDING_CHANGES = LISTED.alike(rows="paths", estimate=total("padding")).where(path=PADDED)
LENGTH, WINDOW = (
    LISTED.alike(f"tokens of a {what}", counted(lambda _, length=length: length))
    for what, length in (("text", LENGTH), ("window", WINDOW))
)

# Shares are judged of a run that has nearly all architectures.
_SHARE = "share of the architectures that"
_SOUND_SHARE = Measure(
    f"{_SHARE} could be judged whose cache is exact or rounds", rows="architectures", estimate=part("sound")
).where(judged=True, enough=True)
_EXACT_SHARE = Measure(
    f"{_SHARE} were tried in row-invariant mode and are bitwise exact", rows="architectures", estimate=part("exact")
).where(tried=True, enough=True)
DIFFERENT = LISTED.alike(
    "architectures that differ under row-invariant mode", total("different"), census="all architectures that were tried"
)
LEAD_OF_CHUNKS = LISTED.alike(
    "architectures wrong in chunks, with either cache, minus those of any other path", counted(_lead_of_chunks),
    rows="paths",
).where(enough=True)
FED_TWICE = Measure(
    f"{_SHARE} take such a cache and are fed the prompt twice", rows="paths", estimate=part("twice")
).where(path=WHOLE, outcome=(table.FED_TWICE, *table.JUDGED), enough=True)
CROPPABLE = FED_TWICE.alike(f"{_SHARE} are fed a prompt twice and can be cropped", part("croppable")).where(twice=True)
RECURRENT = CROPPABLE.alike("architectures that hold a recurrent state", total("recurrent"), form="{:.0f}")
LINEAR_FIRST = Measure(
    f"{_SHARE} were searched in {{dtype}} and begin with a linear layer", rows="first operations",
    estimate=part("linear"),
).where(dtype="float32", enough=True)
ATTENTION_FIRST = Measure(
    f"{_SHARE} were searched in {{dtype}} and begin with attention", rows="first operations", estimate=part("attention")
).where(dtype="bfloat16", enough=True)
DIFFERING = LISTED.alike(
    "architectures whose verdict another processor's rows change", total("differs"), rows="against the book"
).where(enough=True)

_NINE_IN_TEN = Bound(0.9, "ours", "nine in ten", "share")

STATEMENTS = {
    "caches-are-sound": always(_SOUND_SHARE, "above", _NINE_IN_TEN),
    "none-differs-silently": always(DIFFERENT, "at most", NONE, headline=True),
    "row-invariant-covers-most": always(_EXACT_SHARE, "at least", Bound(0.95, "ours", "nineteen in twenty", "share")),
    "chunks-are-worst": always(LEAD_OF_CHUNKS, "above", NONE),
    "other-states-are-right": always(OTHERS_WRONG, "at most", NONE),
    "prompt-fed-twice": always(FED_TWICE, "above", _NINE_IN_TEN),
    "verdicts-agree": always(DIFFERING, "at most", NONE),
    "fp32-products-first": here(LINEAR_FIRST, "above", _NINE_IN_TEN),
    "bf16-attention-first": here(ATTENTION_FIRST, "above", HALF),
}
