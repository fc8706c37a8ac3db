"""What the rows of the chapter on static and dynamic caches say: its measures, then its sentences and claims."""


import numpy as np
import pandas as pd

from kvbook.measuring import estimates
from kvbook.measuring.estimates import two_digits
from kvreport.chapters.static_cache import rows
from kvreport.publishing import documents
from kvreport.publishing.estimators import counted, first, median, part
from kvreport.publishing.found import Found
from kvreport.publishing.measures import Measure, always, claim, here, noted, told, worded
from kvreport.publishing.rules import NONE, Bound, Side, every, other_cause, refuted, reproduced
from kvreport.publishing.verdicts import Claims
from kvreport.publishing.wording import DTYPES


def _repeats(name: str, of: str, column: str, series: str = "", form: str = "{:.2f}", **about) -> Measure:
    """Measure the median over repeats, of a column or of two groups' ratio in it."""
    return Measure(name, "repeat", series, form, rows=of, estimate=median(column), **about)


def _over(name: str, way: str, against: str, column: str = "tokens_per_s") -> Measure:
    """Measure a way's tokens a second over another's, repeat by repeat."""
    return _repeats(name, "speeds", column, by=("way",), over=("way", against)).where(way=way)


def _fact(name: str, of: str, count, form: str = "{:.0f}", series: str = "", **about) -> Measure:
    """Count something, or take it from a column's first row."""
    estimate = first(count) if isinstance(count, str) else counted(count)
    return Measure(name, series=series, form=form, rows=of, estimate=estimate, **about)


def _bytes_over(of: pd.DataFrame, other: pd.DataFrame) -> float:
    return of["kv_bytes"].iloc[0] / other["kv_bytes"].iloc[0]


def _saved_in_kernels(usual: pd.DataFrame, large: pd.DataFrame) -> estimates.Estimate:
    """Return what the kernels save by large pages, as a share of what the step saves."""
    columns = ["kernels", rows.PROFILED]
    saved = usual.set_index("repeat")[columns] - large.set_index("repeat")[columns]
    return estimates.median_of((saved["kernels"] / saved[rows.PROFILED]).to_numpy())


def _apart(gains: pd.DataFrame) -> float:
    """Measure how far two runs' intervals lie apart; below 0 they overlap."""
    runs = (estimates.median_of(of.to_numpy()) for _, of in gains.groupby("run")["gain"])
    low, high = sorted(runs, key=lambda estimate: estimate.value)
    return high.low - low.high


def _doubled(contexts: pd.DataFrame) -> str:
    """Say at which context a bf16 step of the largest batch takes twice as long as at the shortest."""
    of = contexts[(contexts["batch"] == max(rows.BATCHES)) & (contexts["dtype"] == "bfloat16")]
    ms, tokens = of["ms"].to_numpy(), of["context"].to_numpy()
    if not (beyond := ms >= 2 * ms[0]).any():
        return f"never up to {tokens[-1]:,} tokens"
    around = slice(beyond.argmax() - 1, beyond.argmax() + 1)
    return f"at about {two_digits(np.interp(2 * ms[0], ms[around], tokens[around])):,.0f} tokens"


def _crossover(steps: pd.DataFrame) -> str:
    """Say from how many tokens on an eager step without a cache takes longer; both are smoothed by straight lines."""
    none, dynamic = (steps[steps["way"] == way] for way in (rows.NONE, rows.DYNAMIC))
    every_length = np.arange(none["context"].min(), none["context"].max() + 1)
    lines = (np.polynomial.Polynomial.fit(of["context"], of["seconds"], 1) for of in (none, dynamic))
    uncached, cached = (line(every_length) for line in lines)
    slower = uncached > cached
    if slower[0]:
        return f"already at the shortest length measured, {every_length[0]} tokens"
    return f"from {every_length[slower.argmax()]} tokens on" if slower.any() else "at no length measured"


