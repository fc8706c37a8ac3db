"""Tables behind the chapter on static and dynamic caches."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from kvbook.measuring import estimates
from kvreport.chapters.static_cache import speed
from kvreport.publishing import documents

DOCUMENT = "notebook-static"
KINDS = ("none", "dynamic", "static")
_WAY = ["engine", "cache", "compiled", "one_row", "large_pages"]

# A way of the loop: kind of cache, whether it was compiled, whether it is written for one row, and on large pages.
Way = tuple[str, bool, bool, bool]


def label(cache: str, compiled: int, one_row: int, large_pages: int = 0, engine: str = speed.LOOP) -> str:
    """Name a way as the figures do."""
    if engine == speed.GENERATE:
        return f"generate, {cache}"
    form = "one-row, " if one_row else ""
    pages = ", large pages" if large_pages else ""
    return f"{cache}, {form}{'compiled' if compiled else 'eager'}{pages}"


def decode_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep the decode steps of every way of the loop."""
    return rows[(rows["engine"] == speed.LOOP) & (rows["phase"] == speed.DECODE)]


def step_seconds(
    rows: pd.DataFrame, cache: str, compiled: bool, one_row: bool = False, large_pages: bool = False
) -> pd.DataFrame:
    """Choose the decode steps of one way of the loop."""
    steps = decode_steps(rows)
    chosen = steps[
        (steps["cache"] == cache)
        & (steps["compiled"] == int(compiled))
        & (steps["one_row"] == int(one_row))
        & (steps["large_pages"] == int(large_pages))
    ]
    return chosen[["repeat", "step", "context", "seconds", "token"]]


def _per_repeat(rows: pd.DataFrame) -> pd.Series:
    """Give tokens a second of each repeat of one way of the loop, prefill left out.

    Without a cache only some lengths were timed: their seconds are joined by straight lines and summed over all steps.
    """
    last = int(rows["step"].max())

    def of(one: pd.DataFrame) -> float:
        every = np.arange(1, last + 1)
        return last / np.interp(every, one["step"], one["seconds"]).sum()

    return pd.Series({repeat: of(one.sort_values("step")) for repeat, one in rows.groupby("repeat")})


def per_repeat(rows: pd.DataFrame) -> dict[Way, pd.Series]:
    """Give, by way of the loop, tokens a second of each repeat."""
    ways = rows.loc[rows["engine"] == speed.LOOP, _WAY[1:]].drop_duplicates().itertuples(index=False, name=None)
    return {way: _per_repeat(step_seconds(rows, *way)) for way in ways}


def speeds(rows: pd.DataFrame, repeats: dict[Way, pd.Series]) -> pd.DataFrame:
    """Give tokens a second of every way, from rows of ``static_speed`` and `per_repeat` of them."""
    table = []
    whole = rows[(rows["engine"] == speed.GENERATE) & (rows["phase"] == speed.WHOLE)]
    for (engine, *way), some in whole.groupby(_WAY, sort=False):
        values = (some["n_steps"] / some["seconds"]).to_numpy()
        table.append([engine, *way, estimates.median_of(values), len(values), np.nan])
    loop = rows[rows["engine"] == speed.LOOP]
    for (cache, compiled, one_row, large_pages), of_repeat in repeats.items():
        values = of_repeat.to_numpy()
        first = loop[
            (loop["phase"] == speed.COMPILE) & (loop["cache"] == cache) & (loop["compiled"] == compiled)
            & (loop["one_row"] == one_row) & (loop["large_pages"] == large_pages)
        ].sort_values("step")  # fmt: skip
        table.append(
            [
                speed.LOOP,
                cache,
                compiled,
                one_row,
                large_pages,
                estimates.median_of(values),
                len(values),
                first["seconds"].sum(),
            ]
        )
    found = pd.DataFrame(table, columns=[*_WAY, "speed", "repeats", "first_s"])
    found["way"] = [
        label(row.cache, row.compiled, row.one_row, row.large_pages, row.engine) for row in found.itertuples()
    ]
    return found


def ratio(repeats: dict[Way, pd.Series], way: Way, against: Way) -> estimates.Estimate:
    """Give the ratio of two ways' tokens a second, over pairs of repeats of `per_repeat`: median."""
    return median(repeats[way] / repeats[against])


