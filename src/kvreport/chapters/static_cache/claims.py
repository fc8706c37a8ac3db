"""The claims of the notebook on static and dynamic caches: each one's rule, and what of the rows it looks at."""

import numpy as np
import pandas as pd

from kvreport.chapters.static_cache import speed, tables
from kvreport.chapters.static_cache.results import Results
from kvreport.publishing import documents
from kvreport.publishing.judging import Check, Evidence, Measured, fact
from kvreport.publishing.rules import Bound, Quantity, Rule, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims, weights_of
from kvreport.publishing.wording import DTYPES

CUDA = "a CUDA device"
_REPEAT = "repeat"
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


def of_repeats(values: pd.Series, series: str = "") -> list[Measured]:
    """Take the median over repeats, as tables do; of none there is no estimate."""
    values = values.dropna()
    return [Measured(series, tables.median(values), len(values))] if len(values) else []


def over(results: Results, way: tables.Way, against: tables.Way) -> pd.Series:
    """Give the ratio of two ways' tokens a second, repeat by repeat."""
    repeats = results.speeds.per_repeat
    return repeats[way] / repeats[against]


CACHED_GAIN = Quantity(
    "time of an eager step without a cache over that with a dynamic one, at the last three lengths", _REPEAT
)


def _cache_speeds_up(results: Results) -> Evidence:
    none, dynamic = (tables.step_seconds(results.speed.rows, cache, False) for cache in ("none", "dynamic"))
    last = sorted(none["step"].unique())[-3:]
    late = none[none["step"].isin(last)]
    beside = dynamic[dynamic["step"] >= last[0]].groupby("repeat")["seconds"].median()
    ratios = late.groupby("repeat")["seconds"].median() / beside
    where = f"at {late['context'].min()} to {late['context'].max()} tokens, on {_device(results)}"
    return Evidence(_weights(results), {CACHED_GAIN: of_repeats(ratios)}, where)


COMPUTED = Quantity("most tokens whose keys and values one step with a dynamic cache computes", form="{:.0f}")
RECOMPUTED = Quantity("tokens whose keys and values the last step without a cache computes", form="{:.0f}")


def _linear_time(results: Results) -> Evidence:
    rows = results.shapes.rows
    # The first step is the prompt's, with every kind of cache.
    later = rows[rows["step"] > rows["step"].min()]
    fed = later["fed"].str.split("x").str[1].astype(int).groupby(later["cache"]).max()
    found = {COMPUTED: [fact(fed["dynamic"])], RECOMPUTED: [fact(fed["none"])]}
    return Evidence(_weights(results), found, _longest_steps(results))


def _longest_steps(results: Results) -> str:
    """Say what a whole step, attention included, takes at the longest context over the shortest."""
    if results.batches is None:
        return ""
    one = results.contexts[results.contexts["batch"] == 1]
    short, long = (
        one[one["context"] == end].set_index("dtype")["ms"] for end in (one["context"].min(), one["context"].max())
    )
    over = ", ".join(f"{DTYPES[dtype]} {ratio:.2f}" for dtype, ratio in (long / short).items())
    return (
        f"a whole step reads the cache too: at {one['context'].max():,} tokens it takes {over} times as long as at "
        f"{one['context'].min():,}"
    )


KIND = Quantity(
    "tokens a second with a static cache over those with a dynamic one, in one loop", _REPEAT, "compilation"
)
COMPILING = Quantity("gain from compiling the static loop, over that from the kind of cache", _REPEAT)


def _static_faster(results: Results) -> Evidence:
    kind = {
        done: over(results, ("static", done, False, False), ("dynamic", done, False, False)) for done in (False, True)
    }
    compiling = over(results, ("static", True, False, False), ("static", False, False, False))
    largest = pd.concat([*kind.values(), *(1 / ratios for ratios in kind.values())], axis=1).max(axis=1)
    names = {False: "eager", True: "compiled"}
    found = {
        KIND: [one for done, ratios in kind.items() for one in of_repeats(ratios, names[done])],
        COMPILING: of_repeats(compiling / largest),
    }
    return Evidence(_weights(results), found, f"on {_device(results)}", _has(results))