SPEED = _repeats("tokens a second", "speeds", "tokens_per_s", "way", "{:.0f}", by=("way",))
FASTEST = _repeats("tokens a second of the fastest way", "fastest", "tokens_per_s", form="{:.0f}")
LIMIT_SHARE = _repeats("share of the memory limit that the fastest way reaches", "fastest", "share_of_limit")
GAIN = _repeats(
    "tokens a second of a way over those of the eager loop with a dynamic cache", "speeds", "tokens_per_s", "way",
    by=("way",), over=("way", rows.DYNAMIC),
).where(engine=rows.LOOP)
CACHE_GAIN = _over("tokens a second with a dynamic cache over those without a cache", rows.DYNAMIC, rows.NONE)
KIND = _repeats(
    "tokens a second with a static cache over those with a dynamic one, in one loop", "speeds", "tokens_per_s",
    "compilation", by=("cache", "compilation"), over=("cache", "dynamic"),
).where(engine=rows.LOOP, one_row=0, cache="static")
KIND_EAGER, KIND_COMPILED = (KIND.where(compilation=how) for how in ("eager", "compiled"))
COMPILED_STOCK = _over("gain from compiling the static loop", rows.COMPILED_STATIC, rows.STATIC)
COMPILING = _repeats("gain from compiling the static loop, over that from the kind of cache", "compiling", "gain")
ONE_ROW = _over("tokens a second of the one-row form over those of the eager static loop", rows.ONE_ROW, rows.STATIC)
LARGE_PAGES = _over("tokens a second on large pages over those on usual ones", rows.LARGE_PAGES, rows.ONE_ROW)
LARGE_PAGES_IN_BUDGET = _repeats(
    "time of a step on usual pages over that on large ones", "step", rows.STEP, by=("pages",), over=("pages", "large")
)
APART = _fact("distance between two runs' intervals of the gain from large pages", "page gains", _apart, "{:.2f}")
_CALLED = {cache: rows.label(cache, False, engine=rows.GENERATE) for cache in rows.KINDS}
OVER_GENERATE = _over(
    "tokens a second of the fastest loop over those of generate, prefill counted in both", rows.LARGE_PAGES,
    _CALLED["dynamic"], "whole_tokens_per_s",
)
GENERATE = _over(
    "tokens a second of generate with a static cache over those with a dynamic one", _CALLED["static"],
    _CALLED["dynamic"],
)
OVER_LLAMA_CPP, LLAMA_CPP_OVER_CALL = (
    _repeats(
        f"llama.cpp's time of a step over that of {what}", "beside_llama_cpp", "step_s", by=("program",),
        over=("program", program),
    ).where(program=rows.THEIRS)
    for what, program in (("ours", rows.OURS), ("one call", rows.ONE_CALL))
)
OVER_ONE_CALL = _repeats(
    "time of a token by “{program}” over that of a step in one call", "one_call", "step_s", by=("program",),
    over=("program", rows.ONE_CALL),
)
GENERATE_OVER_CALL, GRAPHS_OVER_CALL, CALL_SHARE = (
    OVER_ONE_CALL.where(program=one) for one in (rows.GENERATE, rows.OURS, rows.MEMORY)
)
SAME_TOKENS = _fact(
    "share of positions at which a program writes the one-row step's token", "one_call",
    lambda of: of["equal"].sum() / of["tokens"].sum(), "{:.0%}", by=("program",),
)
CACHED_GAIN = _repeats(
    "time of an eager step without a cache over that with a dynamic one, at the last three lengths", "late steps",
    "seconds", by=("cache",), over=("cache", "dynamic"),
).where(cache="none")
GROWTH = _repeats(
    "growth of a cached eager step over 100 tokens, over that without a cache", "growth", "growth", "cache",
    by=("cache",), over=("cache", "none"),
)
KERNELS = _repeats(
    "share of a profiled step that its kernels take", "step", "share_of_kernels", "pages", "{:.0%}", by=("pages",)
)
SAVED = Measure(
    "share of what large pages save that the kernels save", "repeat", "", "{:.0%}", rows="step", by=("pages",),
    over=("pages", "large"), estimate=_saved_in_kernels,
)
_CELL = ("batch", "dtype")
LONGEST = _fact(
    "a step at the longest context over one at the shortest", "contexts",
    lambda of: of["ms"].iloc[-1] / of["ms"].iloc[0], "{:.1f}", "dtype", by=_CELL,
)
LONGEST_ALONE, LONGEST_BATCH = (LONGEST.where(batch=batch) for batch in (1, max(rows.BATCHES)))
COMPUTED = _fact(
    "most tokens whose keys and values one step with a dynamic cache computes", "fed", lambda of: of["tokens"].max()
).where(cache="dynamic")
RECOMPUTED = _fact(
    "tokens whose keys and values the last step without a cache computes", "fed", lambda of: of["tokens"].max()
).where(cache="none")
GRAPHS = _fact(
    "graphs compiled by generate with a static cache", "static_speed", lambda of: of["graphs"].max()
).where(engine=rows.GENERATE, cache="static")
FIRST_GRAPHS = _fact("graphs compiled today at the first two steps with a dynamic cache", "graphs", "first")
LATER_GRAPHS = _fact("graphs compiled today at the steps after them", "graphs", "later")
STEPS = _fact("compiled steps taken today with a dynamic cache", "graphs", "steps")
FIRST = Measure(
    "time of the first step, with its compilation, over the median of later ones", "compilation", "compiled way",
    "{:,.0f}", rows="first steps", by=("way",), estimate=first("over_later"),
).where(compiles=True)
_STATIC_OVER_DYNAMIC = ("cache", "dynamic")
EARLY_BYTES = _fact(
    "bytes of a static cache over those of a dynamic one, after the document's five steps", "early bytes", _bytes_over,
    "{:.1f}", by=("cache",), over=_STATIC_OVER_DYNAMIC,
).where(cache="static")
FULL_BYTES = _fact(
    "bytes of a full static cache over those of a dynamic one", "static_memory", _bytes_over, "{:.2f}", "length",
    by=("cache", "n_tokens"), over=_STATIC_OVER_DYNAMIC,
).where(cache="static")
LEN_OF_KEYS = _fact(
    "len of the keys", "static_shapes", lambda of: of["first_dimension"].max(), series="cache", by=("cache",)
).where(cache=rows.KINDS[1:])
SHAPES = Measure("share of the document's 15 printed shapes that are equal", rows="shapes", estimate=part("equal"))
SHARED = _fact(
    "share of the text before static and dynamic differ", "divergences", "share", "{:.0%}", by=("dtype",)
).where(cache="static", against="dynamic")

