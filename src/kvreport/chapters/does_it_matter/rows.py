"""The rows of the chapter on whether the difference matters by name; to read them takes no torch."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvbook import paths
from kvbook.measuring import estimates
from kvbook.runs.records import Run
from kvbook.scores.measures import NARROW, outside
from kvbook.settings import read_yaml

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {
    "teacher_forced": 1, "drift_by_position": 1, "first_divergence": 2, "after_divergence": 2, "usage_factorial": 1,
    "long_contexts": 1, "sliding_windows": 1, "quantized_caches": 2,
}

# Texts that go through a batched way together; a smaller group is filled up with copies.
BATCH = 8
# Tokens that assisted decoding's verification feeds at once; a draft of 4 and the token before it.
AT_ONCE = 5

# The changes, as figures and tables show them.  Only the first ones do nothing but round otherwise.
CACHED, CHUNKS, STATIC, BATCHED, PADDED, EAGER = ROUNDING = (
    "cache, token by token", f"cache, {AT_ONCE} tokens at once", f"static cache, {AT_ONCE} at once",
    f"batch of {BATCH}", f"batch of {BATCH}, left-padded", "eager attention",
)
OTHER_DTYPE = "other dtype"
KV_FP8, KV_INT8, KV_INT4, WEIGHTS_8, WEIGHTS_4 = FEWER_BITS = (
    "KV cache in fp8", "KV cache in int8", "KV cache in int4", "8-bit weights", "4-bit weights"
)
FAULT = "fault: a cached token lost"
KINDS = {
    **dict.fromkeys(ROUNDING, "rounding"), OTHER_DTYPE: "another dtype", **dict.fromkeys(FEWER_BITS, "fewer bits"),
    FAULT: "control",
}

# Caches of few bits: the library's backends with their options, in groups of 64 numbers where these name no other size;
# our subclass of them, which keeps keys or values as they are; and ours with the bits of keys and of values.  HQQ's
# groups take numbers of many tokens, but those of axis 1 do not: they are rows, as quanto's are.
PLAIN = "plain cache"
QUANTO_4, HQQ_8, HQQ_4, HQQ_ROWS = "quanto, 4 bits", "HQQ, 8 bits", "HQQ, 4 bits", "HQQ, 4 bits, axis 1"
TWO_BITS = QUANTO_2, HQQ_2, OURS_2 = "quanto, 2 bits", "HQQ, 2 bits", "ours, 2 bits"


def _by_group(name: str, backend: str, bits: int) -> dict[str, tuple[str, dict[str, int]]]:
    """List a backend's cache in groups of the usual size, and of half and of twice as many numbers."""
    others = {f"{name} by {size}": (backend, {"nbits": bits, "q_group_size": size}) for size in (32, 128)}
    return {name: (backend, {"nbits": bits})} | others


BACKENDS = {
    **_by_group(QUANTO_4, "quanto", 4), **_by_group(QUANTO_2, "quanto", 2), HQQ_8: ("hqq", {"nbits": 8}),
    **_by_group(HQQ_4, "hqq", 4), HQQ_ROWS: ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "HQQ, 3 bits": ("hqq", {"nbits": 3}), **_by_group(HQQ_2, "hqq", 2), "HQQ, 1 bit": ("hqq", {"nbits": 1}),
}
ONE_SIDED = {
    f"our {name}, {side}s in {bits} bits": (name.lower(), kept)
    for name, bits in (("quanto", 4), ("HQQ", 4), ("fp8", 8)) for side, kept in (("key", "value"), ("value", "key"))
}
OF_BACKENDS = BACKENDS | ONE_SIDED
ROUNDED = {
    "ours, 8 bits": (8, 8), "ours, 4 bits": (4, 4), OURS_2: (2, 2), "ours, keys in 4 bits": (4, None),
    "ours, values in 4 bits": (None, 4),
}

# How a text is written: by the largest logit, or by a sample; without a cache, with one, in a batch.
GREEDY, SAMPLED = CHOICES = ("greedy", "sampled")
BASELINE, TOGETHER = "no cache", f"cache, batch of {BATCH}"
# The baseline's own computation, but for its shape.
ONE_PASS = "no cache, one pass"
# As tables list them; the other dtype is read off the baselines of two dtypes.
WAYS = (CACHED, TOGETHER, ONE_PASS, OTHER_DTYPE, KV_INT8, KV_INT4, WEIGHTS_4)

