"""The rows of the chapter on static and dynamic caches by name; to read them takes no torch."""

import numpy as np
import pandas as pd
import scipy

from kvreport.publishing import documents

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {
    "static_speed": 2, "memory_bandwidth": 2, "static_memory": 1, "static_shapes": 1, "static_texts": 2,
    "step_budget": 1, "weights_or_cache": 1, "beside_llama_cpp": 1, "one_call": 1,
}
DOCUMENT = "notebook-static"

# What of ``static_speed`` is timed.  The head alone runs on the last of all rows as `generate` hands it over, a view
# into them, and on a copy of that row.
GENERATE, LOOP, HEAD_VIEW, HEAD_COPY = "generate", "loop", "head, a view", "head, a copy"
LOAD, COMPILE, PREFILL, DECODE, WHOLE, HEAD = "load", "compile", "prefill", "decode", "whole", "head"
KINDS = ("none", "dynamic", "static")
WAY = ["engine", "cache", "compiled", "one_row", "large_pages"]

# Of ``step_budget``: a step without the profiler; of one with it, all, the graphs' kernels, and what calls them.
STEP, PROFILED, CALLS = "step", "profiled step", "calls"
KERNELS_OF_LAYERS, KERNELS_OF_HEAD = "kernels of the layers", "kernels of the head"

# Of ``weights_or_cache``, of ``beside_llama_cpp`` and of ``one_call``.
BATCHES = (1, 4, 16)
OURS, THEIRS, ONE_CALL, MEMORY = "one-row step", "llama.cpp", "one call", "memory"


def label(cache: str, compiled: int, one_row: int = 0, large_pages: int = 0, engine: str = LOOP) -> str:
    """Name a way as the figures do."""
    if engine == GENERATE:
        return f"generate, {cache}"
    form, pages = "one-row, " if one_row else "", ", large pages" if large_pages else ""
    return f"{cache}, {form}{'compiled' if compiled else 'eager'}{pages}"


NONE, DYNAMIC, STATIC = (label(cache, False) for cache in KINDS)
COMPILED_DYNAMIC, COMPILED_STATIC = (label(cache, True) for cache in KINDS[1:])
ONE_ROW, LARGE_PAGES = (label("static", True, True, pages) for pages in (False, True))


def timed(static_speed: pd.DataFrame) -> pd.DataFrame:
    """Keep what decodes, by its way: the loop's steps and the library's calls."""
    rows = static_speed[static_speed["engine"].isin([GENERATE, LOOP])]
    return rows.assign(way=[label(*way, engine) for engine, *way in rows[WAY].itertuples(index=False, name=None)])


def steps(timed: pd.DataFrame) -> pd.DataFrame:
    """Keep the decode steps of every way of the loop."""
    return timed[(timed["engine"] == LOOP) & (timed["phase"] == DECODE)]


def _tokens_per_s(steps: pd.DataFrame) -> float:
    """Return tokens a second of one repeat, prefill left out.

    Without a cache only some lengths were timed: their seconds are joined by straight lines and summed over all steps.
    """
    every, ordered = np.arange(1, steps["step"].max() + 1), steps.sort_values("step")
    return len(every) / np.interp(every, ordered["step"], ordered["seconds"]).sum()


def speeds(timed: pd.DataFrame) -> pd.DataFrame:
    """Return tokens a second of each way and repeat; with the prefill too, where all steps were timed."""
    keys, whole = [*WAY, "way", "repeat"], timed[timed["phase"] == WHOLE]
    calls = whole[keys].assign(tokens_per_s=whole["n_steps"] / whole["seconds"])
    decoded = steps(timed).groupby(keys)
    prefill_s = timed[timed["phase"] == PREFILL].groupby(keys)["seconds"].first()
    # A group's own `sum` adds up otherwise than a column's, by which the recorded estimates were made.
    whole_s = decoded["seconds"].agg(lambda seconds: seconds.sum()) + prefill_s
    loop = pd.DataFrame({
        "tokens_per_s": decoded.apply(_tokens_per_s), "whole_tokens_per_s": (decoded.size() + 1) / whole_s
    }).reset_index()
    loop = loop.sort_values("way", key=lambda ways: ways.map(list(timed["way"].unique()).index), kind="stable")
    found = pd.concat([calls.assign(whole_tokens_per_s=calls["tokens_per_s"]), loop], ignore_index=True)
    return found.assign(compilation=found["compiled"].map({0: "eager", 1: "compiled"}))


def compiling(speeds: pd.DataFrame) -> pd.DataFrame:
    """Return what compiling the static loop gains, over what the kind of cache changes in either direction."""
    of = speeds[speeds["engine"] == LOOP].pivot(index="repeat", columns="way", values="tokens_per_s")
    kind = pd.concat([of[STATIC] / of[DYNAMIC], of[COMPILED_STATIC] / of[COMPILED_DYNAMIC]], axis=1)
    largest = np.exp(np.log(kind).abs().max(axis=1))
    return (of[COMPILED_STATIC] / of[STATIC] / largest).rename("gain").reset_index()