# Facts for the prose.
MODEL = noted("static_speed", "models", 0, "name")
DTYPE = noted("static_speed", "settings", "dtype", write=DTYPES.__getitem__)
DEVICE = noted("static_speed", "settings", "device")
THREADS = noted("static_speed", "machine", "threads")
N_TOKENS = noted("static_speed", "settings", "n_new_tokens")
N_REPEATS = noted("static_speed", "settings", "n_repeats")
CROSSOVER = worded("steps", _crossover)
LIMIT = _fact("tokens a second at the memory limit", "limit", "tokens_per_s")
BANDWIDTH = _fact("GB a second", "limit", "gb_per_s")
BYTES_PER_TOKEN = _fact("MB a token", "limit", "mb_per_token")
HEAD = _repeats("ms of the head", "heads", "ms", form="{:.2g}", by=("engine",))
HEAD_VIEW, HEAD_COPY = (HEAD.where(engine=engine) for engine in (rows.HEAD_VIEW, rows.HEAD_COPY))
COMPILED_STATIC_GAIN = GAIN.where(way=rows.COMPILED_STATIC)
SHORTEST, LONGEST_WITHOUT = (_fact("tokens", "late steps", end) for end in ("shortest", "longest"))
GENERATE_SPEED = SPEED.where(engine=rows.GENERATE)
DOUBLED = worded("contexts", _doubled)
CACHE_IS_WEIGHTS = _fact(
    "context at which the caches of a batch hold as many bytes as the weights", "contexts",
    lambda of: of["context"].iloc[0] * of["weights_bytes"].iloc[0] / of["kv_bytes"].iloc[0], "{:,.0f}", by=_CELL,
)
N_PAGES = _fact("pages of the weights", "static_memory", lambda of: of["weights_bytes"].max() / 4096, "{:,.0f}")
KV_PER_TOKEN = _fact(
    "bytes of a token's keys and values", "static_memory", lambda of: (of["predicted_bytes"] / of["n_tokens"]).max(),
    "{:,.0f}",
)
EARLY_MIB = _fact("MiB of keys and values after five steps", "early bytes", "mib", "{:.2f}", by=("cache",))
LONGEST_CONTEXT = _fact("tokens", "contexts", lambda of: of["context"].max(), "{:,.0f}")
BATCH = _fact("sequences", "contexts", lambda of: of["batch"].max())
N_TIMED_STEPS = _fact("timed steps", "weights_or_cache", lambda of: of["step"].nunique())
TIES = Measure("share of first differences at an exact tie", rows="differences", estimate=part("tied"))
PUBLISHED_AHEAD = _fact(
    "the document's gain from a dynamic cache", "published gains", "ahead", "{:.0%}", by=("device",)
)
PUBLISHED_EQUAL = worded("published gains", lambda of: " and ".join(of.loc[of["equal"], "device"]) or "none")
PUBLISHED_SPREAD = _fact(
    "how much longer the slowest of the document's repeated calls took than the fastest", "published calls",
    lambda of: of.groupby("cache")["seconds"].agg(lambda s: s.max() / s.min() - 1).max(), "{:.0%}",
)