# What a user changes; of each factor the reference's level stands first.
SINGLE, EIGHT = BATCHES = ("single", f"batch of {BATCH}")
UNPADDED, LEFT, RIGHT = PADDINGS = ("no padding", "left padding", "right padding")
DYNAMIC, PREALLOCATED, PREFIX, LOOKUP, NO_CACHE = CACHES = (
    "dynamic cache", "static cache", "prefix reused", "prompt lookup", "no cache"
)
# A single text without padding on a dynamic cache.
REFERENCE = {"batch": SINGLE, "padding": UNPADDED, "cache": DYNAMIC}
# Of the dtype, in which all levels are tried, the other level.
IN_FP32 = "fp32 instead"
# Two largest logits that are as few ulps apart can change places by rounding once.
NEAR = 1
CHANGES = (NO_CACHE, PREFIX, PREALLOCATED, LOOKUP, LEFT, RIGHT, EIGHT, IN_FP32)


class Cell(NamedTuple):
    """One way to write a text; which dtype it is in is asked of all."""

    choice: str
    batch: str
    padding: str
    cache: str

    @property
    def changes(self) -> dict[str, str]:
        """What differs from the reference, by factor."""
        return {factor: level for factor, level in self._asdict().items() if level != REFERENCE.get(factor, level)}


# Why a cell makes no sense, and which do; the first reason counts.
NO_SENSE = {
    "`generate` refuses prompt lookup for a batch":
        lambda cell: cell.cache == LOOKUP and cell.batch == EIGHT,
    "`generate` takes no right padding: it would go on from the padding, and warns":
        lambda cell: cell.cache == LOOKUP and cell.padding == RIGHT,
    "prompt lookup that samples has random numbers of its own, which no other cell shares":
        lambda cell: cell.cache == LOOKUP and cell.choice == SAMPLED,
}


def cells() -> list[Cell]:
    """List all cells of a dtype, those that make no sense included."""
    return list(map(Cell._make, itertools.product(CHOICES, BATCHES, PADDINGS, CACHES)))


def why_not(cell: Cell) -> str:
    """Say why a cell makes no sense; empty where it does."""
    return next((why for why, has in NO_SENSE.items() if has(cell)), "")


def counts(factorial: pd.DataFrame) -> tuple[int, int]:
    """Count the cells that were run, and those that make sense, over all dtypes."""
    run = len(factorial[["dtype", *Cell._fields]].drop_duplicates())
    return run, factorial["dtype"].nunique() * sum(not why_not(cell) for cell in cells())


def planned() -> Iterator[Cell]:
    """Choose the cells that are run: one change away from the reference, and two greedy batches with left padding.

    Without a cache each token costs a pass over the text, so that is written greedily alone.
    """
    for cell in itertools.filterfalse(why_not, cells()):
        greedy = cell.choice == GREEDY
        padded_batch = cell.batch == EIGHT and cell.padding == LEFT and cell.cache in (DYNAMIC, PREALLOCATED)
        if (len(cell.changes) <= 1 and (greedy or cell.cache != NO_CACHE)) or (greedy and padded_batch):
            yield cell


# Tokens that a call feeds along a long text: one at a time takes minutes.
LONG_AT_ONCE = 64
LONG_CHUNKS = f"cache, {LONG_AT_ONCE} tokens at once"
ALONG = (LONG_CHUNKS, KV_INT8, WEIGHTS_4)
FIRST, LAST = "first quarter", "last quarter"
# Tokens of a piece of the longest texts, and the caches on which they are read.
PIECE = 256
LONG_WAYS = {DYNAMIC: "dynamic", PREALLOCATED: "static"}
# Pieces of a window that slides along them; which of the text's first tokens a cache keeps while it forgets.
PIECES = 4
WHOLE, ANEW, OLDEST_DROPPED, FIRST_KEPT, NEXT_KEPT = (
    "whole text", "window read anew", "cache, oldest dropped", "cache, oldest dropped but the first 4",
    "control: the next 4 kept instead",
)
FORGETTING = {OLDEST_DROPPED: slice(0, 0), FIRST_KEPT: slice(0, 4), NEXT_KEPT: slice(4, 8)}

# Bins of the margin, in ulps: four to a power of ten.
_BINS_A_DECADE = 4


def published() -> pd.DataFrame:
    """Read what others published, from the smallest divergence on: ``data/elsewhere.yaml``."""
    read = read_yaml(paths.DATA / "elsewhere.yaml")
    entries = [{"whose": whose, **entry} for whose, entries in read.items() for entry in entries]
    return pd.DataFrame(entries).sort_values("mean_kl_nats")


def changes(teacher_forced: pd.DataFrame) -> pd.DataFrame:
    """Add the change in the true token's probability, and what stays the same."""
    rows = teacher_forced
    # exp(nll + x) would lose what is small; the product keeps it.
    delta_p = np.exp(-rows["nll"]) * np.expm1(rows["dlogp"])
    return rows.assign(
        nll_way=rows["nll"] - rows["dlogp"], delta_p=delta_p, delta_p_squared=delta_p**2, same_top=1 - rows["flip"],
        same_decision=1 - rows["decision_flip"], bits_equal=rows["kl"] == 0, ulps=rows["margin"] / rows["ulp"],
        at_a_tie=rows["margin"] == 0, outside=outside(rows["dlogp"], NARROW),
    )


