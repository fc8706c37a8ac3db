"""What the rows of the chapter on a model from scratch say: its measures, then the sentences and claims they decide."""


import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvreport.chapters.from_scratch import rows
from kvreport.publishing import wording
from kvreport.publishing.estimators import computed, counted, first, mean, median_of_ratios, ratio_of_means, share
from kvreport.publishing.found import Found
from kvreport.publishing.judging import UNFITTED
from kvreport.publishing.measures import Measure, always, claim, either, here, noted, of_model, verdict
from kvreport.publishing.rules import HALF, NONE, Bound, Side, every, refuted, reproduced
from kvreport.publishing.statements import Statement
from kvreport.publishing.verdicts import Claims


def _closed(of: pd.DataFrame, window: pd.DataFrame) -> Estimate | None:
    """Estimate what share of the posted cache's gap to the window a change closes; None where there is no gap."""
    return ratio_of_means("change")(of, window) if mean("change")(window).high < 0 else None


ROUNDOFFS = Measure(
    "largest relative difference of the logits in unit roundoffs", "", "dtype", "{:.1e}", rows="steps", by=("dtype",),
    estimate=computed("roundoffs", "max"),
)
UNEQUAL = ROUNDOFFS.alike("steps whose logits are not bitwise identical", computed("unequal", "sum"), form="{:.0f}")
GAP = Measure(
    "loss past the first block, minus the window's, in nats a character", "file", form="{:+.3f}", rows="past",
    by=("way",), estimate=mean("gap"),
)
CHANGE = GAP.alike("change of the posted cache's loss under the remedy, in nats a character", mean("change"))
CLOSED = GAP.alike(
    "share of the posted cache's gap to the window that is closed", _closed, form="{:z.1%}", over=("way", rows.WINDOW)
)
BUCKET_LOSS = Measure(
    "loss in a bucket of lengths", "file", rows="buckets", by=("way", "read_from", "read_to", "block", "n_scored"),
    estimate=mean("nats"),
)
BUCKET_GAP = BUCKET_LOSS.alike(estimate=mean("gap"))
SKIPPED = Measure(
    "relative difference of the logits after the last character alone from those after the prompt, in unit roundoffs",
    series="prompt length", form="{:.1e}", rows="skipped prompts", by=("length",), estimate=first("roundoffs"),
)
DIVERGED = Measure(
    "greedy texts of the reply that diverge within the first block", form="{:.0f}", rows="divergences",
    estimate=computed("diverges", "sum"),
)
EQUAL = Measure(
    "share of greedy texts of the reply that are equal through the first block", "text", rows="divergences",
    estimate=share("equal", "text"),
)
STEP_TIME = Measure(
    "time of a step over the posted cache's", "repetition", rows="times", by=("model", "way", "length"),
    estimate=lambda times: median_of_ratios("ratio")(times, times.assign(ratio=1.0)),
).where(measure=rows.STEP)
TIME = STEP_TIME.alike("time over the posted cache's", by=("way",), keep=())
PAST_TIME = TIME.where(measure=rows.PAST)
RUN_TIME = TIME.alike("time of the new tokens without a cache over that with it").where(measure=rows.RUN)

