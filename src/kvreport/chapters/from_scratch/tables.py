"""Tables behind the chapter on the thread about a model from scratch."""

from collections.abc import Mapping

import pandas as pd

from kvbook.measuring import agreement
from kvbook.measuring import estimates as fits
from kvreport.chapters.from_scratch import speed as scratch_speed
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW, refill_name

ABSOLUTE = "window, absolute positions"
REPLY = "reply's cache"
FORGOTTEN = "offset forgotten"
INSIDE, BEHIND = "in the first block", "past it"

# Roundings pile up over layers and terms, but never to this many: a difference beyond it has another cause.
MOST_ROUNDOFFS = 1000


def is_rounding(relative_rms: float, dtype: str) -> bool:
    """Tell whether a relative difference is no larger than rounding in a dtype can make it."""
    return relative_rms <= MOST_ROUNDOFFS * agreement.UNIT_ROUNDOFF[dtype]


def finest(logits: pd.DataFrame) -> str | None:
    """Name the finest dtype of the rows; None when it is too coarse to tell rounding from a bug."""
    dtype = min(logits["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)
    return dtype if MOST_ROUNDOFFS * agreement.UNIT_ROUNDOFF[dtype] < 0.01 else None


def largest(logits: pd.DataFrame) -> pd.DataFrame:
    """Take the largest difference of each comparison, in the first block and past it.

    Parameters
    ----------
    logits : DataFrame
        Rows of the experiment ``scratch_logits``.

    Returns
    -------
    DataFrame
        ``dtype``, ``comparison``, ``where``, ``max_abs``, ``relative_rms`` (the largest each) and ``flips`` (share of steps
        whose first choice is another).
    """
    where = (logits["length"] <= logits["block"]).map({True: INSIDE, False: BEHIND})
    groups = logits.assign(where=where).groupby(["dtype", "comparison", "where"], sort=False)
    return groups.agg(
        max_abs=("max_abs", "max"), relative_rms=("relative_rms", "max"), flips=("top1_flip", "mean")
    ).reset_index()  # fmt: skip


def _mean(rows: pd.DataFrame, value: str) -> fits.Estimate:
    """Average over samples, with the bootstrap interval over files."""
    resampled = fits.resample(rows.assign(all=0), value, by="all")
    low, high = resampled.interval()
    return fits.Estimate(float(resampled.mean[0]), float(low[0]), float(high[0]))


def _behind(loss: pd.DataFrame) -> pd.DataFrame:
    """Average each way's loss over the places past the first block: a row a sample, a column a way."""
    rows = loss[loss["read_from"] >= loss["block"]]
    rows = rows.assign(total=rows["nats"] * rows["n_scored"])
    sums = rows.groupby(["source", "sample", "way"])[["total", "n_scored"]].sum()
    return (sums["total"] / sums["n_scored"]).unstack("way")


def gap_behind(loss: pd.DataFrame, way: str, against: str = WINDOW) -> fits.Estimate:
    """Give the loss of a way past the first block less that of another, place by place, in nats a character.

    Parameters
    ----------
    loss : DataFrame
        Rows of the experiment ``scratch_loss``.
    way, against : str
        Values of the column ``way``.

    Returns
    -------
    Estimate
        With a bootstrap interval over files.
    """
    table = _behind(loss)
    return _mean((table[way] - table[against]).rename("gap").reset_index(), "gap")


def scored_behind(loss: pd.DataFrame) -> int:
    """Count the characters past the first block behind which each way is scored, in all texts together."""
    return int(loss[loss["read_from"] >= loss["block"]].groupby("way")["n_scored"].sum().max())


def loss_behind(loss: pd.DataFrame, way: str) -> fits.Estimate:
    """Give the loss of a way past the first block, in nats a character."""
    return _mean(_behind(loss)[way].rename("nats").reset_index(), "nats")


def closed_share(loss: pd.DataFrame, way: str) -> fits.Estimate | None:
    """Give the share of the posted cache's gap to the window, past the block, that a way closes.

    None when the gap itself is not above zero with its whole interval, so that there is nothing to be closed.
    """
    if gap_behind(loss, POSTED).low <= 0:
        return None
    table = _behind(loss)
    parts = {"closed": table[POSTED] - table[way], "gap": table[POSTED] - table[WINDOW]}
    rows = pd.concat(part.rename("nats").reset_index().assign(variant=name) for name, part in parts.items())
    return fits.paired_ratio(rows, "nats", "closed", "gap")


def stale_share(loss: pd.DataFrame) -> fits.Estimate | None:
    """Give the share of the posted cache's gap that is due to keys and values gone stale: positions are the same."""
    return closed_share(loss, ABSOLUTE)


def held_gap(held: pd.DataFrame) -> fits.Estimate:
    """Give a window's loss where it holds from half a block up to nearly all of it, less that with the whole block.

    Parameters
    ----------
    held : DataFrame
        Rows of the experiment ``scratch_held``.

    Returns
    -------
    Estimate
        In nats a character, on the same characters, with a bootstrap interval over files.
    """
    table = held.pivot(index=["source", "sample"], columns="held", values="nats")
    block = int(held["block"].iloc[0])
    fewer = [count for count in table if block <= 2 * count < 2 * block]
    return _mean((table[fewer].mean(axis=1) - table[block]).rename("gap").reset_index(), "gap")


def best_held(held: pd.DataFrame) -> tuple[int, fits.Estimate]:
    """Find the number of held characters with the lowest loss.

    Parameters
    ----------
    held : DataFrame
        Rows of the experiment ``scratch_held``.

    Returns
    -------
    int
        How many, of the numbers that were tried.
    Estimate
        The loss with so many less that with the whole block, as for `held_gap`.
    """
    table = held.pivot(index=["source", "sample"], columns="held", values="nats")
    best = int(table.mean().idxmin())
    return best, _mean((table[best] - table[int(held["block"].iloc[0])]).rename("gap").reset_index(), "gap")


def bucket_table(loss: pd.DataFrame) -> pd.DataFrame:
    """Average each way's loss, and its gap to the window, over each bucket of lengths.

    Returns
    -------
    DataFrame
        ``way``, ``read_from``, ``read_to`` (characters), ``block``, ``nats`` and ``gap`` (each an `Estimate`), ``n_scored`` a
        sample.
    """
    table = []
    for (begin, end), rows in loss.groupby(["read_from", "read_to"]):
        wide = rows.pivot(index=["source", "sample"], columns="way", values="nats")
        for way in dict.fromkeys(loss["way"]):
            own = pd.DataFrame({"nats": wide[way], "gap": wide[way] - wide[WINDOW]}).reset_index()
            table.append(
                {
                    "way": way,
                    "read_from": begin,
                    "read_to": end,
                    "block": int(rows["block"].iloc[0]),
                    "nats": _mean(own, "nats"),
                    "gap": _mean(own, "gap"),
                    "n_scored": int(rows["n_scored"].iloc[0]),
                }
            )
    return pd.DataFrame(table)


def causes_table(loss: pd.DataFrame) -> pd.DataFrame:
    """List what each change of the posted cache does to its gap past the block.

    Returns
    -------
    DataFrame
        ``label``, ``estimate``, ``published`` (False throughout: the thread has no numbers of this kind).
    """
    block = int(loss["block"].iloc[0])
    names = {POSTED: "posted cache"} | {name: f"posted, {name[2:]} ({name[0]})" for name in FIXES}
    names |= {
        ABSOLUTE: ABSOLUTE,
        REPLY: "reply's cache",
        refill_name(max(1, block // 2)): f"refill, hop {max(1, block // 2)}",
    }
    return pd.DataFrame(
        [
            {"label": label, "estimate": gap_behind(loss, way), "published": False}
            for way, label in names.items()
        ]
    )  # fmt: skip


def sizes_table(losses: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """List the gaps of `causes_table` for models of several sizes.

    Parameters
    ----------
    losses : mapping of str to DataFrame
        By the size's name, rows of the experiment ``scratch_loss``.

    Returns
    -------
    DataFrame
        ``size``, ``label``, ``estimate``.  A refill is named by its share of the block, which all sizes have in common.
    """
    tables = []
    for size, loss in losses.items():
        table = causes_table(loss).drop(columns="published")
        table["label"] = table["label"].str.replace(r"refill, hop \d+", "refill, hop of half a block", regex=True)
        tables.append(table.assign(size=size)[["size", "label", "estimate"]])
    return pd.concat(tables, ignore_index=True)


def _ratio(speed: pd.DataFrame, way: str, against: str) -> fits.Estimate:
    """Take the median over repetitions of the ratio of two ways' times in the same repetition."""
    rows = speed.rename(columns={"way": "variant", "repetition": "sample"}).assign(source=lambda r: r["sample"])
    return fits.paired_median_ratio(rows, "seconds", way, against)


def speed_table(speed: pd.DataFrame) -> pd.DataFrame:
    """Give how many times as long a step without a cache takes as one with it, by length.

    Parameters
    ----------
    speed : DataFrame
        Rows of the experiment ``scratch_speed``.

    Returns
    -------
    DataFrame
        ``model``, ``way``, ``length``, ``ratio`` (`Estimate`), ``cached_ms`` (median of the cached step).
    """
    table = []
    steps = speed[speed["measure"] == scratch_speed.STEP]
    for (model, length), rows in steps.groupby(["model", "length"], sort=False):
        cached = rows.loc[rows["way"] == POSTED, "seconds"].median() * 1e3
        for way in (WINDOW, scratch_speed.ALL_ROWS):
            ratio = _ratio(rows, way, POSTED)
            table.append({"model": model, "way": way, "length": length, "ratio": ratio, "cached_ms": cached})
    return pd.DataFrame(table)


def run_ratio(speed: pd.DataFrame, way: str = scratch_speed.ALL_ROWS) -> fits.Estimate:
    """Give the reply's number: time of a whole run without a cache over that with it, at its size and number of tokens."""
    return _ratio(speed[speed["measure"] == scratch_speed.RUN], way, POSTED)


def cost_table(loss: pd.DataFrame, speed: pd.DataFrame) -> pd.DataFrame:
    """Bring together what a way loses past the block and what it costs there.

    Returns
    -------
    DataFrame
        ``way``, ``time_ratio`` (`Estimate`: its time for a block of characters over the posted cache's), ``gap``
        (`Estimate`, nats a character, to the window), ``milliseconds`` a character (median).
    """
    past = speed[speed["measure"] == scratch_speed.PAST]
    return pd.DataFrame(
        [
            {
                "way": way,
                "time_ratio": _ratio(past, way, POSTED),
                "gap": gap_behind(loss, way),
                "milliseconds": (rows["seconds"] / rows["length"]).median() * 1e3,
            }
            for way, rows in past.groupby("way", sort=False)
        ]
    )


def divergence(texts: pd.DataFrame, way: str, against: str) -> pd.DataFrame:
    """Find where the greedy texts of two ways part.

    Parameters
    ----------
    texts : DataFrame
        Rows of the experiment ``scratch_texts``.
    way, against : str
        Values of the column ``way``.

    Returns
    -------
    DataFrame
        A row a text: ``sample``, ``block``, ``n_prompt``, ``written`` characters, ``first`` character that differs
        (counted from 0, prompt included; missing where none does).
    """
    wide = texts[texts["choice"] == "greedy"].pivot(index=["sample", "block", "n_prompt"], columns="way", values="text")
    rows = wide.reset_index()
    rows["first"] = [
        agreement.first_divergence(list(one), list(other)) for one, other in zip(rows[against], rows[way], strict=True)
    ]
    rows["written"] = rows[way].str.len()
    return rows[["sample", "block", "n_prompt", "written", "first"]]


def excerpts(texts: pd.DataFrame, n_characters: int = 72) -> pd.DataFrame:
    """Show what each way writes behind the first block, on the same draws.

    Returns
    -------
    DataFrame
        ``way`` and ``text behind the first block``, one line each: a line's end is written as ↵ and runs of spaces as one.
    """
    rows = texts[(texts["choice"] == "drawn") & (texts["sample"] == texts["sample"].min())]
    shown = [
        " ".join(text[block : block + 3 * n_characters].replace("\n", " ↵ ").split())[:n_characters]
        for text, block in zip(rows["text"], rows["block"], strict=True)
    ]
    return pd.DataFrame({"way": rows["way"].to_numpy(), "text behind the first block": shown})
