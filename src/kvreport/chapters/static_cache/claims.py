"""The claims of the notebook on static and dynamic caches, each with the check that its YAML describes."""

import numpy as np
from scipy import stats

from kvbook.measuring import agreement, estimates
from kvreport.chapters.static_cache import speed, tables
from kvreport.chapters.static_cache.results import Results
from kvreport.publishing import documents
from kvreport.publishing.verdicts import DOCUMENTS, OTHERS, Verdict, holds, weights_of

_ONE_ROW = ("static", True, True)
# As in the claims of the blog post: more than two ways of summing differ by, in units of the roundoff.
ROUNDING = 100


def _weights(results: Results) -> str:
    """Say whose weights the timed model has."""
    return weights_of(results.speed.about["models"])


def _device(results: Results) -> str:
    return results.speed.about["settings"]["device"]


def _accelerated(results: Results) -> bool:
    """Tell whether the device is one for which transformers compiles by itself."""
    return _device(results).startswith("cuda")


def _interval_of_mean(values: np.ndarray) -> estimates.Estimate:
    """Student's interval of a mean on the logarithms; of one value there is none."""
    logs = np.log(values)
    if len(logs) < 2:
        return estimates.Estimate(float(values[0]), 0.0, float("inf"))
    half = stats.t.ppf((1 + estimates.CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    return estimates.Estimate(*(float(np.exp(logs.mean() + shift)) for shift in (0.0, -half, half)))


def cache_speeds_up(results: Results) -> Verdict:
    """Compare the last steps with and without a cache."""
    none, dynamic = (tables.step_seconds(results.speed.rows, cache, False) for cache in ("none", "dynamic"))
    # Steps of the same run and nearly the same length are repetitions of one another.
    last = sorted(none["step"].unique())[-3:]
    beside = dynamic[dynamic["step"] >= last[0]].groupby("repeat")["seconds"].median()
    ratios = none[none["step"].isin(last)].set_index("repeat")["seconds"] / beside
    found = _interval_of_mean(ratios.dropna().to_numpy())
    contexts = none[none["step"].isin(last)]["context"]
    here = (
        f"a step without a cache takes {found.text('{:.1f}')} times as long, "
        f"at {contexts.min()} to {contexts.max()} tokens"
    )
    return Verdict(here, holds(found.low > 1, found.high < 1, _weights(results)))


def linear_time(results: Results) -> Verdict:
    """Fit the seconds of a step against the number of tokens."""
    none, dynamic = (results.growths[cache] for cache in ("none", "dynamic"))
    here = f"a hundred tokens add {none.text('{:+.0%}')} to a step without a cache, {dynamic.text('{:+.0%}')} with one"
    borne_out = none.low > 0 and none.low > 2 * dynamic.high
    return Verdict(here, holds(borne_out, none.high < 0 or none.high < dynamic.low, _weights(results)))


def static_faster(results: Results) -> Verdict:
    """Look at the 2 x 2 of cache and compilation."""
    rows, repeats = results.speed.rows, results.speeds.per_repeat
    kind = {done: tables.ratio(repeats, ("static", done, False), ("dynamic", done, False)) for done in (False, True)}
    compiling = tables.ratio(repeats, ("static", True, False), ("static", False, False))
    here = (
        f"static over dynamic {kind[False].text()} eager and {kind[True].text()} compiled; "
        f"compiling a static cache's loop {compiling.text()}"
    )
    if not rows[(rows["cache"] == "static") & (rows["one_row"] == 1)].empty:
        form = tables.ratio(repeats, _ONE_ROW, ("static", False, False))
        here += f" (form and compilation changed together, one-row: {form.text()})"
    largest = max(max(estimate.high, 1 / estimate.low) for estimate in kind.values())
    if compiling.low > largest:
        return Verdict(here, "other cause")
    return Verdict(here, holds(min(e.low for e in kind.values()) > 2, False, _weights(results)))


def static_slower(results: Results) -> Verdict:
    """See whether `generate` compiled, and what a compiled static cache does."""
    rows, repeats = results.speed.rows, results.speeds.per_repeat
    table = results.speeds.table.set_index(["engine", "cache", "compiled", "one_row"])
    generate = table.loc[speed.GENERATE].reset_index().set_index("cache")
    static, dynamic = generate.loc["static"], generate.loc["dynamic"]
    graphs = rows[(rows["engine"] == speed.GENERATE) & (rows["cache"] == "static")]["graphs"].max()
    eager, compiled = (tables.ratio(repeats, ("static", c, False), ("dynamic", False, False)) for c in (False, True))
    here = (
        f"generate: static {static.speed.text('{:.1f}')}, dynamic {dynamic.speed.text('{:.1f}')} tokens/s, "
        f"{graphs} graphs compiled; in one loop static over dynamic, both eager, {eager.text()}, compiled static over eager "
        f"dynamic {compiled.text()} (on {_device(results)} alone)"
    )
    slower, faster = static.speed.high < dynamic.speed.low, static.speed.low > dynamic.speed.high
    if slower and graphs == 0 and compiled.low > 1:
        return Verdict(here, "other cause")
    # A few runs of one call wander together; the loop takes the same step with nothing else around it.
    return Verdict(here, holds(slower, faster and eager.low > 1, _weights(results)))


def dynamic_not_compilable(results: Results) -> Verdict:
    """Compile the layer with a dynamic cache as one graph."""
    rows = results.speed.rows
    steps = rows[(rows["engine"] == speed.LOOP) & (rows["cache"] == "dynamic") & (rows["compiled"] == 1)]
    first = steps[steps["phase"] == speed.COMPILE]["graphs"].sum()
    later = steps[steps["phase"] == speed.DECODE]
    other, static = (tables.other_tokens(rows, (cache, True, False)) for cache in ("dynamic", "static"))
    here = (
        f"{int(first)} graphs at the first steps, {int(later['graphs'].sum())} in the {len(later)} behind them; "
        f"tokens other than the eager ones: {other}, with the static cache compiled {static}"
    )
    whole = first > 0 and len(later) > 0 and later["graphs"].sum() == 0
    return Verdict(here, holds(len(later) == 0, bool(whole), _weights(results)))


def compiled_by_itself(results: Results) -> Verdict:
    """Count the graphs of `generate`."""
    rows = results.speed.rows
    graphs = int(rows[(rows["engine"] == speed.GENERATE) & (rows["cache"] == "static")]["graphs"].max())
    here = f"{graphs} graphs compiled, on {_device(results)}"
    return Verdict(here, holds(graphs > 0, graphs == 0 and _accelerated(results), _weights(results)))


def first_call_slow(results: Results) -> Verdict:
    """Compare the first step with those behind the warm-up."""
    rows = results.speed.rows[(results.speed.rows["engine"] == speed.LOOP) & (results.speed.rows["compiled"] == 1)]
    told, shares = [], []
    for (cache, one_row), some in rows.groupby(["cache", "one_row"], sort=False):
        first = some[some["phase"] == speed.COMPILE].sort_values("step")["seconds"].iloc[0]
        shares.append(first / some[some["phase"] == speed.DECODE]["seconds"].median())
        told.append(f"{tables.label(cache, 1, one_row)}: {first:.1f} s, {shares[-1]:,.0f} steps' time")
    return Verdict("; ".join(told), holds(min(shares) > 10, max(shares) < 2, _weights(results)))


def static_more_memory(results: Results) -> Verdict:
    """Count bytes at the document's steps, and when the room is full."""
    early = results.shapes.rows.groupby("cache")["kv_bytes"].last()
    full = results.memory.rows.pivot_table(index="n_tokens", columns="cache", values="kv_bytes")
    here = (
        f"after five steps {early['static'] / 2**20:.1f} MiB against {early['dynamic'] / 2**20:.2f}; in a full room of "
        f"{full.index.max():,} tokens {full['static'].iloc[-1] / 2**20:.1f} against {full['dynamic'].iloc[-1] / 2**20:.1f}"
    )
    more = bool(early["static"] > early["dynamic"])
    return Verdict(here, holds(more, not more, _weights(results)))


def shapes(results: Results) -> Verdict:
    """Compare all fifteen shapes."""
    published = documents.published(tables.DOCUMENT)["shapes"]
    rows = {cache: some.sort_values("step") for cache, some in results.shapes.rows.groupby("cache")}
    # The ids are printed behind the step, when the token is with them already.
    ids = [f"1x{int(fed.split('x')[1]) + 1}" for fed in rows["none"]["fed"]]
    found = {
        "ids_without_cache": ids,
        "keys_dynamic": list(rows["dynamic"]["keys_shape"]),
        "keys_static": list(rows["static"]["keys_shape"]),
    }
    equal = sum(a == b for name in published for a, b in zip(published[name], found[name], strict=True))
    total = sum(map(len, published.values()))
    # Another prompt or another tokenizer gives other lengths, but a shape that grows by one still does.
    grows = [int(shape.split("x")[2]) for shape in found["keys_dynamic"]]
    in_kind = bool((np.diff(grows) == 1).all()) and len(set(found["keys_static"])) == 1
    here = (
        f"{equal} of {total} shapes equal; dynamic keys grow {grows[0]} … {grows[-1]}, "
        f"static ones stay {found['keys_static'][0]}"
    )
    if equal == total:
        return Verdict(here, "reproduced")
    return Verdict(here, "reproduced in kind" if in_kind else "refuted")


def length_of_cache(results: Results) -> Verdict:
    """Set the first dimension beside the cached tokens."""
    rows = results.shapes.rows[results.shapes.rows["cache"] != "none"]
    equal = int((rows["first_dimension"] == rows["cached_tokens"]).sum())
    here = (
        f"first dimension {', '.join(str(int(v)) for v in sorted(rows['first_dimension'].unique()))}; cached tokens "
        f"{int(rows['cached_tokens'].min())} to {int(rows['cached_tokens'].max())}; equal in {equal} of {len(rows)} steps"
    )
    # A shape, whatever the weights.
    return Verdict(here, "reproduced" if equal == len(rows) else "refuted" if equal == 0 else "undecided")


def peak_memory(results: Results) -> Verdict:
    """Set the peak of one generation beside what it needs."""
    published = documents.published(tables.DOCUMENT)["peak_gib"]
    row = results.memory.rows[results.memory.rows["cache"] == "dynamic"].sort_values("n_tokens").iloc[0]
    needed = (row["weights_bytes"] + row["predicted_bytes"]) / 2**30
    peak = row["peak_bytes"] / 2**30
    what = "allocated on the GPU" if _accelerated(results) else "of the whole process, libraries included"
    here = f"weights, keys and values are {needed:.2f} GiB; peak {peak:.2f} GiB {what}, counter reset before"
    if _accelerated(results) and max(needed, peak) < published / 10:
        return Verdict(here, "other cause")
    return Verdict(here, "undecided")


def texts_differ(results: Results) -> Verdict:
    """Find where the texts part, and how close the second choice was."""
    table = results.partings
    weights = weights_of(results.texts.about["models"])
    parted = table[table["step"].notna()]
    told = [
        f"{row.dtype}: {row.cache} leaves {row.against} at token {int(row.step) + 1}, margin {row.margin:.2g}"
        for row in parted.itertuples()
    ]
    here = "; ".join(told) or f"all tokens equal: {len(table)} pairs of {int(table['tokens'].max())} tokens"
    document = documents.published(tables.DOCUMENT)["dtype"]
    close = parted["margin"] <= ROUNDING * parted["dtype"].map(agreement.UNIT_ROUNDOFF) * parted["logits_rms"]
    if parted[parted["dtype"] == document].empty:
        # One prompt on which nothing parts contradicts nothing that was seen elsewhere.
        return Verdict(here, "undecided" if weights in (*DOCUMENTS, *OTHERS) else "needs the real weights")
    return Verdict(here, holds(bool(close.all()), False, weights))


CHECKS = {
    "cache-speeds-up": cache_speeds_up,
    "linear-time": linear_time,
    "static-faster": static_faster,
    "static-slower": static_slower,
    "dynamic-not-compilable": dynamic_not_compilable,
    "compiled-by-itself": compiled_by_itself,
    "first-call-slow": first_call_slow,
    "static-more-memory": static_more_memory,
    "shapes": shapes,
    "length-of-cache": length_of_cache,
    "peak-memory": peak_memory,
    "texts-differ": texts_differ,
}