_EVEN = Bound(1, "arithmetic", "as fast as the other")
_ONE_TOKEN = Bound(1, "arithmetic", "each token once")
_HALF_MORE = Bound(1.5, "ours", "half as fast again", "ratio")
_TWICE = Bound(2, "ours", "twice as long", "ratio")
_ALL = Bound(1, "arithmetic", "all of it")
_MOST = Bound(0.5, "ours", "more than half", "share")
_QUARTER = Bound(0.25, "ours", "a quarter of the growth without a cache", "share")

STATEMENTS = {
    "cache-pays": always(CACHE_GAIN, "above", _EVEN, headline=True),
    "static-alone": always(KIND_EAGER, "inside", Bound(1.15, "ours", "nearly as fast", "ratio"), headline=True),
    "static-compiled": here(KIND_COMPILED, "inside", _HALF_MORE),
    "one-row-pays": here(ONE_ROW, "above", _HALF_MORE),
    "large-pages-pay": here(LARGE_PAGES, "above", _EVEN),
    "runs-disagree-on-pages": here(APART, "above", Bound(0, "arithmetic", "apart"), on="Intel"),
    "faster-than-llama-cpp": here(OVER_LLAMA_CPP, "above", _EVEN),
    "one-call-is-faster-than-llama-cpp": here(LLAMA_CPP_OVER_CALL, "above", _EVEN),
    "one-call-pays": here(GRAPHS_OVER_CALL, "above", _EVEN),
    "faster-than-generate": here(OVER_GENERATE, "above", _HALF_MORE),
    "kernels-take-most": here(KERNELS, "above", _MOST),
    "large-pages-save-kernels": here(SAVED, "above", _MOST),
    "cache-outgrows-weights": here(LONGEST_BATCH, "above", _TWICE),
    "one-sequence-hardly-grows": here(LONGEST_ALONE, "below", _TWICE, on="Intel"),
    "one-sequence-in-fp16-grows-on-amd": here(LONGEST_ALONE.where(dtype="float16"), "above", _TWICE, on="AMD"),
    "below-the-limit": always(LIMIT_SHARE, "below", Bound(1, "arithmetic", "the limit")),
    "generate-compiles-nothing": here(GRAPHS, "at most", NONE),
    "dynamic-compiles": always(LATER_GRAPHS, "at most", NONE),
    "cached-steps-hardly-grow": always(GROWTH, "below", _QUARTER),
    "room-is-held": always(EARLY_BYTES, "above", Bound(10, "ours", "ten times as many")),
    "full-is-full": always(FULL_BYTES, "at most", Bound(1, "arithmetic", "as many")),
    "len-is-the-batch": always(LEN_OF_KEYS, "at most", Bound(1, "arithmetic", "one text")),
    "fp32-texts-are-equal": always(SHARED.where(dtype="float32"), "at least", _ALL),
    "bf16-texts-differ": here(SHARED.where(dtype="bfloat16"), "below", _ALL),
}