def fastest(speeds: pd.DataFrame, limit: pd.DataFrame) -> pd.DataFrame:
    """Keep the way of the loop with the most tokens a second, each as a share of the limit too."""
    loop = speeds[speeds["engine"] == LOOP]
    best = loop[loop["way"] == loop.groupby("way")["tokens_per_s"].median().idxmax()]
    return best.assign(share_of_limit=best["tokens_per_s"] / limit["tokens_per_s"].iloc[0])


def first_steps(timed: pd.DataFrame) -> pd.DataFrame:
    """List the first steps of each way of the loop; one that finds an earlier way's graph does not compile."""
    loop = timed[timed["engine"] == LOOP]
    firsts = loop[loop["phase"] == COMPILE].sort_values("step").groupby("way", sort=False)
    later = loop[loop["phase"] == DECODE].groupby("way")["seconds"].median()
    table = firsts[["compiled", "graphs", "seconds"]].first().assign(all_s=firsts["seconds"].sum())
    table = table.assign(compiles=(table["compiled"] * table["graphs"]) > 0, over_later=table["seconds"] / later)
    return table.loc[loop["way"].unique(), ["compiles", "seconds", "all_s", "over_later"]].reset_index()


def late_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the median eager step by cache and repeat, from the last three lengths timed without a cache on."""
    eager = steps[(steps["compiled"] == 0) & (steps["one_row"] == 0)]
    last = eager[eager["step"].isin(sorted(eager.loc[eager["cache"] == "none", "step"].unique())[-3:])]
    late = eager[eager["step"] >= last["step"].min()]
    found = late.groupby(["cache", "repeat"])["seconds"].median().reset_index()
    return found.assign(shortest=last["context"].min(), longest=last["context"].max())


def growth(steps: pd.DataFrame) -> pd.DataFrame:
    """Fit an eager step's seconds against the tokens: growth over 100 tokens as a share of the start.

    Least squares over the steps of each repeat, for steps of one repeat are not independent.
    """
    table = []
    for cache, of in steps[(steps["compiled"] == 0) & (steps["one_row"] == 0)].groupby("cache", sort=False):
        # One step in fifty is interrupted by the system; a median over the repeats would need more of them.
        kept = of[of["seconds"] <= of["seconds"].quantile(0.98)]
        for repeat, some in kept.groupby("repeat"):
            fit = scipy.stats.linregress(some["context"], some["seconds"])
            start = fit.intercept + fit.slope * some["context"].min()
            table.append({"cache": cache, "repeat": repeat, "growth": 100 * fit.slope / start})
    return pd.DataFrame(table)


def graphs(timed: pd.DataFrame) -> pd.DataFrame:
    """Count the compiled steps with a dynamic cache in the loop, and the graphs compiled for them."""
    of = timed[(timed["engine"] == LOOP) & (timed["cache"] == "dynamic") & (timed["compiled"] == 1)]
    first, later = (of[of["phase"] == phase] for phase in (COMPILE, DECODE))
    return pd.DataFrame([{"first": first["graphs"].sum(), "later": later["graphs"].sum(), "steps": len(later)}])


def bandwidth(rows: pd.DataFrame) -> float:
    """Return the largest bandwidth that any kernel of ``memory_bandwidth`` reached in any repeat, in bytes a second."""
    return float((rows["n_bytes"] / rows["seconds"]).max())


def limit(memory_bandwidth: pd.DataFrame, static_memory: pd.DataFrame) -> pd.DataFrame:
    """Compute the limit of a decode step, which reads every weight and, on average over the text, half the cache."""
    row = static_memory[static_memory["cache"] == "static"].sort_values("n_tokens").iloc[0]
    per_second, per_token = bandwidth(memory_bandwidth), row["weights_bytes"] + row["kv_bytes"] / 2
    found = {"gb_per_s": per_second / 1e9, "mb_per_token": per_token / 1e6, "tokens_per_s": per_second / per_token}
    return pd.DataFrame([found])


def step(step_budget: pd.DataFrame) -> pd.DataFrame:
    """Take a step's milliseconds apart, a row for each repeat on usual and on large pages."""
    ms = 1e3 * step_budget.pivot_table(index=["pages", "repeat"], columns="part", values="seconds", sort=False)
    kernels = ms[KERNELS_OF_LAYERS] + ms[KERNELS_OF_HEAD]
    around = ms[PROFILED] - kernels - ms[CALLS]
    return ms.assign(kernels=kernels, around=around, share_of_kernels=kernels / ms[PROFILED]).reset_index()


