"""Tables behind the chapter on the thread about a model from scratch."""

from collections.abc import Mapping

import pandas as pd

from kvbook.measuring import agreement, estimates
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.from_scratch.gpt.paths import FIXES, POSTED, WINDOW, refill_name
from kvreport.chapters.from_scratch.speed import ALL_ROWS, PAST, RUN, STEP
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES

ABSOLUTE = "window, absolute positions"
REPLY = "reply's cache"
FORGOTTEN = "offset forgotten"
INSIDE, BEHIND = "in the first block", "past it"

# Roundings pile up over layers and terms, but never to this many: a difference beyond it has another cause.
MOST_ROUNDOFFS = 1000


def finest(logits: pd.DataFrame) -> str | None:
    """Name the finest dtype of the rows; None when it is too coarse to tell rounding from a bug."""
    dtype = min(logits["dtype"].unique(), key=UNIT_ROUNDOFF.__getitem__)
    return dtype if MOST_ROUNDOFFS * UNIT_ROUNDOFF[dtype] < 0.01 else None


def largest(logits: pd.DataFrame) -> pd.DataFrame:
    """Take the largest difference of each comparison, in the first block and past it."""
    where = (logits["length"] <= logits["block"]).map({True: INSIDE, False: BEHIND})
    groups = logits.assign(where=where).groupby(["dtype", "comparison", "where"], sort=False)
    return groups.agg(
        max_abs=("max_abs", "max"), relative_rms=("relative_rms", "max"), flips=("top1_flip", "mean")
    ).reset_index()


def equal_table(logits: pd.DataFrame) -> pd.DataFrame:
    """Count for each comparison and dtype the ``steps``, and those whose logits are ``equal`` bit for bit."""
    groups = logits.groupby(["comparison", "dtype"], sort=False)["max_abs"]
    return pd.DataFrame({"equal": groups.agg(lambda values: int((values == 0).sum())), "steps": groups.size()})


def _in_each(counts: Mapping[str, str]) -> str:
    """Write the steps of each dtype, once where they are as many in each."""
    dtypes = wording.listed([DTYPES[dtype] for dtype in counts])
    if len(counts) > 1 and len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} steps, each in {dtypes}"
    return wording.in_dtypes({dtype: f"{count} steps" for dtype, count in counts.items()})


def equal_steps(equal: pd.DataFrame, comparison: str) -> str:
    """Write in how many steps a comparison's logits are equal bit for bit, from `tables.equal_table`."""
    return _in_each({row.Index: f"{row.equal} of {row.steps}" for row in equal.loc[comparison].itertuples()})


def behind_table(loss: pd.DataFrame) -> pd.DataFrame:
    """Average each way's loss over the places past the first block: a row a sample, a column a way, nats a character."""
    rows = loss[loss["read_from"] >= loss["block"]]
    rows = rows.assign(total=rows["nats"] * rows["n_scored"])
    sums = rows.groupby(["source", "sample", "way"])[["total", "n_scored"]].sum()
    return (sums["total"] / sums["n_scored"]).unstack("way")


def gap_table(behind: pd.DataFrame, block: int) -> dict[tuple[str, str], estimates.Estimate]:
    """Give the loss of every way past the first block less that of another, place by place, in nats a character."""
    return {
        (way, other): _mean_of(behind[way] - behind[other])
        for other in (WINDOW, POSTED, refill_name(block))
        for way in behind
    }


def _mean_of(values: pd.Series) -> estimates.Estimate:
    """Average over samples, which the index names, with the bootstrap interval over files."""
    return estimates.mean_resampled(values.rename("value").reset_index(), "value")


def window_loss(behind: pd.DataFrame) -> estimates.Estimate:
    """Give the loss of the uncached window past the first block, in nats a character."""
    return _mean_of(behind[WINDOW])


def closed_table(
    behind: pd.DataFrame, gaps: Mapping[tuple[str, str], estimates.Estimate]
) -> dict[str, estimates.Estimate | None]:
    """Give the share of the posted cache's gap to the window, past the block, that each change of it closes.

    None when the gap itself is not above zero with its whole interval, so that there is nothing to be closed.  What
    `ABSOLUTE` closes is the share that is due to keys and values gone stale: positions are the same.
    """
    if gaps[POSTED, WINDOW].low <= 0:
        return dict.fromkeys((*FIXES, ABSOLUTE))
    gap = behind[POSTED] - behind[WINDOW]
    closed = {}
    for way in (*FIXES, ABSOLUTE):
        parts = {"closed": behind[POSTED] - behind[way], "gap": gap}
        rows = pd.concat(part.rename("nats").reset_index().assign(variant=name) for name, part in parts.items())
        closed[way] = estimates.paired_ratio(rows, "nats", "closed", "gap")
    return closed


def best_held(held: pd.DataFrame) -> tuple[int, estimates.Estimate]:
    """Find the number of held characters with the lowest loss."""
    table = held.pivot(index=["source", "sample"], columns="held", values="nats")
    best = int(table.mean().idxmin())
    return best, _mean_of(table[best] - table[int(held["block"].iloc[0])])