def gains(repeats: dict[Way, pd.Series]) -> pd.DataFrame:
    """Give every way of the loop over the eager one with a dynamic cache, the slowest first: free of the machine's own speed."""
    found = pd.DataFrame(
        [
            (label(*way), ratio(repeats, way, ("dynamic", False, False, False)))
            for way in repeats
            if way != ("dynamic", False, False, False)
        ],
        columns=["way", "gain"],
    )
    return found.sort_values("gain", key=lambda column: column.map(lambda one: one.value), ignore_index=True)


def against_generate(rows: pd.DataFrame, way: Way) -> estimates.Estimate:
    """Give a way's tokens a second over those of `generate` with its default cache, prefill counted in both."""
    whole = rows[(rows["engine"] == speed.GENERATE) & (rows["phase"] == speed.WHOLE) & (rows["cache"] == "dynamic")]
    library = whole.set_index("repeat")["n_steps"] / whole.set_index("repeat")["seconds"]
    cache, compiled, one_row, large_pages = way
    prefill = rows[
        (rows["phase"] == speed.PREFILL) & (rows["cache"] == cache) & (rows["compiled"] == int(compiled))
        & (rows["one_row"] == int(one_row)) & (rows["large_pages"] == int(large_pages))
    ].set_index("repeat")["seconds"]  # fmt: skip
    steps = step_seconds(rows, *way)
    seconds = steps.groupby("repeat")["seconds"].sum() + prefill
    ours = (steps.groupby("repeat").size() + 1) / seconds
    return median(ours / library)


def growth(steps: pd.DataFrame) -> estimates.Estimate:
    """Fit seconds of a step against the number of tokens, and give the growth over 100 tokens as a share of the start.

    Least squares over the steps of each repeat, for steps of one repeat are not independent: median over repeats.
    """
    return median(growth_by_repeat(steps))


def growth_by_repeat(steps: pd.DataFrame) -> pd.Series:
    """Give the growth of each repeat."""
    # One step in fifty is interrupted by the system; a median over the repeats would need more of them.
    kept = steps[steps["seconds"] <= steps["seconds"].quantile(0.98)]
    found = {}
    for repeat, of_repeat in kept.groupby("repeat"):
        fit = stats.linregress(of_repeat["context"], of_repeat["seconds"])
        found[repeat] = 100 * fit.slope / (fit.intercept + fit.slope * of_repeat["context"].min())
    return pd.Series(found)


def median(repeats: pd.Series) -> estimates.Estimate:
    """Give the median of what each repeat has, with its interval."""
    return estimates.median_of(repeats.dropna().to_numpy())


def graphs_of_generate(rows: pd.DataFrame) -> int:
    """Count the graphs that torch compiled during `generate` with a static cache."""
    return int(rows[(rows["engine"] == speed.GENERATE) & (rows["cache"] == "static")]["graphs"].max())


def late_graphs(rows: pd.DataFrame) -> int:
    """Count the graphs compiled with a dynamic cache at the steps behind the first two."""
    steps = decode_steps(rows)
    return int(steps[(steps["cache"] == "dynamic") & (steps["compiled"] == 1)]["graphs"].sum())


def head_ms(rows: pd.DataFrame, engine: str) -> float:
    """Give the median milliseconds of the head on the last row, as a view or as a copy."""
    return float(1e3 * rows[rows["engine"] == engine]["seconds"].median())


def crossover(rows: pd.DataFrame, compiled: bool) -> str:
    """Say from how many tokens on a step without a cache takes longer than one with a dynamic cache.

    Both are smoothed by straight lines through all timed steps.
    """
    none, dynamic = (step_seconds(rows, cache, compiled) for cache in ("none", "dynamic"))
    lines = [stats.linregress(steps["context"], steps["seconds"]) for steps in (none, dynamic)]
    every = np.arange(none["context"].min(), none["context"].max() + 1)
    slower = lines[0].intercept + lines[0].slope * every > lines[1].intercept + lines[1].slope * every
    if slower[0]:
        return f"already at the shortest length measured, {every[0]} tokens"
    return f"from {every[slower.argmax()]} tokens on" if slower.any() else "at no length measured"


