"""The claims of the forum thread about a model from scratch: each one's rule, and what of the rows it looks at."""

from kvbook.measuring import estimates
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.from_scratch import logits, speed, tables
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW
from kvreport.chapters.from_scratch.results import Results
from kvreport.publishing.judging import Check, Evidence, Measured, fact, facts, missing
from kvreport.publishing.rules import HALF, Bound, Quantity, Rule, every, refuted, reproduced
from kvreport.publishing.verdicts import Claims

_APPEND, _MASK, _PROMPT, _MODULO = FIXES
_NATS = "{:+.4f}"
WORSE = Bound(0.01, "ours", "nats a character, a percent of likelihood")
_MENDS = Bound(-0.01, "ours", "nats a character, a percent of likelihood")
ROUNDING = Bound(tables.MOST_ROUNDOFFS, "ours", "more than roundings pile up to")
NONE = Bound(0, "arithmetic", "none")
THRICE = Bound(3, "document", "“>3x”")


def _weights(results: Results) -> str:
    return results.model["weights"]


def lost(results: Results, way: str, against: str) -> list[Measured]:
    """Give what a way loses past the first block, in nats a character."""
    if results.loss is None:
        return []
    files = results.behind.index.get_level_values("source").nunique()
    return [Measured("", results.gaps[way, against], files)]


GAP = Quantity(
    "loss of the posted cache past the first block, minus the window's, in nats a character", "file", form=_NATS
)


def _cached_is_worse(results: Results) -> Evidence:
    share = results.closed[tables.ABSOLUTE]
    beside = "" if share is None else f"{share.text('{:.0%}')} of it from stale keys and values"
    return Evidence(_weights(results), {GAP: lost(results, POSTED, WINDOW)}, beside)


CHANGE = Quantity("change of the posted cache's loss under the remedy, in nats a character", "file", form=_NATS)


def _remedy(results: Results, fix: str, more: str = "") -> Evidence:
    """Give what a remedy does to the loss, and in how many steps the logits stay equal."""
    beside = f"logits of one text equal bit for bit in {tables.equal_steps(results.equal, fix)}{more}"
    return Evidence(_weights(results), {CHANGE: lost(results, fix, POSTED)}, beside)


def _roll_scrambles(results: Results) -> Evidence:
    rows = results.logits.rows
    worst = rows[rows["comparison"] == logits.SHUFFLED].groupby("dtype", sort=False)["relative_rms"].max()
    said = "; ".join(f"{dtype} {value:.1e}" for dtype, value in worst.items())
    return _remedy(results, _APPEND, f"; shuffled on purpose, logits differ relatively by {said}")


def _mask_missing(results: Results) -> Evidence:
    return _remedy(results, _MASK)


def _prompt_is_the_cause(results: Results) -> Evidence:
    return _remedy(results, _PROMPT, "; the post starts from one character")


def _positions_misalign(results: Results) -> Evidence:
    share = results.closed[_MODULO]
    beside = "there is no gap to the window" if share is None else f"closes {share.text('{:z.1%}')} of the gap"
    return Evidence(_weights(results), {CHANGE: lost(results, _MODULO, POSTED)}, beside)


SKIPPED = Quantity(
    "relative difference of the logits after the last character alone from those after the prompt, in unit roundoffs",
    series="prompt length", form="{:.1e}",
)


def _prompt_skipped(results: Results) -> Evidence:
    rows = results.logits.rows
    rows = rows[(rows["dtype"] == results.finest) & (rows["comparison"] == logits.LAST_ONLY) & (rows["length"] > 1)]
    if rows.empty:
        return missing(_weights(results), "only 16-bit dtypes, in which rounding hides the difference: add float32")
    roundoffs = rows["relative_rms"] / UNIT_ROUNDOFF[results.finest]
    found = facts(zip(rows["length"], roundoffs, strict=True))
    return Evidence(_weights(results), {SKIPPED: found}, f"one text, {len(rows)} prompts of more than one character")


PARTED = Quantity("greedy texts of the reply that diverge within the first block", form="{:.0f}")
EQUAL = Quantity("share of greedy texts of the reply that are equal through the first block", "text")


def _outputs_match(results: Results) -> Evidence:
    rows = results.partings
    # The character behind a full block is still chosen from within it.
    apart = rows["first"] <= rows["block"]
    found = {
        PARTED: [fact(apart.sum())],
        EQUAL: [Measured("", *estimates.share_over(rows, ~apart, "sample"))],
    }
    return Evidence(_weights(results), found, f"the first block has {rows['block'].iloc[0]} characters")


RATIO = Quantity("time of 50 new tokens without a cache over that with it", "repetition")


def _three_times_faster(results: Results) -> Evidence:
    rows = results.speed.rows
    count = rows.loc[rows["measure"] == speed.RUN, "repetition"].nunique()
    short = results.run_ratios[WINDOW]
    beside = f"{short.text('{:.2f}')} times when the window computes one row of logits"
    # Random weights are what the reply timed as well, but its machine is another one.
    return Evidence("another machine", {RATIO: [Measured("", results.run_ratios[speed.ALL_ROWS], count)]}, beside)


_REMEDY = Rule((reproduced(every(CHANGE, "below", _MENDS)), refuted(every(CHANGE, "above", _MENDS))))

CHECKS = {
    "cached-is-worse": Check(
        Rule((reproduced(every(GAP, "above", WORSE)), refuted(every(GAP, "below", WORSE)))),
        _cached_is_worse,
    ),
    "roll-scrambles": Check(_REMEDY, _roll_scrambles),
    "mask-missing": Check(_REMEDY, _mask_missing),
    "prompt-skipped": Check(
        Rule((reproduced(every(SKIPPED, "above", ROUNDING)), refuted(every(SKIPPED, "below", ROUNDING)))),
        _prompt_skipped,
    ),
    "prompt-is-the-cause": Check(_REMEDY, _prompt_is_the_cause),
    "positions-misalign": Check(_REMEDY, _positions_misalign),
    "outputs-match": Check(
        Rule(
            (
                refuted(every(PARTED, "above", NONE), one_is_enough=True),
                reproduced(every(PARTED, "at most", NONE), every(EQUAL, "above", HALF)),
            )
        ),
        _outputs_match,
    ),
    "three-times-faster": Check(
        Rule((reproduced(every(RATIO, "above", THRICE)), refuted(every(RATIO, "below", THRICE)))),
        _three_times_faster,
    ),
}

CLAIMS = Claims("forum-scratch", CHECKS)
