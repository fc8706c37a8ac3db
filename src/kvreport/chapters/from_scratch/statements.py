"""The numbers and statements of the chapter on the thread about a model from scratch."""

import json
from collections.abc import Callable

from kvbook.measuring.estimates import Estimate
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.from_scratch import claims, logits, results, speed, tables
from kvreport.chapters.from_scratch.gpt import checkpoints
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW, refill_name
from kvreport.chapters.from_scratch.results import Results
from kvreport.publishing.judging import Measured, facts
from kvreport.publishing.rules import HALF, Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import DTYPES

EXPERIMENTS = results.EXPERIMENTS
APPEND, MASK, PROMPT, MODULO = FIXES
_CHUNKED_REPLY, _CHUNKED_SHIFTED, _ = logits.CHUNKS

_ROUNDOFFS = Quantity("largest relative difference of the logits in unit roundoffs", "", "dtype", "{:.1e}")
_UNEQUAL = Quantity("steps whose logits are not bitwise identical", "", "dtype", "{:.0f}")
_GAP = Quantity("difference of two losses past the first block, in nats a character", "file", form="{:+.3f}")
_SHARE = Quantity("share of the posted cache's gap to the window that is closed", "file", form="{:.1%}")
_RATIO = Quantity("ratio of two times", "repetition")
_SAME = Bound(0, "arithmetic", "no step")
_NO_LOSS = Bound(0, "arithmetic", "no loss")


def _apart(comparison: str, where: str) -> Callable[[Results], list[Measured]]:
    """Measure the largest difference of a comparison in each dtype, in the first block or past it."""

    def measure(found: Results) -> list[Measured]:
        if found.logits is None:
            return []
        rows = found.largest
        rows = rows[(rows["comparison"] == comparison) & (rows["where"] == where)]
        return facts((DTYPES[row.dtype], row.relative_rms / UNIT_ROUNDOFF[row.dtype]) for row in rows.itertuples())

    return measure


def _refilled(found: Results) -> list[Measured]:
    return _apart(found.half, tables.BEHIND)(found)


