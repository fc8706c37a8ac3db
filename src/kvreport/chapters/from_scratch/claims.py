"""The claims of the forum thread about a model from scratch, each with the check that its YAML describes."""

import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvreport.chapters.from_scratch import logits, speed, tables, words
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW
from kvreport.chapters.from_scratch.results import Results
from kvreport.publishing.verdicts import Verdict, holds

APPEND, MASK, PROMPT, MODULO = FIXES


_NATS = "{:+.4f}"
# Nats a character below which a loss is called closed: a hundredth is a percent of likelihood.
_NEGLIGIBLE = 0.01
# Share of the posted cache's gap that a remedy must close to be said to mend it.
_MENDS = 0.5


def _finest(results: Results) -> pd.DataFrame | None:
    """Keep the rows of the finest dtype; None when rounding in it hides everything else."""
    rows, dtype = results.logits.rows, results.finest
    return None if dtype is None else rows[rows["dtype"] == dtype]


def _within_rounding(rows: pd.DataFrame) -> bool:
    return tables.is_rounding(rows["relative_rms"].max(), rows["dtype"].iloc[0])


_TOO_COARSE = Verdict("only 16-bit dtypes, in which rounding hides the difference: add float32", "not run")


def cached_is_worse(results: Results) -> Verdict:
    """Take the posted cache's gap."""
    gap = results.gaps[POSTED, WINDOW]
    here = f"{gap.text(_NATS)} nats a character"
    if (share := results.closed[tables.ABSOLUTE]) is not None:
        here += f", {share.text('{:.0%}')} of it from stale keys and values"
    return Verdict(here, holds(gap.low > 0, gap.high < 0, results.model["weights"]))


def cache_changes_nothing(results: Results) -> Verdict:
    """Compare the posted cache with the window, inside the first block and past it."""
    if (rows := _finest(results)) is None:
        return _TOO_COARSE
    rows = rows[rows["comparison"] == POSTED]
    inside = rows[rows["length"] <= rows["block"]]
    here = f"relative difference up to {inside['relative_rms'].max():.1e} in the first block"
    if len(inside) == len(rows):
        return Verdict(here + "; nothing read past it", "undecided")
    here += f", up to {rows['relative_rms'].max():.1e} past it ({rows['dtype'].iloc[0]})"
    return Verdict(here, holds(_within_rounding(rows), not _within_rounding(rows), results.model["weights"]))


def _remedy(results: Results, fix: str) -> tuple[str, Estimate | None]:
    """Say what a remedy does to the loss; give the share of the gap that it closes, None where there is no gap."""
    change, share = results.gaps[fix, POSTED], results.closed[fix]
    closed = "there is no gap to close" if share is None else f"closes {share.text('{:z.1%}')} of the gap"
    return f"the remedy changes the loss by {change.text(_NATS)} nats a character; {closed}", share


def _no_effect(results: Results, fix: str, more: str = "") -> Verdict:
    """Judge a point by what its remedy does to the logits and the loss of the posted cache."""
    if (fine := _finest(results)) is None:
        return _TOO_COARSE
    rounding = _within_rounding(fine[fine["comparison"] == fix])
    said, share = _remedy(results, fix)
    here = f"bits equal in {words.equal_steps(results.equal, fix)}; {said}{more}"
    mends = share is not None and share.low >= _MENDS
    return Verdict(here, holds(not rounding and mends, rounding, results.model["weights"]))


def roll_scrambles(results: Results) -> Verdict:
    """Put an append in place of the roll."""
    rows = results.logits.rows
    shuffled = rows[rows["comparison"] == logits.SHUFFLED]
    worst = shuffled.groupby("dtype", sort=False)["relative_rms"].max()
    said = "; ".join(f"{dtype} {value:.1e}" for dtype, value in worst.items())
    return _no_effect(results, APPEND, f"; shuffled on purpose, logits differ relatively by {said}")


def mask_missing(results: Results) -> Verdict:
    """Write the mask of the cached step out."""
    return _no_effect(results, MASK)


def prompt_skipped(results: Results) -> Verdict:
    """Feed the last character of prompts alone."""
    if (rows := _finest(results)) is None:
        return _TOO_COARSE
    rows = rows[(rows["comparison"] == logits.LAST_ONLY) & (rows["length"] > 1)]
    beyond = [not tables.is_rounding(r.relative_rms, r.dtype) for r in rows.itertuples()]
    here = f"beyond rounding for {sum(beyond)} of {len(beyond)} longer prompts, logits up to {rows['max_abs'].max():.2g} apart"
    return Verdict(here, holds(all(beyond), not any(beyond), results.model["weights"]))


