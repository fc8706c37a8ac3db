"""Tables of the chapter on the thread about a model from scratch, as its page shows them."""

from collections.abc import Mapping

import pandas as pd

from kvreport.chapters.from_scratch import measures, rows
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined

_TEXT = "text behind the first block"
# Nothing in a text that a model wrote may be taken for markup.
FORMATS = {_TEXT: lambda text: f"`` {text.replace('`', '’')} ``"}


def buckets(found: Found) -> pd.DataFrame:
    """Average each way's loss, and its gap to the window, over each bucket of lengths."""
    table = joined({"nats": measures.BUCKET_LOSS, "gap": measures.BUCKET_GAP}, found)
    columns = ["way", "read_from", "read_to", "block", "nats", "gap", "n_scored"]
    return table[columns].sort_values("read_from", kind="stable", ignore_index=True)


def causes(found: Found) -> pd.DataFrame:
    """List what each change of the posted cache does to its gap past the block."""
    gaps = measures.GAP.table(found).set_index("way")["estimate"]
    labels = {way: f"posted, {way[2:]} ({way[0]})" for way in rows.FIXES}
    half = rows.half_refill(int(found["scratch_loss"]["block"].iloc[0]))
    ways = [rows.POSTED, *rows.FIXES, rows.ABSOLUTE, rows.REPLY, half]
    return pd.DataFrame({"label": labels.get(way, way), "estimate": gaps[way], "published": False} for way in ways)


def sizes(runs: Mapping[str, Found]) -> pd.DataFrame:
    """List the gaps of `causes` for models of several sizes."""
    table = pd.concat([causes(found).assign(size=size) for size, found in runs.items()], ignore_index=True)
    table["label"] = table["label"].str.replace(r"refill, hop \d+", "refill, hop of half a block", regex=True)
    return table[["size", "label", "estimate"]]


def speeds(found: Found) -> pd.DataFrame:
    """Compare a step without a cache with one with it, by length; beside that the cached step's milliseconds."""
    steps = found["times"].query("measure == @rows.STEP")
    cached_ms = steps.groupby(["model", "length"])["seconds_posted"].median().rename("cached_ms") * 1e3
    ratios = measures.STEP_TIME.where(way=(rows.WINDOW, rows.ALL_ROWS)).table(found, "ratio")
    return ratios.join(cached_ms, on=["model", "length"])


def costs(found: Found) -> pd.DataFrame:
    """Bring together what a way loses past the block and what it costs there."""
    past = found["times"].query("measure == @rows.PAST")
    per_step = (past["seconds"] / past["length"]).groupby(past["way"]).median() * 1e3
    table = joined({"time_ratio": measures.PAST_TIME, "gap": measures.GAP}, found)
    return table.assign(milliseconds=table["way"].map(per_step))


def excerpts(texts: pd.DataFrame, n_characters: int = 72) -> pd.DataFrame:
    """Show what each way writes after the first block, on the same draws."""
    sampled = texts[(texts["choice"] == "drawn") & (texts["sample"] == texts["sample"].min())]
    shown = [
        " ".join(text[block : block + 3 * n_characters].replace("\n", " ↵ ").split())[:n_characters]
        for text, block in zip(sampled["text"], sampled["block"], strict=True)
    ]
    return pd.DataFrame({"way": sampled["way"].to_numpy(), _TEXT: shown})