def _unequal(fix: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.logits is None:
            return []
        rows = found.equal.loc[fix]
        return facts((DTYPES[dtype], row["steps"] - row["equal"]) for dtype, row in rows.iterrows())

    return measure


def _files(found: Results) -> int:
    return found.behind.index.get_level_values("source").nunique()


def _lost(way: str, against: str = WINDOW) -> Callable[[Results], list[Measured]]:
    return lambda found: claims.lost(found, way, against)


def _whole(found: Results) -> str:
    return refill_name(found.block)


def _closed(way: str) -> Callable[[Results], list[Measured]]:
    def measure(found: Results) -> list[Measured]:
        if found.loss is None:
            return []
        share = found.closed[way]
        return [] if share is None else [Measured("", share, _files(found))]

    return measure


def _timed(way: Callable[[Results], str]) -> Callable[[Results], list[Measured]]:
    """Measure a way's time past the block over the posted cache's."""

    def measure(found: Results) -> list[Measured]:
        if found.speed is None:
            return []
        rows = found.speed.rows
        count = rows.loc[rows["measure"] == speed.PAST, "repetition"].nunique()
        return [Measured("", found.times[way(found)], count)]

    return measure


def _run_ratio(found: Results) -> list[Measured]:
    if found.speed is None:
        return []
    rows = found.speed.rows
    count = rows.loc[rows["measure"] == speed.RUN, "repetition"].nunique()
    return [Measured("", found.run_ratios[speed.ALL_ROWS], count)]


_BELOW, _ABOVE = every(_ROUNDOFFS, "below", claims.ROUNDING), every(_ROUNDOFFS, "above", claims.ROUNDING)
_WORSE = every(_GAP, "above", claims.WORSE)
STATEMENTS: dict[str, Statement[Results]] = {
    "posted-cache-is-worse": Statement(_WORSE, _lost(POSTED), headline=True),
    "inside-it-is-rounding": Statement(_BELOW, _apart(POSTED, tables.INSIDE)),
    "past-it-is-a-bug": Statement(_ABOVE, _apart(POSTED, tables.BEHIND)),
    "stale-keys-are-the-cause": Statement(every(_SHARE, "above", HALF), _closed(tables.ABSOLUTE), headline=True),
    "append-changes-nothing": Statement(every(_UNEQUAL, "at most", _SAME), _unequal(APPEND)),
    "order-does-not-matter": Statement(_BELOW, _apart(logits.SHUFFLED, tables.BEHIND)),
    "mask-changes-nothing": Statement(every(_UNEQUAL, "at most", _SAME), _unequal(MASK)),
    "chunks-need-a-shifted-mask": Statement(_ABOVE, _apart(_CHUNKED_REPLY, tables.INSIDE)),
    "shifted-mask-is-right": Statement(_BELOW, _apart(_CHUNKED_SHIFTED, tables.INSIDE)),
    "prompt-changes-nothing-here": Statement(every(_UNEQUAL, "at most", _SAME), _unequal(PROMPT)),
    "last-character-alone-is-a-bug": Statement(_ABOVE, _apart(logits.LAST_ONLY, tables.INSIDE)),
    "modulo-closes-little": Statement(
        every(_SHARE, "below", Bound(0.1, "ours", "a tenth of the gap", "share")), _closed(MODULO), scope="this model"
    ),
    "reply-is-worse-too": Statement(_WORSE, _lost(tables.REPLY)),
    "short-context-does-not-cost": Statement(
        every(_GAP, "below", _NO_LOSS), lambda found: claims.lost(found, _whole(found), WINDOW), scope="this model"
    ),
    "stuck-position-costs": Statement(_WORSE, lambda found: claims.lost(found, tables.REPLY, _whole(found))),
    "refill-agrees-with-its-window": Statement(_BELOW, _refilled),
    "refill-is-no-worse": Statement(
        every(_GAP, "below", claims.WORSE), lambda found: claims.lost(found, found.half, WINDOW), scope="this model"
    ),
    "refill-is-as-fast": Statement(
        every(_RATIO, "below", Bound(1.25, "ours", "a quarter more time", "ratio")), _timed(lambda found: found.half),
        scope="this processor",
    ),
    "window-is-slow": Statement(
        every(_RATIO, "above", Bound(3, "ours", "three times the time", "ratio")), _timed(lambda _: WINDOW),
        scope="this processor",
    ),
    "more-than-twice": Statement(
        every(_RATIO, "above", Bound(2, "ours", "twice", "ratio")), _run_ratio, scope="this processor"
    ),
}


def _said(estimate: Estimate, form: str = "{:.2f}") -> str:
    return estimate.text(form)


def _trained(key: str, form: str) -> Callable[[Results], str]:
    """Read what the training of the published model recorded."""
    return lambda _: form.format(
        json.loads((checkpoints.shipped(checkpoints.THREAD) / "training.json").read_text("utf-8"))[key]
    )


NUMBERS: dict[str, Callable[[Results], str]] = {
    "block": lambda found: str(found.block),
    "layers": lambda found: str(found.model["layers"]),
    "width": lambda found: str(found.model["shape"]["width"]),
    "table": lambda found: f"{found.model['shape']['table']:,}",
    "trained_characters": _trained("trained_characters", "{:,}"),
    "n_texts": lambda found: str(len(found.behind)),
    "posted_gap": lambda found: _said(found.gaps[POSTED, WINDOW]),
    "window_loss": lambda found: _said(found.window_loss),
    "stale_share": lambda found: _said(found.closed[tables.ABSOLUTE], "{:.0%}"),
    "modulo_share": lambda found: _said(found.closed[MODULO], "{:.1%}"),
    "reply_gap": lambda found: _said(found.gaps[tables.REPLY, WINDOW]),
    "stuck_gap": lambda found: _said(found.gaps[tables.REPLY, _whole(found)]),
    "half": lambda found: str(found.block // 2),
    "refill_time": lambda found: _said(_timed(lambda of: of.half)(found)[0].estimate),
    "window_time": lambda found: _said(_timed(lambda _: WINDOW)(found)[0].estimate, "{:.1f}"),
    "best_held": lambda found: str(found.best_held[0]),
    "run_ratio": lambda found: _said(found.run_ratios[speed.ALL_ROWS]),
    "run_ratio_one_row": lambda found: _said(found.run_ratios[WINDOW]),
    "thrice": lambda found: claims.CHECKS["three-times-faster"](found).verdict,
    "run_tokens": lambda _: str(speed.REPLYS_NEW_TOKENS),
}