CUDA, CPU, T4, SAME_SHAPE = "a CUDA device", "a CPU", "a T4", "a model of the document's shape"


def _has(found: Found) -> frozenset[str]:
    """Say what of the rules' needs this run has."""
    device, name = DEVICE(found), found.noted("static_speed", "machine", "device_name")
    has = {CUDA: device.startswith("cuda"), CPU: device == "cpu", T4: "T4" in name}
    return frozenset(need for need, there in has.items() if there)


def _longest_steps(found: Found) -> str:
    """Say what a whole step, attention included, takes at the longest context over the shortest."""
    if (contexts := found["contexts"]) is None:
        return ""
    over = ", ".join(f"{DTYPES[row.dtype]} {row.estimate.value:.2f}" for row in LONGEST_ALONE.table(found).itertuples())
    shortest, longest = contexts["context"].min(), contexts["context"].max()
    return f"a whole step reads the cache too: at {longest:,} tokens it takes {over} times as long as at {shortest:,}"


def _other_tokens(steps: pd.DataFrame, way: str) -> str:
    """Count a way's tokens, over its runs, that are not those of the eager loop with a dynamic cache: `4 of 127`."""
    reference = steps[(steps["way"] == rows.DYNAMIC) & (steps["repeat"] == 0)].set_index("step")["token"]
    of = steps[steps["way"] == way]
    return f"{int((of['token'].to_numpy() != reference.reindex(of['step']).to_numpy()).sum())} of {len(of)}"


def _of_compiled_steps(found: Found) -> str:
    other, static = (_other_tokens(found["steps"], way) for way in (rows.COMPILED_DYNAMIC, rows.COMPILED_STATIC))
    about = found.runs["static_speed"].about
    whole = about["settings"].get("scope") == "model"
    theirs = documents.published(rows.DOCUMENT)["versions"]["transformers"]
    return (
        f"{'the forward pass' if whole else 'a few layers'} compiled as one graph, without CUDA graphs; tokens other "
        f"than the eager ones: {other}, with the static cache compiled {static}; today's transformers is "
        f"{about['machine']['transformers']}, the document's was {theirs}"
    )


def _seconds_of_first_steps(found: Found) -> str:
    steps = found["first steps"]
    told = (f"{row.way} {row.seconds:.1f} s" for row in steps[steps["compiles"]].itertuples())
    return f"first steps: {', '.join(told)}"


def _of_bytes(found: Found) -> str:
    early = found["early bytes"].set_index("cache")["mib"]
    beside = f"{early['static']:.1f} MiB against {early['dynamic']:.2f}"
    if (memory := found["static_memory"]) is None:
        return beside
    *_, (places, full) = memory.groupby("n_tokens")
    mib = full.set_index("cache")["kv_bytes"] / 2**20
    return f"{beside}; when all {places:,} places are filled, {mib['static']:.1f} against {mib['dynamic']:.1f}"