def rounding(changes: pd.DataFrame) -> pd.DataFrame:
    """Keep the changes that do nothing but round otherwise."""
    return changes[changes["way"].isin(ROUNDING)]


def quantized(quantized_caches: pd.DataFrame) -> pd.DataFrame:
    """Add what stays the same on caches of few bits."""
    rows = quantized_caches
    # One scale for all that a layer holds is a thousandth of a bit to a number.
    return rows.assign(bits=rows["bits"].round(2), same_top=1 - rows["flip"], outside=outside(rows["dlogp"], NARROW))


def on_all_backends(quantized: pd.DataFrame) -> pd.DataFrame:
    """Keep all or nothing: what is said of both backends is not to be judged where a package is missing."""
    return quantized if {*OF_BACKENDS} <= {*quantized["way"]} else quantized[:0]


def in_five_bits(quantized: pd.DataFrame) -> pd.DataFrame:
    """Keep what takes five bits in bf16, and the plain cache fed in pieces."""
    return quantized[(quantized["dtype"] == "bfloat16") & ((quantized["bits"] == 5) | (quantized["way"] == CHUNKS))]


def margins(rounding: pd.DataFrame) -> pd.DataFrame:
    """Count flips by the margin in ulps."""
    table = []
    for dtype, part in rounding.groupby("dtype", sort=False):
        loss = -part["shift"] / part["ulp"]
        top = int(np.ceil(_BINS_A_DECADE * np.log10(max(part["ulps"].max(), 2.0))))
        edges = [0.0, *10.0 ** (np.arange(0, top + 1) / _BINS_A_DECADE)]
        for low, high in itertools.pairwise(edges):
            inside = part[part["ulps"].between(low, high, inclusive="left")]
            # Where there is none, what is expected is that of the bin's middle.
            margins = inside["ulps"].to_numpy() if len(inside) else np.array([np.sqrt(low * high) or high / 2])
            table.append({
                "dtype": dtype, "low": low, "high": high, "tokens": len(inside),
                "share_of_margins": len(inside) / len(part), "flips": int(inside["flip"].sum()),
                "seen": estimates.share_of_rows(inside, inside["flip"] > 0)[0] if len(inside) else None,
                "predicted": overtaken(margins, loss),
            })
    return pd.DataFrame(table)


def overtaken(margins: np.ndarray, losses: pd.Series) -> float:
    """Return the mean probability that a loss is larger than a margin.

    A loss that just takes a margin away leaves a tie, which the lower id wins: a half.  Where there was no margin it
    was a tie before, and stays as it was.
    """
    ordered = np.sort(losses)
    at_least, more = (1 - np.searchsorted(ordered, margins, side=side) / len(ordered) for side in ("left", "right"))
    return float(np.where(margins > 0, (at_least + more) / 2, more).mean())