def bandwidth(rows: pd.DataFrame) -> float:
    """Give the largest bandwidth that any kernel of ``memory_bandwidth`` reached in any repeat, in bytes a second."""
    return float((rows["n_bytes"] / rows["seconds"]).max())


@dataclass(frozen=True)
class Limit:
    """What memory allows.

    Attributes
    ----------
    bytes_per_second : float
        Bandwidth.
    bytes_per_token : float
        Weights and, on average over the text, keys and values.
    """

    bytes_per_second: float
    bytes_per_token: float

    @property
    def tokens_per_second(self) -> float:
        """How many tokens could be decoded if reading were all."""
        return self.bytes_per_second / self.bytes_per_token


def limit(read: pd.DataFrame, memory: pd.DataFrame) -> Limit:
    """Compute the limit of a decode step, which reads every weight and every key and value once."""
    row = memory[memory["cache"] == "static"].sort_values("n_tokens").iloc[0]
    return Limit(bandwidth(read), float(row["weights_bytes"] + row["kv_bytes"] / 2))


def beside_published(table: pd.DataFrame, here: str) -> pd.DataFrame:
    """Set this run's `generate`, from `speeds`, beside the document's rows, under a name for this machine."""
    document = documents.published(DOCUMENT)
    rows = [
        {
            "device": row["device"], "cache": row["cache"], "tokens_per_s": row["tokens_per_s"], "published": True,
            "skipped": row["cache"] == "static" and row["device"] in document["compilation_skipped"],
        }
        for row in document["speeds"]
    ]  # fmt: skip
    ours = table[table["engine"] == speed.GENERATE]
    rows += [
        {
            "device": here, "cache": row.cache, "tokens_per_s": row.speed.value, "published": False,
            "skipped": row.cache == "static" and not row.compiled,
        }
        for row in ours.itertuples()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def published_gains() -> dict[str, float]:
    """Give, by the document's device, the dynamic cache's tokens a second over those without a cache."""
    speeds = {(row["device"], row["cache"]): row["tokens_per_s"] for row in documents.published(DOCUMENT)["speeds"]}
    return {device: speeds[device, "dynamic"] / speeds[device, "none"] for device, cache in speeds if cache == "none"}


def published_spread() -> float:
    """Give how much longer the slowest of the document's repeated calls took than the fastest, as a share, the larger of both."""
    document = documents.published(DOCUMENT)
    (device,) = document["compilation_skipped"]
    table = {row["cache"]: row["seconds"] for row in document["speeds"] if row["device"] == device}
    calls = [[table[cache], *more] for cache, more in document["repeated_s"].items()]
    return max(max(seconds) / min(seconds) - 1 for seconds in calls)


def speed_grid(table: pd.DataFrame, bound: Limit) -> pd.DataFrame:
    """Write the speeds for a page, with the share of the memory limit that each reaches."""
    return pd.DataFrame(
        {
            "way": table["way"],
            # A single run has no range.
            "tokens/s": [
                row.speed.text("{:.1f}") if row.repeats > 1 else f"{row.speed.value:.1f}" for row in table.itertuples()
            ],
            "runs": table["repeats"],
            "share of the limit": [f"{row.speed.value / bound.tokens_per_second:.2f}" for row in table.itertuples()],
            "first steps, s": [
                "" if np.isnan(row.first_s) or not row.compiled else f"{row.first_s:.1f}" for row in table.itertuples()
            ],
        }
    )


def partings(rows: pd.DataFrame) -> pd.DataFrame:
    """Find where each kind's text first differs from that without a cache, from rows of ``static_texts``."""
    table = []
    for dtype, some in rows.groupby("dtype", sort=False):
        texts = {cache: one.sort_values("step") for cache, one in some.groupby("cache")}
        for against, cache in (("none", "dynamic"), ("none", "static"), ("dynamic", "static")):
            one, other = texts[against], texts[cache]
            apart = np.flatnonzero(one["token"].to_numpy() != other["token"].to_numpy())
            step = int(apart[0]) if len(apart) else None
            table.append(
                {
                    "dtype": dtype, "cache": cache, "against": against, "tokens": len(one),
                    "share": 1.0 if step is None else step / len(one), "step": np.nan if step is None else step,
                    "margin": np.nan if step is None else float(one["margin"].iloc[step]),
                    # On either side: there the order of the vocabulary decides.
                    "tied": None if step is None else bool(min(one["margin"].iloc[step], other["margin"].iloc[step]) == 0),
                    "logits_rms": np.nan if step is None else float(one["logits_rms"].iloc[step]),
                }
            )  # fmt: skip
    return pd.DataFrame(table)


def other_tokens(rows: pd.DataFrame, way: Way) -> str:
    """Count a way's tokens, over its runs, that are not those of the eager loop with a dynamic cache: `4 of 127`."""
    reference = step_seconds(rows, "dynamic", False).query("repeat == 0").set_index("step")["token"]
    steps = step_seconds(rows, *way)
    return f"{int((steps['token'].to_numpy() != reference.reindex(steps['step']).to_numpy()).sum())} of {len(steps)}"


def texts(rows: pd.DataFrame, dtype: str) -> pd.DataFrame:
    """Write the texts of one dtype side by side: what all share, and how each goes on."""
    some = rows[rows["dtype"] == dtype].assign(text=rows["text"].fillna(""))
    written = {cache: one.sort_values("step") for cache, one in some.groupby("cache", sort=False)}
    ids = np.stack([one["token"].to_numpy() for one in written.values()])
    apart = np.flatnonzero((ids != ids[0]).any(0))
    shared = int(apart[0]) if len(apart) else ids.shape[1]
    table = []
    for cache, one in written.items():
        pieces = list(one["text"])
        before, after = "".join(pieces[:shared]), "".join(pieces[shared:])
        table.append(
            {
                "cache": cache, "tokens shared": shared,
                "shared text ends": repr(before[-60:])[1:-1], "goes on": repr(after[:60])[1:-1],
            }
        )  # fmt: skip
    return pd.DataFrame(table)


def phases(rows: pd.DataFrame) -> pd.DataFrame:
    """Give the times of every phase of the loop, apart."""
    loop = rows[rows["engine"] == speed.LOOP]
    table = []
    for way, some in loop.groupby(_WAY[1:], sort=False):
        first = some[some["phase"] == speed.COMPILE].sort_values("step")["seconds"].iloc[0]
        row = {"way": label(*way), "first step": first}
        for phase in (speed.PREFILL, speed.DECODE):
            ms = 1e3 * some[some["phase"] == phase]["seconds"]
            row[phase] = (
                estimates.Estimate(*(float(ms.quantile(q)) for q in (0.5, 0.05, 0.95)), "range") if len(ms) else None
            )
        table.append(row)
    return pd.DataFrame(table)


def phases_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Write the times of `phases` for a page."""
    found = phases(rows)

    def told(estimate: estimates.Estimate | None) -> str:
        return "" if estimate is None else estimate.text("{:.1f}")

    return pd.DataFrame(
        {
            "way": found["way"],
            "first step, s": found["first step"].map("{:.2f}".format),
            "prefill, ms": found["prefill"].map(told),
            "decode step, ms": found["decode"].map(told),
        }
    )


def shapes_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Write the shapes of every step for a page, from rows of ``static_shapes``."""
    return pd.DataFrame(
        {
            "cache": rows["cache"],
            "step": rows["step"],
            "fed": rows["fed"],
            "keys": rows["keys_shape"].fillna(""),
            "len(keys)": [
                "" if pd.isna(value) or value == "" else f"{int(value)}" for value in rows["first_dimension"]
            ],
            "cached": rows["cached_tokens"],
            "KV, KiB": (rows["kv_bytes"] / 1024).map("{:,.0f}".format),
        }
    )


def memory_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Write bytes in MiB beside what the configuration predicts, from rows of ``static_memory``."""
    mib = 2**20
    return pd.DataFrame(
        {
            "cache": rows["cache"],
            "tokens": rows["n_tokens"],
            "KV, MiB": rows["kv_bytes"] / mib,
            "KV predicted, MiB": rows["predicted_bytes"] / mib,
            "weights, MiB": rows["weights_bytes"] / mib,
            "peak, MiB": rows["peak_bytes"] / mib,
            "peak over before, MiB": (rows["peak_bytes"] - rows["before_bytes"]) / mib,
        }
    )