# For the prose.
POSTED_GAP, REPLY_GAP = (GAP.where(way=way) for way in (rows.POSTED, rows.REPLY))
# A refill of a whole block holds as many characters as the reply's cache.
STUCK = REPLY_GAP.alike("loss of the reply's cache minus that of a refill of a block", mean("over_refill"))
STALE = CLOSED.where(way=rows.ABSOLUTE).alike(form="{:.0%}")
MODULO = CLOSED.where(way=rows.MODULO)
WINDOW_LOSS = GAP.alike("loss of the window", mean("nats"), form="{:.2f}").where(way=rows.WINDOW)
REFILL_TIME, WINDOW_TIME = (PAST_TIME.where(scheme=scheme) for scheme in (rows.HALF, rows.WINDOW))
RUN_ALL_ROWS, RUN_ONE_ROW = (RUN_TIME.where(way=way) for way in (rows.ALL_ROWS, rows.WINDOW))
TEXTS = Measure("texts", rows="scratch_loss", estimate=computed("sample", "nunique"), form="{:.0f}")
BEST_HELD = Measure(
    "characters held where the loss is lowest", rows="scratch_held", form="{:.0f}",
    estimate=counted(lambda of: of.groupby("held")["nats"].mean().idxmin()),
)
TRAINED = Measure("characters of training", rows="training", estimate=first("trained_characters"), form="{:,.0f}")
LAYERS, WIDTH, BLOCK = (noted("scratch_loss", "models", 0, "shape", name) for name in ("layers", "width", "block"))
TABLE = noted("scratch_loss", "models", 0, "shape", "table", write="{:,}".format)
HALF_BLOCK = TEXTS.alike("half a block", counted(lambda of: of["block"].iloc[0] // 2))
RUN_TOKENS = Measure("new tokens", rows="times", estimate=first("length"), form="{:.0f}").where(measure=rows.RUN)

_PERCENT_WORSE = Bound(0.01, "ours", "nats a character, a percent of likelihood")
_PERCENT_BETTER = Bound(-0.01, "ours", "nats a character, a percent of likelihood")
_ROUNDING = Bound(rows.MOST_ROUNDOFFS, "ours", "more than roundings pile up to")


def _differs(comparison: str, side: Side, past: bool = False) -> Statement:
    """Check on which side of rounding two ways differ, in the first block or past it."""
    return always(ROUNDOFFS.where(comparison=comparison, past=past), side, _ROUNDING)


def _changes_nothing(fix: str) -> Statement:
    return always(UNEQUAL.where(comparison=fix), "at most", NONE)


STATEMENTS = {
    "posted-cache-is-worse": always(POSTED_GAP, "above", _PERCENT_WORSE, headline=True),
    "inside-it-is-rounding": _differs(rows.POSTED, "below"),
    "past-it-is-a-bug": _differs(rows.POSTED, "above", past=True),
    "stale-keys-are-the-cause": always(STALE, "above", HALF, headline=True),
    "append-changes-nothing": _changes_nothing(rows.APPEND),
    "order-does-not-matter": _differs(rows.SHUFFLED, "below", past=True),
    "mask-changes-nothing": _changes_nothing(rows.MASK),
    "chunks-need-a-shifted-mask": _differs(rows.CHUNKED_REPLY, "above"),
    "shifted-mask-is-right": _differs(rows.CHUNKED_SHIFTED, "below"),
    "prompt-changes-nothing-here": _changes_nothing(rows.PROMPT),
    "last-character-alone-is-a-bug": _differs(rows.LAST_ONLY, "above"),
    "modulo-closes-little": of_model(MODULO, "below", Bound(0.1, "ours", "a tenth of the gap", "share")),
    "reply-is-worse-too": always(REPLY_GAP, "above", _PERCENT_WORSE),
    "short-context-does-not-cost": of_model(GAP.where(scheme=rows.WHOLE), "below", NONE),
    "stuck-position-costs": always(STUCK, "above", _PERCENT_WORSE),
    "refill-agrees-with-its-window": _differs(rows.HALF, "below", past=True),
    "refill-is-no-worse": of_model(GAP.where(scheme=rows.HALF), "below", _PERCENT_WORSE),
    "refill-is-as-fast": here(REFILL_TIME, "below", Bound(1.25, "ours", "a quarter more time", "ratio")),
    "window-is-slow": here(WINDOW_TIME, "above", Bound(3, "ours", "three times the time", "ratio")),
    "more-than-twice": here(RUN_ALL_ROWS, "above", Bound(2, "ours", "twice", "ratio")),
}


def _text(measure: Measure, found: Found) -> str:
    fitted = (one.estimate for one in measure(found) if one.estimate is not UNFITTED)
    return ", ".join(estimate.text(measure.form) for estimate in fitted)


def _stale(found: Found) -> str:
    closed = _text(STALE, found)
    return f"{closed} of it from stale keys and values" if closed else ""


def _modulo(found: Found) -> str:
    closed = _text(MODULO, found)
    return f"closes {closed} of the gap" if closed else "there is no gap to the window"


def _shuffled(found: Found) -> str:
    steps = found["steps"]
    worst = steps[steps["comparison"] == rows.SHUFFLED].groupby("dtype", sort=False)["relative_rms"].max()
    said = "; ".join(f"{dtype} {value:.1e}" for dtype, value in worst.items())
    return f"; shuffled on purpose, logits differ relatively by {said}"


def _remedy(fix: str, more=lambda _: ""):
    """Judge a remedy by what it does to the loss; beside that stands in how many steps the logits stay equal."""

    def beside(found: Found) -> str:
        steps = found["steps"]
        counts = steps[steps["comparison"] == fix].groupby("dtype", sort=False)["equal"].agg(["sum", "size"])
        said = {of.Index: f"{of.sum} of {of.size} steps" for of in counts.itertuples()}
        return f"logits of one text equal bit for bit in {wording.in_dtypes(said)}{more(found)}"

    return claim(*either(CHANGE.where(way=fix), "below", _PERCENT_BETTER), beside=beside)


CHECKS = {
    "cached-is-worse": claim(*either(POSTED_GAP, "above", _PERCENT_WORSE), beside=_stale),
    "roll-scrambles": _remedy(rows.APPEND, _shuffled),
    "mask-missing": _remedy(rows.MASK),
    "prompt-skipped": claim(
        *either(SKIPPED, "above", _ROUNDING, every),
        beside=lambda found: f"one text, {len(found['skipped prompts'])} prompts of more than one character",
        missing=lambda found: (
            "only 16-bit dtypes, in which rounding hides the difference: add float32"
            if found["skipped prompts"].empty else ""
        ),
    ),
    "prompt-is-the-cause": _remedy(rows.PROMPT, lambda _: "; the post starts from one character"),
    "positions-misalign": claim(*either(CHANGE.where(way=rows.MODULO), "below", _PERCENT_BETTER), beside=_modulo),
    "outputs-match": claim(
        refuted(every(DIVERGED, "above", NONE), one_is_enough=True),
        reproduced(every(DIVERGED, "at most", NONE), every(EQUAL, "above", HALF)),
        beside=lambda found: f"the first block has {found['divergences']['block'].iloc[0]} characters",
    ),
    "three-times-faster": claim(
        *either(RUN_ALL_ROWS, "above", Bound(3, "document", "“>3x”")),
        beside=lambda found: f"{_text(RUN_ONE_ROW, found)} times when the window computes one row of logits",
        # Random weights are what the reply timed as well, but its machine is another one.
        whose=lambda _: False,
    ),
}
CLAIMS = Claims("forum-scratch", CHECKS)
THRICE = verdict(CHECKS["three-times-faster"])