def texts(first_divergence: Run) -> pd.DataFrame:
    """List every text that was held against the baseline's, and whether it diverged before it ended."""
    rows, n_tokens = first_divergence.rows, first_divergence.about["settings"]["n_tokens"]
    texts = pd.concat([rows[rows["way"] != BASELINE], _between_dtypes(rows)], ignore_index=True)
    # A quarter of the tokens is the prompt.
    texts = texts.assign(prompt=texts["sample"], written=n_tokens - n_tokens // 4)
    places = {name: place for names in (rows["dtype"].unique(), CHOICES, WAYS) for place, name in enumerate(names)}
    return texts.sort_values(["dtype", "choice", "way"], key=lambda column: column.map(places))


def _between_dtypes(rows: pd.DataFrame) -> pd.DataFrame:
    """Hold the uncached texts of each dtype against those of the other one, in rows of a further way."""
    of = ["dtype", "choice", "sample"]
    written = rows.loc[rows["way"] == BASELINE, [*of, "path"]]
    other = written["dtype"].map(lambda dtype: "bfloat16" if dtype == "float32" else "float32")
    both = written.assign(other=other).merge(written, left_on=["other", *of[1:]], right_on=of, suffixes=("", "_other"))
    steps = map(_first_difference, both["path"], both["path_other"])
    return both[of].assign(way=OTHER_DTYPE, parted=[int(step is not None) for step in steps])


def _first_difference(path: str, other: str) -> int | None:
    """Find the first step at which two texts have different tokens; None where none has, or one has ended."""
    tokens = zip(str(path).split(), str(other).split(), strict=False)
    return next((step for step, (one, two) in enumerate(tokens) if one != two), None)


def divergences(first_divergence: pd.DataFrame) -> pd.DataFrame:
    """List greedy texts that diverged: ``tied`` where both candidates have equal logits on either side."""
    diverged = first_divergence[(first_divergence["choice"] == GREEDY) & (first_divergence["parted"] == 1)]
    return diverged.assign(tied=(diverged[["tied", "tied_baseline"]] == 1).any(axis=1), prompt=diverged["sample"])


def one_change(usage_factorial: pd.DataFrame) -> pd.DataFrame:
    """Hold every two cells that one change tells apart against each other, text by text.

    ``beside``: what both of them have changed as well, or nothing.
    """
    found = []
    keys = ["dtype", "choice", "batch", "padding", "cache"]
    written = {key: rows.set_index("sample") for key, rows in usage_factorial.groupby(keys, sort=False)}
    for (dtype, *rest), texts in written.items():
        cell = Cell(*rest)
        changes = cell.changes
        pairs = [(level, (dtype, *cell._replace(**{factor: REFERENCE[factor]}))) for factor, level in changes.items()]
        if not changes and dtype != "float32":
            pairs.append((IN_FP32, ("float32", *cell)))
        for change, other in pairs:
            if other in written:
                beside = ", ".join(level for level in changes.values() if level != change)
                about = {"dtype": dtype, "choice": cell.choice, "change": change, "beside": beside}
                found += [about | row for row in _differences(written[other], texts)]
    return pd.DataFrame(found).sort_values("change", key=lambda of: of.map(CHANGES.index), kind="stable")


def texts_that_a_change_moves(one_change: pd.DataFrame) -> pd.DataFrame:
    """Keep the greedy texts that differ in one dtype."""
    greedy = one_change[(one_change["choice"] == GREEDY) & (one_change["change"] != IN_FP32)]
    return greedy[greedy["differs"] == 1]


def _differences(usual: pd.DataFrame, other: pd.DataFrame) -> Iterator[dict]:
    """Compare texts: the first token that differs, and how far the two largest logits are apart there, in ulps."""
    for sample, one in usual.iterrows():
        two = other.loc[sample]
        step = _first_difference(one["path"], two["path"])
        known = step is not None and isinstance(one["gaps"], str)
        gap = min(float(of["gaps"].split()[step]) for of in (one, two)) if known else np.nan
        yield {
            "sample": sample, "prompt": sample, "source": one["source"], "differs": int(step is not None),
            "step": step, "gap": gap, "tied": gap == 0, "near": gap <= NEAR,
        }


def after(after_divergence: pd.DataFrame) -> pd.DataFrame:
    """Keep the tokens after a divergence."""
    return after_divergence[after_divergence["offset"] > 0]


def long_ways(long_contexts: pd.DataFrame) -> pd.DataFrame:
    """Compare the errors of both passes along long texts, by the way in which the cached one was fed."""
    # Runs of before the static cache name no way.
    ways = long_contexts["way"].fillna(DYNAMIC)
    return long_contexts.assign(way=ways, ratio=long_contexts["error"] / long_contexts["error_full"])


def by_position(long_ways: pd.DataFrame) -> pd.DataFrame:
    """Keep the dynamic cache."""
    return long_ways[long_ways["way"] == DYNAMIC]


def passes_apart(long_ways: pd.DataFrame) -> pd.DataFrame:
    """Keep the dtypes in which the two passes differ at all: 0 over 0 is no growth."""
    return long_ways[long_ways.groupby("dtype")["drift"].transform("max") > 0]


def in_whole_pieces(long_ways: pd.DataFrame) -> pd.DataFrame:
    """Say of each text that is read in pieces of `PIECE` tokens whether every cache gives the bits of one pass."""
    long = long_ways[long_ways["length"] >= 4 * PIECE]
    texts = long.groupby(["dtype", "source", "sample"], sort=False, as_index=False)["drift"].max()
    return texts.assign(equal=texts["drift"] == 0)


def windows(sliding_windows: pd.DataFrame) -> pd.DataFrame:
    """Add to each loss what it is above that of the window read anew."""
    unit = ["dtype", "sample", "bin"]
    anew = sliding_windows[sliding_windows["way"] == ANEW].set_index(unit)["nll"].rename("nll_anew")
    rows = sliding_windows.join(anew, on=unit)
    return rows.assign(excess=rows["nll"] - rows["nll_anew"])


def places(drift_by_position: pd.DataFrame) -> pd.DataFrame:
    """Return each bin of positions, and the first and the last quarter of them once more as a whole."""
    rows = drift_by_position
    last = rows.groupby(["dtype", "way"])["bin"].transform("max")
    first, end = rows[rows["bin"] <= last / 4], rows[rows["bin"] > 3 * last / 4]
    return pd.concat([rows.assign(place=rows["bin"]), first.assign(place=FIRST), end.assign(place=LAST)])