def _of_shapes(found: Found) -> str:
    shapes = found["shapes"]
    ends = {what: f"{of.iloc[0]} … {of.iloc[-1]}" for what, of in shapes.groupby("what")["here"]}
    equal = f"{shapes['equal'].sum()} of {len(shapes)}"
    return f"{equal}; dynamic keys {ends['keys_dynamic']}, static ones {ends['keys_static']}"


def _same_shape(found: Found) -> frozenset[str]:
    """Tell whether the heads are as many and as wide as the document's."""
    first_keys = found["shapes"].query("what == 'keys_dynamic'").iloc[0]
    here, theirs = (shape.split("x")[1::2] for shape in (first_keys["here"], first_keys["theirs"]))
    return frozenset({SAME_SHAPE} if here == theirs else ())


def _judged(measure: Measure, agrees: Side, contradicts: Side, bound: Bound, **about):
    """Bear a claim out where every series is on one side of a bound, contradict it on the other."""
    return claim(reproduced(every(measure, agrees, bound)), refuted(every(measure, contradicts, bound)), **about)


_ON_DEVICE = {"beside": told("on {DEVICE}", globals()), "has": _has}
_OF_GENERATE = told(
    "{GRAPHS} graphs compiled by generate; in one loop static over dynamic, both eager, {KIND_EAGER}, compiled static "
    "over eager dynamic {COMPILED_STATIC_GAIN}; on {DEVICE}", globals(),
)
_SLOWER = {
    device: _judged(GENERATE, "below", "above", _EVEN, needs=(device,), beside=_OF_GENERATE, has=_has)
    for device in (CPU, T4)
}
CHECKS = {
    "cache-speeds-up": _judged(
        CACHED_GAIN, "above", "below", _EVEN,
        beside=told("at {SHORTEST} to {LONGEST_WITHOUT} tokens, on {DEVICE}", globals()),
    ),
    "linear-time": claim(
        reproduced(every(COMPUTED, "at most", _ONE_TOKEN), every(RECOMPUTED, "above", _ONE_TOKEN)),
        refuted(every(COMPUTED, "above", _ONE_TOKEN)), about_code=True, beside=_longest_steps,
    ),
    "static-faster": claim(
        other_cause(every(COMPILING, "above", Bound(1, "arithmetic", "compiling does more than the kind"))),
        reproduced(every(KIND, "above", _EVEN)), refuted(every(KIND, "below", _EVEN)), needs=(CUDA,), **_ON_DEVICE,
    ),
    "static-slower-cpu": _SLOWER[CPU],
    "static-slower-t4": _SLOWER[T4],
    "dynamic-not-compilable": claim(
        refuted(
            every(FIRST_GRAPHS, "above", NONE), every(LATER_GRAPHS, "at most", NONE), every(STEPS, "above", NONE),
            one_is_enough=True,
        ),
        reproduced(every(STEPS, "at most", NONE)), beside=_of_compiled_steps,
    ),
    "compiled-by-itself": _judged(GRAPHS, "above", "at most", NONE, needs=(CUDA,), **_ON_DEVICE),
    "first-call-slow": _judged(
        FIRST, "above", "below", Bound(10, "ours", "ten steps are a long time"), beside=_seconds_of_first_steps
    ),
    "static-more-memory": _judged(
        EARLY_BYTES, "above", "at most", Bound(1, "arithmetic", "as many bytes"), about_code=True, beside=_of_bytes
    ),
    "shapes": _judged(
        SHAPES, "at least", "below", Bound(1, "document", "all of them"), needs=(SAME_SHAPE,), about_code=True,
        beside=_of_shapes, has=_same_shape,
    ),
}
CLAIMS = Claims(rows.DOCUMENT, CHECKS)