def page_gains(speeds: pd.DataFrame, step: pd.DataFrame) -> pd.DataFrame | None:
    """Set the gains from large pages of the two runs that measured them side by side, repeat by repeat."""
    ways = speeds.pivot(index="repeat", columns="way", values="tokens_per_s")
    pages = step.pivot(index="repeat", columns="pages", values=STEP)
    if not {LARGE_PAGES, ONE_ROW} <= set(ways):
        return None
    gains = {"speeds": ways[LARGE_PAGES] / ways[ONE_ROW], "budget": pages["usual"] / pages["large"]}
    return pd.concat(gains, names=["run"]).dropna().rename("gain").reset_index()


def contexts(weights_or_cache: pd.DataFrame) -> pd.DataFrame:
    """Return a step's median milliseconds by dtype, batch and context, from the shortest on, and its bytes."""
    cells = weights_or_cache.groupby(["dtype", "batch", "context"], sort=False)
    return cells[["weights_bytes", "kv_bytes"]].first().assign(ms=1e3 * cells["seconds"].median()).reset_index()


def early_bytes(static_shapes: pd.DataFrame) -> pd.DataFrame:
    """Return the bytes of keys and values behind the document's five steps."""
    last = static_shapes.groupby("cache")["kv_bytes"].last().reset_index()
    return last.assign(mib=last["kv_bytes"] / 2**20)


def fed(static_shapes: pd.DataFrame) -> pd.DataFrame:
    """Count the tokens that each step computes; the first one is the prompt's, with every kind of cache."""
    later = static_shapes[static_shapes["step"] > static_shapes["step"].min()]
    return later.assign(tokens=later["fed"].str.split("x").str[1].astype(int))


def shapes(static_shapes: pd.DataFrame) -> pd.DataFrame:
    """Set the shapes that the document prints beside those here."""
    published = documents.published(DOCUMENT)["shapes"]
    of = {cache: some.sort_values("step") for cache, some in static_shapes.groupby("cache")}
    found = {
        # The ids are printed behind the step, when the token is with them already.
        "ids_without_cache": [f"1x{int(fed.split('x')[1]) + 1}" for fed in of["none"]["fed"]],
        "keys_dynamic": of["dynamic"]["keys_shape"], "keys_static": of["static"]["keys_shape"],
    }
    pairs = [(name, *pair) for name in published for pair in zip(published[name], found[name], strict=True)]
    table = pd.DataFrame(pairs, columns=["what", "theirs", "here"])
    return table.assign(equal=table["theirs"] == table["here"])


def divergences(static_texts: pd.DataFrame) -> pd.DataFrame:
    """Find where each kind's text first differs from that without a cache."""
    columns = ["dtype", "cache", "against", "tokens", "share", "step", "margin", "tied", "logits_rms"]
    table = []
    for dtype, some in static_texts.groupby("dtype", sort=False):
        texts = {cache: one.sort_values("step") for cache, one in some.groupby("cache")}
        for against, cache in (("none", "dynamic"), ("none", "static"), ("dynamic", "static")):
            one, other = texts[against], texts[cache]
            row = {"dtype": dtype, "cache": cache, "against": against, "tokens": len(one), "share": 1.0, "tied": None}
            differs = one["token"].to_numpy() != other["token"].to_numpy()
            if differs.any():
                step = int(differs.argmax())
                # On either side: there the order of the vocabulary decides.
                tied = bool(min(one["margin"].iloc[step], other["margin"].iloc[step]) == 0)
                of_one = one[["margin", "logits_rms"]].iloc[step].to_dict()
                row |= {"share": step / len(one), "step": step, "tied": tied} | of_one
            table.append(row)
    return pd.DataFrame(table, columns=columns)


def differences(divergences: pd.DataFrame) -> pd.DataFrame:
    """Keep the texts that differ."""
    return divergences.dropna(subset="tied")


def published_gains() -> pd.DataFrame:
    """List by how much the dynamic cache's tokens a second exceed those without a cache, on each published device."""
    speeds = pd.DataFrame(documents.published(DOCUMENT)["speeds"])
    of = {cache: some.set_index("device")["tokens_per_s"] for cache, some in speeds.groupby("cache")}
    ahead = of["dynamic"] / of["none"] - 1
    return ahead.dropna().rename("ahead").reset_index().assign(equal=lambda of: of["ahead"] == 0)


def published_calls() -> pd.DataFrame:
    """List the seconds of the calls that the document repeated, with the one of its table."""
    document = documents.published(DOCUMENT)
    (device,) = document["compilation_skipped"]
    table = {row["cache"]: row["seconds"] for row in document["speeds"] if row["device"] == device}
    calls = [(cache, s) for cache, more in document["repeated_s"].items() for s in (table[cache], *more)]
    return pd.DataFrame(calls, columns=["cache", "seconds"])


def heads(static_speed: pd.DataFrame) -> pd.DataFrame:
    """Keep the times of the head alone, in milliseconds."""
    heads = static_speed[static_speed["phase"] == HEAD]
    return heads.assign(ms=1e3 * heads["seconds"])