def prompt_is_the_cause(results: Results) -> Verdict:
    """Feed the whole prompt where the prompt is the thread's one character."""
    return _no_effect(results, PROMPT, "; the post starts from one character")


def positions_misalign(results: Results) -> Verdict:
    """Take positions modulo the block."""
    here, share = _remedy(results, MODULO)
    if share is None:
        return Verdict(here, "undecided")
    return Verdict(here, holds(share.low >= _MENDS, share.high < _MENDS, results.model["weights"]))


def outputs_match(results: Results) -> Verdict:
    """Compare the reply's greedy texts within a block."""
    rows = results.partings
    # The character behind a full block is still chosen from within it.
    apart = int((rows["first"] <= rows["block"]).sum())
    here = f"{len(rows) - apart} of {len(rows)} greedy texts equal through the first block of {rows['block'].iloc[0]}"
    return Verdict(here, holds(apart == 0, apart == len(rows), results.model["weights"]))


def outputs_match_beyond(results: Results) -> Verdict:
    """Compare the reply's greedy texts to their ends, and the logits behind them."""
    if (fine := _finest(results)) is None:
        return _TOO_COARSE
    rows = results.partings
    equal = int(rows["first"].isna().sum())
    own = fine[(fine["comparison"] == logits.REPLYS_OWN) & (fine["length"] > fine["block"])]
    here = (
        f"{equal} of {len(rows)} greedy texts equal through {rows['written'].iloc[0]} characters; "
        f"logits up to {own['max_abs'].max():.2g} apart past the first block"
    )
    # One text suffices against "identical", unless rounding alone made it part.
    broken = equal < len(rows) and not _within_rounding(own)
    return Verdict(here, holds(equal == len(rows) and _within_rounding(own), broken, results.model["weights"]))


def reply_improves(results: Results) -> Verdict:
    """Take the loss of the reply's cache against that of the posted one."""
    change = results.gaps[tables.REPLY, POSTED]
    here = f"{change.text(_NATS)} nats a character against the posted cache"
    return Verdict(here, holds(change.high < 0, change.low > 0, results.model["weights"]))


def reply_cures(results: Results) -> Verdict:
    """Take the loss of the reply's cache against that of the window."""
    gap = results.gaps[tables.REPLY, WINDOW]
    here = f"{gap.text(_NATS)} nats a character against the window"
    return Verdict(here, holds(gap.high < _NEGLIGIBLE, gap.low > 0, results.model["weights"]))


def mask_sees_the_past_only(results: Results) -> Verdict:
    """Take a prompt in two chunks under both masks."""
    if (rows := _finest(results)) is None:
        return _TOO_COARSE
    rows = rows[rows["length"] > 1]
    theirs = rows[rows["comparison"] == "prompt: two chunks, reply's mask"]
    shifted = rows[rows["comparison"] == "prompt: two chunks, shifted mask"]
    here = (
        f"logits up to {theirs['max_abs'].max():.2g} apart under the reply's mask, "
        f"{shifted['max_abs'].max():.1e} under a shifted one"
    )
    wrong = not _within_rounding(theirs) and _within_rounding(shifted)
    return Verdict(here, holds(_within_rounding(theirs), wrong, results.model["weights"]))


def three_times_faster(results: Results) -> Verdict:
    """Time the reply's run both ways."""
    ratio, short = results.run_ratios[speed.ALL_ROWS], results.run_ratios[WINDOW]
    here = (
        f"on this machine {ratio.text('{:.2f}')} x, {short.text('{:.2f}')} x when the window computes one row of logits "
        f"(in brackets: {words.bracket(results)})"
    )
    # Random weights are what the reply timed as well, but its machine is another one: less here does not refute it.
    return Verdict(here, holds(ratio.low > 3, False, "local"))


def beside(this: pd.DataFrame, recorded: pd.DataFrame) -> pd.DataFrame:
    """Set the verdicts of one run beside those of another."""
    return pd.DataFrame(
        {
            "claim": recorded["claim"],
            "at the thread's size": recorded["here"],
            "verdict there": recorded["verdict"],
            "verdict of this run": this["verdict"],
        }
    )


CHECKS = {
    "cached-is-worse": cached_is_worse,
    "cache-changes-nothing": cache_changes_nothing,
    "roll-scrambles": roll_scrambles,
    "mask-missing": mask_missing,
    "prompt-skipped": prompt_skipped,
    "prompt-is-the-cause": prompt_is_the_cause,
    "positions-misalign": positions_misalign,
    "outputs-match": outputs_match,
    "outputs-match-beyond": outputs_match_beyond,
    "reply-improves": reply_improves,
    "reply-cures": reply_cures,
    "mask-sees-the-past-only": mask_sees_the_past_only,
    "three-times-faster": three_times_faster,
}
