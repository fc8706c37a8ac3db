"""The claims of the notebook on static and dynamic caches: each one's rule, and what of the rows it looks at."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from scipy import stats

from kvbook.measuring import estimates
from kvreport.chapters.static_cache import speed, tables
from kvreport.chapters.static_cache.results import Results
from kvreport.publishing import documents
from kvreport.publishing.judging import Check, Evidence, Measured, fact
from kvreport.publishing.rules import Bound, Quantity, Rule, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of

CUDA = "a CUDA device"
_REPEAT = "repeat"
# A step without a cache does so many tokens' work at once that a short text shows no law.
_LONG = 1024
_EVEN = Bound(1, "arithmetic", "as fast as the other")
_NONE = Bound(0, "arithmetic", "none")
_AS_MUCH = Bound(1, "arithmetic", "as many bytes")


def _weights(results: Results) -> str:
    """Say whose weights the timed model has."""
    return weights_of(results.speed.about["models"])


def _device(results: Results) -> str:
    return results.speed.about["settings"]["device"]


def _has(results: Results, *more: str) -> frozenset[str]:
    """Say what of the rules' needs this run has."""
    return frozenset({CUDA} if _device(results).startswith("cuda") else ()) | frozenset(more)


def _mean(values: Iterable[float], logarithmic: bool = True, series: str = "") -> list[Measured]:
    """Average over units, with Student's interval or the range of few units; of none there is no average."""
    given = np.asarray(list(values), dtype=float)
    logs = np.log(given) if logarithmic else given
    if not len(logs):
        return []
    if len(logs) < estimates.FEWEST_UNITS:
        ends, kind = [logs.mean(), logs.min(), logs.max()], "range"
    else:
        half = stats.t.ppf((1 + estimates.CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
        ends, kind = [logs.mean() + shift for shift in (0.0, -half, half)], "95 %"
    estimate = estimates.Estimate(*(float(np.exp(end) if logarithmic else end) for end in ends), kind)
    return [Measured(series, estimate, len(logs))]


def _over(results: Results, way: tables.Way, against: tables.Way) -> pd.Series:
    """Give the ratio of two ways' tokens a second, repeat by repeat."""
    repeats = results.speeds.per_repeat
    return (repeats[way] / repeats[against]).dropna()


CACHED_GAIN = Quantity(
    "time of an eager step without a cache over that with a dynamic one, at the last three lengths", _REPEAT
)


def _cache_speeds_up(results: Results) -> Evidence:
    none, dynamic = (tables.step_seconds(results.speed.rows, cache, False) for cache in ("none", "dynamic"))
    last = sorted(none["step"].unique())[-3:]
    late = none[none["step"].isin(last)]
    beside = dynamic[dynamic["step"] >= last[0]].groupby("repeat")["seconds"].median()
    ratios = (late.groupby("repeat")["seconds"].median() / beside).dropna()
    where = f"at {late['context'].min()} to {late['context'].max()} tokens, on {_device(results)}"
    return Evidence(_weights(results), {CACHED_GAIN: _mean(ratios)}, where)


LENGTHS = f"texts of {_LONG:,} tokens or more"
GROWTH = Quantity("growth of a step without a cache over 100 tokens", _REPEAT, form="{:+.0%}")
CACHED_GROWTH = Quantity("growth of a step with a dynamic cache, over that without", _REPEAT)


def _linear_time(results: Results) -> Evidence:
    none, dynamic = (
        pd.Series(
            {
                repeat: tables.growth(steps).value
                for repeat, steps in tables.step_seconds(results.speed.rows, cache, False).groupby("repeat")
            }
        )
        for cache in ("none", "dynamic")
    )
    contexts = tables.step_seconds(results.speed.rows, "none", False)["context"]
    found = {GROWTH: _mean(none, False), CACHED_GROWTH: _mean((dynamic / none).dropna(), False)}
    where = f"at {contexts.min()} to {contexts.max()} tokens"
    return Evidence(_weights(results), found, where, _has(results, *([LENGTHS] if contexts.max() >= _LONG else [])))


KIND = Quantity(
    "tokens a second with a static cache over those with a dynamic one, in one loop", _REPEAT, "compilation"
)
COMPILING = Quantity("gain from compiling the static loop, over that from the kind of cache", _REPEAT)


def _static_faster(results: Results) -> Evidence:
    kind = {
        done: _over(results, ("static", done, False, False), ("dynamic", done, False, False)) for done in (False, True)
    }
    compiling = _over(results, ("static", True, False, False), ("static", False, False, False))
    largest = pd.concat([*kind.values(), *(1 / ratios for ratios in kind.values())], axis=1).max(axis=1)
    names = {False: "eager", True: "compiled"}
    found = {
        KIND: [one for done, ratios in kind.items() for one in _mean(ratios, series=names[done])],
        COMPILING: _mean((compiling / largest).dropna()),
    }
    return Evidence(_weights(results), found, f"on {_device(results)}", _has(results))


GENERATE = Quantity("tokens a second of generate with a static cache over those with a dynamic one", _REPEAT)
SLOW_DEVICE = "a CPU or a T4"


def _static_slower(results: Results) -> Evidence:
    rows = results.speed.rows
    whole = rows[(rows["engine"] == speed.GENERATE) & (rows["phase"] == speed.WHOLE)]
    speeds = (whole["n_steps"] / whole["seconds"]).groupby([whole["cache"], whole["repeat"]]).median()
    ratios = (speeds["static"] / speeds["dynamic"]).dropna()
    eager, compiled = (
        tables.ratio(results.speeds.per_repeat, ("static", done, False, False), ("dynamic", False, False, False)).text()
        for done in (False, True)
    )
    beside = (
        f"{tables.graphs_of_generate(rows)} graphs compiled by generate; in one loop static over dynamic, both eager, "
        f"{eager}, compiled static over eager dynamic {compiled}; on {_device(results)}"
    )
    has = [SLOW_DEVICE] if _device(results) == "cpu" or "T4" in results.speed.about["machine"]["device_name"] else []
    return Evidence(_weights(results), {GENERATE: _mean(ratios)}, beside, _has(results, *has))


FIRST_GRAPHS = Quantity("graphs compiled at the first two steps with a dynamic cache", form="{:.0f}")
LATER_GRAPHS = Quantity("graphs compiled at the steps after them", form="{:.0f}")
STEPS = Quantity("compiled steps taken with a dynamic cache", form="{:.0f}")


def _dynamic_not_compilable(results: Results) -> Evidence:
    rows = results.speed.rows
    steps = rows[(rows["engine"] == speed.LOOP) & (rows["cache"] == "dynamic") & (rows["compiled"] == 1)]
    later = steps[steps["phase"] == speed.DECODE]
    found = {
        FIRST_GRAPHS: [fact(steps[steps["phase"] == speed.COMPILE]["graphs"].sum())],
        LATER_GRAPHS: [fact(tables.late_graphs(rows))],
        STEPS: [fact(len(later))],
    }
    other, static = (tables.other_tokens(rows, (cache, True, False, False)) for cache in ("dynamic", "static"))
    whole = results.speed.about["settings"].get("scope") == "model"
    beside = (
        f"{'the forward pass' if whole else 'a few layers'} compiled as one graph, without CUDA graphs; tokens other than the "
        f"eager ones: {other}, with the static cache compiled {static}"
    )
    return Evidence(_weights(results), found, beside)


GRAPHS = Quantity("graphs compiled by generate with a static cache", form="{:.0f}")


def _compiled_by_itself(results: Results) -> Evidence:
    return Evidence(
        _weights(results),
        {GRAPHS: [fact(tables.graphs_of_generate(results.speed.rows))]},
        f"on {_device(results)}",
        _has(results),
    )


FIRST = Quantity("time of the first compiled step over the median of later ones", "compiled way", form="{:,.0f}")


def _first_call_slow(results: Results) -> Evidence:
    rows = results.speed.rows[(results.speed.rows["engine"] == speed.LOOP) & (results.speed.rows["compiled"] == 1)]
    told, ratios = [], []
    for (cache, one_row, pages), some in rows.groupby(["cache", "one_row", "large_pages"], sort=False):
        first = some[some["phase"] == speed.COMPILE].sort_values("step")["seconds"].iloc[0]
        ratios.append(first / some[some["phase"] == speed.DECODE]["seconds"].median())
        told.append(f"{tables.label(cache, 1, one_row, pages)} {first:.1f} s")
    return Evidence(_weights(results), {FIRST: _mean(ratios)}, f"first steps: {', '.join(told)}")


BYTES = Quantity("bytes of a static cache over those of a dynamic one, after the document's five steps", form="{:.1f}")


def _static_more_memory(results: Results) -> Evidence:
    early = results.early_bytes
    full = results.memory.rows.pivot_table(index="n_tokens", columns="cache", values="kv_bytes")
    beside = (
        f"{early['static'] / 2**20:.1f} MiB against {early['dynamic'] / 2**20:.2f}; when all {full.index.max():,} places are "
        f"filled, {full['static'].iloc[-1] / 2**20:.1f} against {full['dynamic'].iloc[-1] / 2**20:.1f}"
    )
    return Evidence(_weights(results), {BYTES: [fact(early["static"] / early["dynamic"])]}, beside)


SAME_SHAPE = "a model of the document's shape"
SHAPES = Quantity("share of the document's 15 printed shapes that are equal")


def _shapes(results: Results) -> Evidence:
    published = documents.published(tables.DOCUMENT)["shapes"]
    rows = {cache: some.sort_values("step") for cache, some in results.shapes.rows.groupby("cache")}
    # The ids are printed behind the step, when the token is with them already.
    ids = [f"1x{int(fed.split('x')[1]) + 1}" for fed in rows["none"]["fed"]]
    found = {
        "ids_without_cache": ids,
        "keys_dynamic": list(rows["dynamic"]["keys_shape"]),
        "keys_static": list(rows["static"]["keys_shape"]),
    }
    equal = [a == b for name in published for a, b in zip(published[name], found[name], strict=True)]

    def heads(shape: str) -> list[str]:
        return shape.split("x")[1::2]

    alike = heads(found["keys_dynamic"][0]) == heads(published["keys_dynamic"][0])
    beside = (
        f"{sum(equal)} of {len(equal)}; dynamic keys {found['keys_dynamic'][0]} … {found['keys_dynamic'][-1]}, static ones "
        f"{found['keys_static'][0]} … {found['keys_static'][-1]}"
    )
    has = _has(results, *([SAME_SHAPE] if alike else []))
    return Evidence(_weights(results), {SHAPES: [fact(np.mean(equal))]}, beside, has)


PEAK = Quantity("peak of the memory that torch allocated, in GiB")
NEEDED = Quantity("weights, keys and values as computed from the configuration, in GiB")


def _peak_memory(results: Results) -> Evidence:
    row = results.memory.rows[results.memory.rows["cache"] == "dynamic"].sort_values("n_tokens").iloc[0]
    needed = (row["weights_bytes"] + row["predicted_bytes"]) / 2**30
    added = (row["peak_bytes"] - row["before_bytes"]) / 2**20
    has = _has(results)
    if CUDA in has:
        found = {PEAK: [fact(row["peak_bytes"] / 2**30)], NEEDED: [fact(needed)]}
        return Evidence(_weights(results), found, f"{added:.0f} MiB of it added by the generation", has)
    # Here the counter is that of the whole process, which is no number of the document's.
    beside = f"the generation added {added:.0f} MiB to the process"
    return Evidence(_weights(results), {NEEDED: [fact(needed)]}, beside, has)


_TENTH = Bound(1.21, "ours", "a tenth of the published number")
_HALF_GROWTH = Bound(0.5, "ours", "half of the growth without a cache")
_LONG_TIME = Bound(10, "ours", "ten steps are a long time")

CHECKS = {
    "cache-speeds-up": Check(
        Rule((reproduced(every(CACHED_GAIN, "above", _EVEN)), refuted(every(CACHED_GAIN, "below", _EVEN)))),
        _cache_speeds_up,
    ),
    "linear-time": Check(
        Rule(
            (
                reproduced(every(GROWTH, "above", _NONE), every(CACHED_GROWTH, "below", _HALF_GROWTH)),
                refuted(every(GROWTH, "above", _NONE), every(CACHED_GROWTH, "above", _HALF_GROWTH)),
            ),
            needs=(LENGTHS,),
        ),
        _linear_time,
    ),
    "static-faster": Check(
        Rule(
            (
                other_cause(every(COMPILING, "above", Bound(1, "arithmetic", "compiling does more than the kind"))),
                reproduced(every(KIND, "above", _EVEN)),
                refuted(every(KIND, "below", _EVEN)),
            ),
            needs=(CUDA,),
        ),
        _static_faster,
    ),
    "static-slower": Check(
        Rule((reproduced(every(GENERATE, "below", _EVEN)), refuted(every(GENERATE, "above", _EVEN))), needs=(SLOW_DEVICE,)),
        _static_slower,
    ),
    "dynamic-not-compilable": Check(
        Rule(
            (
                refuted(
                    every(FIRST_GRAPHS, "above", _NONE), every(LATER_GRAPHS, "at most", _NONE), every(STEPS, "above", _NONE),
                    one_is_enough=True,
                ),
                reproduced(every(STEPS, "at most", _NONE)),
            )
        ),
        _dynamic_not_compilable,
    ),
    "compiled-by-itself": Check(
        Rule((reproduced(every(GRAPHS, "above", _NONE)), refuted(every(GRAPHS, "at most", _NONE))), needs=(CUDA,)),
        _compiled_by_itself,
    ),
    "first-call-slow": Check(
        Rule((reproduced(every(FIRST, "above", _LONG_TIME)), refuted(every(FIRST, "below", _LONG_TIME)))),
        _first_call_slow,
    ),
    "static-more-memory": Check(
        Rule((reproduced(every(BYTES, "above", _AS_MUCH)), refuted(every(BYTES, "at most", _AS_MUCH))), about_code=True),
        _static_more_memory,
    ),
    "shapes": Check(
        Rule(
            (
                reproduced(every(SHAPES, "at least", Bound(1, "document", "all of them"))),
                refuted(every(SHAPES, "below", Bound(1, "document", "all of them"))),
            ),
            needs=(SAME_SHAPE,),
            about_code=True,
        ),
        _shapes,
    ),
    "peak-memory": Check(
        Rule(
            (
                other_cause(every(PEAK, "below", _TENTH), every(NEEDED, "below", _TENTH)),
                reproduced(every(PEAK, "at least", Bound(12.1, "document", "12.07 GB, rounded"))),
            ),
            needs=(CUDA,),
        ),
        _peak_memory,
    ),
}  # fmt: skip

CLAIMS = Claims("notebook-static", CHECKS)