def bucket_table(loss: pd.DataFrame) -> pd.DataFrame:
    """Average each way's loss, and its gap to the window, over each bucket of lengths."""
    table = []
    for (begin, end), rows in loss.groupby(["read_from", "read_to"]):
        wide = rows.pivot(index=["source", "sample"], columns="way", values="nats")
        for way in dict.fromkeys(loss["way"]):
            table.append(
                {
                    "way": way,
                    "read_from": begin,
                    "read_to": end,
                    "block": int(rows["block"].iloc[0]),
                    "nats": _mean_of(wide[way]),
                    "gap": _mean_of(wide[way] - wide[WINDOW]),
                    "n_scored": int(rows["n_scored"].iloc[0]),
                }
            )
    return pd.DataFrame(table)


def causes_table(gaps: Mapping[tuple[str, str], estimates.Estimate], block: int) -> pd.DataFrame:
    """List what each change of the posted cache does to its gap past the block."""
    half = max(1, block // 2)
    names = {POSTED: "posted cache"} | {name: f"posted, {name[2:]} ({name[0]})" for name in FIXES}
    names |= {ABSOLUTE: ABSOLUTE, REPLY: "reply's cache", refill_name(half): f"refill, hop {half}"}
    return pd.DataFrame(
        [{"label": label, "estimate": gaps[way, WINDOW], "published": False} for way, label in names.items()]
    )


def sizes_table(causes: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """List the gaps of `causes_table` for models of several sizes."""
    tables = []
    for size, of_size in causes.items():
        table = of_size.drop(columns="published")
        table["label"] = table["label"].str.replace(r"refill, hop \d+", "refill, hop of half a block", regex=True)
        tables.append(table.assign(size=size)[["size", "label", "estimate"]])
    return pd.concat(tables, ignore_index=True)


def _ratio(speed: pd.DataFrame, way: str, against: str) -> estimates.Estimate:
    """Take the median over repetitions of the ratio of two ways' times in the same repetition."""
    rows = speed.rename(columns={"way": "variant", "repetition": "sample"}).assign(source=lambda r: r["sample"])
    return estimates.paired_median_ratio(rows, "seconds", way, against)


def speed_table(speed: pd.DataFrame) -> pd.DataFrame:
    """Give how many times as long a step without a cache takes as one with it, by length."""
    table = []
    steps = speed[speed["measure"] == STEP]
    for (model, length), rows in steps.groupby(["model", "length"], sort=False):
        cached = rows.loc[rows["way"] == POSTED, "seconds"].median() * 1e3
        for way in (WINDOW, ALL_ROWS):
            ratio = _ratio(rows, way, POSTED)
            table.append({"model": model, "way": way, "length": length, "ratio": ratio, "cached_ms": cached})
    return pd.DataFrame(table)


def run_ratios(speed: pd.DataFrame) -> dict[str, estimates.Estimate]:
    """Give the reply's number, by way: time of a whole run without a cache over that with it, at its size and number of tokens."""
    runs = speed[speed["measure"] == RUN]
    return {way: _ratio(runs, way, POSTED) for way in (WINDOW, ALL_ROWS)}


def times(speed: pd.DataFrame) -> dict[str, estimates.Estimate]:
    """Give each way's time past the block over the posted cache's."""
    past = speed[speed["measure"] == PAST]
    return {way: _ratio(past, way, POSTED) for way in past["way"].unique()}


def cost_table(
    gaps: Mapping[tuple[str, str], estimates.Estimate], ratios: Mapping[str, estimates.Estimate], speed: pd.DataFrame
) -> pd.DataFrame:
    """Bring together what a way loses past the block and what it costs there, from `times`."""
    past = speed[speed["measure"] == PAST]
    return pd.DataFrame(
        [
            {
                "way": way,
                "time_ratio": ratios[way],
                "gap": gaps[way, WINDOW],
                "milliseconds": (rows["seconds"] / rows["length"]).median() * 1e3,
            }
            for way, rows in past.groupby("way", sort=False)
        ]
    )


def divergence(texts: pd.DataFrame, way: str, against: str) -> pd.DataFrame:
    """Find where the greedy texts of two ways part."""
    wide = texts[texts["choice"] == "greedy"].pivot(index=["sample", "block", "n_prompt"], columns="way", values="text")
    rows = wide.reset_index()
    rows["first"] = [
        agreement.first_divergence(list(one), list(other)) for one, other in zip(rows[against], rows[way], strict=True)
    ]
    rows["written"] = rows[way].str.len()
    return rows[["sample", "block", "n_prompt", "written", "first"]]


def excerpts(texts: pd.DataFrame, n_characters: int = 72) -> pd.DataFrame:
    """Show what each way writes behind the first block, on the same draws."""
    rows = texts[(texts["choice"] == "drawn") & (texts["sample"] == texts["sample"].min())]
    shown = [
        " ".join(text[block : block + 3 * n_characters].replace("\n", " ↵ ").split())[:n_characters]
        for text, block in zip(rows["text"], rows["block"], strict=True)
    ]
    return pd.DataFrame({"way": rows["way"].to_numpy(), "text behind the first block": shown})


def as_code(text: str) -> str:
    """Write a piece of text for a table's cell, so that nothing in it is taken for markup."""
    return f"`` {text.replace('`', '’')} ``"