GENERATE = Quantity("tokens a second of generate with a static cache over those with a dynamic one", _REPEAT)
CPU, T4 = "a CPU", "a T4"


def _static_slower(results: Results) -> Evidence:
    rows = results.speed.rows
    whole = rows[(rows["engine"] == speed.GENERATE) & (rows["phase"] == speed.WHOLE)]
    speeds = (whole["n_steps"] / whole["seconds"]).groupby([whole["cache"], whole["repeat"]]).median()
    ratios = speeds["static"] / speeds["dynamic"]
    eager, compiled = (
        tables.ratio(results.speeds.per_repeat, ("static", done, False, False), ("dynamic", False, False, False)).text()
        for done in (False, True)
    )
    beside = (
        f"{tables.graphs_of_generate(rows)} graphs compiled by generate; in one loop static over dynamic, both eager, "
        f"{eager}, compiled static over eager dynamic {compiled}; on {_device(results)}"
    )
    has = [CPU] if _device(results) == "cpu" else []
    has += [T4] if "T4" in results.speed.about["machine"]["device_name"] else []
    return Evidence(_weights(results), {GENERATE: of_repeats(ratios)}, beside, _has(results, *has))


FIRST_GRAPHS = Quantity("graphs compiled today at the first two steps with a dynamic cache", form="{:.0f}")
LATER_GRAPHS = Quantity("graphs compiled today at the steps after them", form="{:.0f}")
STEPS = Quantity("compiled steps taken today with a dynamic cache", form="{:.0f}")


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
    today = results.speed.about["machine"]["transformers"]
    theirs = documents.published(tables.DOCUMENT)["versions"]["transformers"]
    beside = (
        f"{'the forward pass' if whole else 'a few layers'} compiled as one graph, without CUDA graphs; tokens other than the "
        f"eager ones: {other}, with the static cache compiled {static}; today's transformers is {today}, the document's was "
        f"{theirs}"
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


FIRST = Quantity(
    "time of the first step, with its compilation, over the median of later ones",
    "compilation",
    "compiled way",
    "{:,.0f}",
)


def _first_call_slow(results: Results) -> Evidence:
    rows = results.speed.rows[(results.speed.rows["engine"] == speed.LOOP) & (results.speed.rows["compiled"] == 1)]
    found, told = [], []
    for (cache, one_row, pages), some in rows.groupby(["cache", "one_row", "large_pages"], sort=False):
        first = some[some["phase"] == speed.COMPILE].sort_values("step").iloc[0]
        # A graph that an earlier way has compiled is found, and nothing is compiled.
        if first["graphs"]:
            label = tables.label(cache, 1, one_row, pages)
            ratio = first["seconds"] / some[some["phase"] == speed.DECODE]["seconds"].median()
            found.append(Measured(label, fact(ratio).estimate, 1))
            told.append(f"{label} {first['seconds']:.1f} s")
    return Evidence(_weights(results), {FIRST: found}, f"first steps: {', '.join(told)}")


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


_ONE_TOKEN = Bound(1, "arithmetic", "each token once")


def _slower_on(device: str) -> Rule:
    return Rule(
        (reproduced(every(GENERATE, "below", _EVEN)), refuted(every(GENERATE, "above", _EVEN))), needs=(device,)
    )


_LONG_TIME = Bound(10, "ours", "ten steps are a long time")

CHECKS = {
    "cache-speeds-up": Check(
        Rule((reproduced(every(CACHED_GAIN, "above", _EVEN)), refuted(every(CACHED_GAIN, "below", _EVEN)))),
        _cache_speeds_up,
    ),
    "linear-time": Check(
        Rule(
            (
                reproduced(every(COMPUTED, "at most", _ONE_TOKEN), every(RECOMPUTED, "above", _ONE_TOKEN)),
                refuted(every(COMPUTED, "above", _ONE_TOKEN)),
            ),
            about_code=True,
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
    "static-slower-cpu": Check(_slower_on(CPU), _static_slower),
    "static-slower-t4": Check(_slower_on(T4), _static_slower),
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
}  # fmt: skip

CLAIMS = Claims("notebook-static", CHECKS)
