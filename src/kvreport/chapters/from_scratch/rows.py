"""The rows of the chapter on the thread about a model from scratch by name; to read them takes no torch."""

import json

import pandas as pd

from kvbook import paths
from kvbook.measuring import UNIT_ROUNDOFF

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"scratch_logits": 1, "scratch_loss": 1, "scratch_held": 1, "scratch_texts": 1, "scratch_speed": 1}

# The ways to read a text; see `gpt.paths`.
WINDOW, ABSOLUTE, ALL_ROWS = "window", "window, absolute positions", "window, all rows of logits"
POSTED, REPLY, FORGOTTEN = "posted cache", "reply's cache", "offset forgotten"
REPLYS_WINDOW = "reply's window"
# What each of the reply's four points changes in the posted cache, one at a time.
FIXES = APPEND, MASK, PROMPT, MODULO = (
    "1 append, no roll", "2 explicit mask", "3 whole prompt", "4 positions modulo block",
)
# The refills of half a block and of a whole one, whatever their hop is called in characters.
HALF, WHOLE = "refill of half a block", "refill of a block"
SHUFFLED, LATE = "control: keys and values shuffled alike", "control: values one slot late"
REPLYS_OWN = "reply's cache, against its own window"
LAST_ONLY, WHOLE_PROMPT = "prompt: last character alone", "prompt: whole"
CHUNKED_REPLY, CHUNKED_SHIFTED, CHUNKED_UNMASKED = (
    "prompt: two chunks, reply's mask", "prompt: two chunks, shifted mask", "prompt: two chunks, no mask",
)
# What is timed, and of which models.
STEP, RUN, PAST = "step", "run", "past the block"
TRAINED, REPLYS_MODEL = "trained", "reply's size"

# Roundings pile up over layers and terms, but never to this many: a difference beyond it has another cause.
MOST_ROUNDOFFS = 1000


def refill_name(hop: int) -> str:
    """Name the cache that is refilled, by how many characters it drops at a time."""
    return f"refill, hop {hop}"


def half_refill(block: int) -> str:
    """Name the cache that is refilled at every half block."""
    return refill_name(max(1, block // 2))


def _schemes(ways: pd.Series, block: int) -> pd.Series:
    """Name ways so that models with blocks of any length share the names."""
    return ways.replace({half_refill(block): HALF, refill_name(block): WHOLE})


def steps(scratch_logits: pd.DataFrame) -> pd.DataFrame:
    """Tell of every step how far a way is from its reference, and whether it is past the block."""
    rows = scratch_logits
    return rows.assign(
        comparison=_schemes(rows["comparison"], int(rows["block"].iloc[0])),
        roundoffs=rows["relative_rms"] / rows["dtype"].map(UNIT_ROUNDOFF), equal=rows["max_abs"] == 0,
        unequal=rows["max_abs"] != 0, past=rows["length"] > rows["block"],
    )


def skipped_prompts(steps: pd.DataFrame) -> pd.DataFrame:
    """Keep the prompts fed by their last character alone, in the finest dtype; none where that is too coarse."""
    dtype = min(steps["dtype"].unique(), key=UNIT_ROUNDOFF.__getitem__)
    rows = steps[(steps["dtype"] == dtype) & (steps["comparison"] == LAST_ONLY) & (steps["length"] > 1)]
    return rows if MOST_ROUNDOFFS * UNIT_ROUNDOFF[dtype] < 0.01 else rows[:0]


def buckets(scratch_loss: pd.DataFrame) -> pd.DataFrame:
    """Add to each loss its gap to the window."""
    place = ["source", "sample", "read_from", "read_to"]
    window = scratch_loss.loc[scratch_loss["way"] == WINDOW, [*place, "nats"]]
    rows = scratch_loss.merge(window, on=place, suffixes=("", "_window"))
    return rows.assign(gap=rows["nats"] - rows["nats_window"])


def past(scratch_loss: pd.DataFrame) -> pd.DataFrame:
    """Average each way's loss over the places past the first block of a text, and compare it with three others."""
    rows = scratch_loss[scratch_loss["read_from"] >= scratch_loss["block"]]
    rows = rows.assign(total=rows["nats"] * rows["n_scored"])
    sums = rows.groupby(["source", "sample", "way"])[["total", "n_scored"]].sum()
    table = (sums["total"] / sums["n_scored"]).rename("nats").reset_index()
    block = int(rows["block"].iloc[0])

    def minus(other: str) -> pd.Series:
        return table["nats"] - table["sample"].map(table[table["way"] == other].set_index("sample")["nats"])

    return table.assign(
        gap=minus(WINDOW), change=minus(POSTED), over_refill=minus(refill_name(block)),
        scheme=_schemes(table["way"], block),
    )


def divergences(scratch_texts: pd.DataFrame) -> pd.DataFrame:
    """Find where the greedy texts of the reply's cache and of its own window diverge."""
    greedy = scratch_texts[scratch_texts["choice"] == "greedy"]
    texts = greedy.pivot(index=["sample", "block"], columns="way", values="text").reset_index()
    pairs = zip(texts[REPLYS_WINDOW], texts[REPLY], texts["block"], strict=True)
    # The character after a full block is still chosen from within it.
    diverges = pd.Series([one[: block + 1] != other[: block + 1] for one, other, block in pairs], dtype=bool)
    return texts[["sample", "block"]].assign(diverges=diverges, equal=~diverges)


def times(scratch_speed: pd.DataFrame) -> pd.DataFrame:
    """Take each time over the posted cache's in the same repetition, which is the unit."""
    alike = ["model", "measure", "length", "repetition"]
    posted = scratch_speed.loc[scratch_speed["way"] == POSTED, [*alike, "seconds"]]
    rows = scratch_speed.merge(posted, on=alike, suffixes=("", "_posted"))
    block = int(rows.loc[rows["measure"] == PAST, "length"].iloc[0])
    return rows.assign(
        ratio=rows["seconds"] / rows["seconds_posted"], source=rows["repetition"], sample=rows["repetition"],
        scheme=_schemes(rows["way"], block),
    )


def training() -> pd.DataFrame:
    """Read what the training of the published model recorded."""
    return pd.DataFrame([json.loads((paths.MODELS / "scratch" / "thread" / "training.json").read_text("utf-8"))])
