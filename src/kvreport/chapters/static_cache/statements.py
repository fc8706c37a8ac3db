"""The numbers and statements of the chapter on static and dynamic caches."""

from collections.abc import Callable

from kvbook.measuring.estimates import Estimate
from kvreport.chapters.static_cache import results, speed, tables
from kvreport.chapters.static_cache.results import Results
from kvreport.publishing.judging import Measured, fact, facts
from kvreport.publishing.rules import Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import between

EXPERIMENTS = results.EXPERIMENTS
NONE, DYNAMIC, STATIC = ((cache, False, False) for cache in tables.KINDS)
COMPILED_DYNAMIC, COMPILED_STATIC = ((cache, True, False) for cache in ("dynamic", "static"))
ONE_ROW = ("static", True, True)

_SPEEDS = Quantity("ratio of two ways' tokens a second", "repeat")
_BYTES = Quantity("bytes of the static cache over those of the dynamic one", form="{:.1f}")
_AS_FAST = Bound(1, "arithmetic", "as fast")
_NEARLY = Bound(1.15, "ours", "nearly as fast", "ratio")
_HALF_MORE = Bound(1.5, "ours", "half as fast again", "ratio")

_SHARED = Quantity("share of the text before static and dynamic differ", form="{:.0%}")
_ALL = Bound(1, "arithmetic", "all of it")

Measure = Callable[[Results], list[Measured]]


def _over(way: tables.Way, against: tables.Way) -> Measure:
    """Measure a way's tokens a second over another's, both in the loop; a device or a model can leave a way out."""

    def measure(found: Results) -> list[Measured]:
        if found.speed is None or not {way, against} <= set(repeats := found.speeds.per_repeat):
            return []
        return [Measured("", tables.ratio(repeats, way, against), len(repeats[way]))]

    return measure


def _over_generate(way: tables.Way) -> Measure:
    """Measure a way's tokens a second over those of the library's call, prefill counted in both."""

    def measure(found: Results) -> list[Measured]:
        if found.speed is None or way not in found.speeds.per_repeat:
            return []
        return [Measured("", tables.against_generate(found.speed.rows, way), len(found.speeds.per_repeat[way]))]

    return measure


def _growth(found: Results) -> list[Measured]:
    """Measure what a hundred tokens add to an eager step, with a cache over without."""
    if found.speed is None:
        return []
    each = {
        cache: tables.growth_by_repeat(tables.step_seconds(found.speed.rows, cache, False)) for cache in tables.KINDS
    }
    shares = {cache: each[cache] / each["none"] for cache in ("dynamic", "static")}
    return [Measured(cache, tables.median(share), len(share)) for cache, share in shares.items()]


def _graphs(found: Results) -> list[Measured]:
    return [] if found.speed is None else [fact(tables.graphs_of_generate(found.speed.rows))]


def _late_graphs(found: Results) -> list[Measured]:
    return [] if found.speed is None else [fact(tables.late_graphs(found.speed.rows))]


def _bytes_early(found: Results) -> list[Measured]:
    return [] if found.shapes is None else [fact(found.early_bytes["static"] / found.early_bytes["dynamic"])]


def _bytes_full(found: Results) -> list[Measured]:
    if found.memory is None:
        return []
    full = found.memory.rows.pivot_table(index="n_tokens", columns="cache", values="kv_bytes")
    return facts((f"{tokens:,} tokens", share) for tokens, share in (full["static"] / full["dynamic"]).items())


def _first_dimension(found: Results) -> list[Measured]:
    if found.shapes is None:
        return []
    rows = found.shapes.rows.dropna(subset="first_dimension")
    return [fact(of["first_dimension"].max(), str(cache)) for cache, of in rows.groupby("cache", sort=False)]


def _shared_share(dtype: str) -> Measure:
    """Measure the share of the text before the static and the dynamic cache write another token."""

    def measure(found: Results) -> list[Measured]:
        if found.texts is None:
            return []
        pairs = found.partings[(found.partings["cache"] == "static") & (found.partings["against"] == "dynamic")]
        return [fact(share) for share in pairs.loc[pairs["dtype"] == dtype, "share"]]

    return measure


def _limit_share(found: Results) -> list[Measured]:
    if found.speed is None or found.bandwidth is None or found.memory is None:
        return []
    per_second = found.speeds.per_repeat[found.speeds.fastest]
    share = tables.median(per_second / found.bound.tokens_per_second)
    return [Measured("", share, len(per_second))]


STATEMENTS: dict[str, Statement[Results]] = {
    "cache-pays": Statement(every(_SPEEDS, "above", _AS_FAST), _over(DYNAMIC, NONE), headline=True),
    "static-alone": Statement(every(_SPEEDS, "inside", _NEARLY), _over(STATIC, DYNAMIC), headline=True),
    "static-compiled": Statement(
        every(_SPEEDS, "inside", _HALF_MORE), _over(COMPILED_STATIC, COMPILED_DYNAMIC), "this processor"
    ),
    "one-row-pays": Statement(every(_SPEEDS, "above", _HALF_MORE), _over(ONE_ROW, STATIC), "this processor"),
    "faster-than-generate": Statement(
        every(_SPEEDS, "above", _HALF_MORE), _over_generate(ONE_ROW), "this processor"
    ),
    "below-the-limit": Statement(
        every(
            Quantity("share of the memory limit that the fastest way reaches", "repeat"), "below",
            Bound(1, "arithmetic", "the limit"),
        ),
        _limit_share,
    ),
    "generate-compiles-nothing": Statement(
        every(
            Quantity("graphs compiled by generate with a static cache", form="{:.0f}"), "at most",
            Bound(0, "arithmetic", "none"),
        ),
        _graphs, "this processor",
    ),
    "dynamic-compiles": Statement(
        every(
            Quantity("graphs compiled with a dynamic cache after the first two steps", form="{:.0f}"), "at most",
            Bound(0, "arithmetic", "none"),
        ),
        _late_graphs,
    ),
    "cached-steps-hardly-grow": Statement(
        every(
            Quantity("growth of a cached eager step over 100 tokens, over that without a cache", "repeat", "cache"), "below",
            Bound(0.25, "ours", "a quarter of the growth without a cache", "share"),
        ),
        _growth,
    ),
    "room-is-held": Statement(
        every(_BYTES, "above", Bound(10, "ours", "ten times as many")), _bytes_early
    ),
    "full-is-full": Statement(
        every(Quantity(_BYTES.name, series="length", form="{:.2f}"), "at most", Bound(1, "arithmetic", "as many")),
        _bytes_full,
    ),
    "len-is-the-batch": Statement(
        every(Quantity("len of the keys", series="cache", form="{:.0f}"), "at most", Bound(1, "arithmetic", "one text")),
        _first_dimension,
    ),
    "fp32-texts-are-equal": Statement(every(_SHARED, "at least", _ALL), _shared_share("float32")),
    "bf16-texts-differ": Statement(every(_SHARED, "below", _ALL), _shared_share("bfloat16"), "this processor"),
}  # fmt: skip


def _said(measure: Measure, form: str = "{:.2f}") -> Callable[[Results], str]:
    return lambda found: ", ".join(one.estimate.text(form) for one in measure(found)) or "not run"


def _generate(cache: str) -> Callable[[Results], str]:
    """Give the tokens a second of the library's call."""

    def give(found: Results) -> str:
        table = found.speeds.table
        (of,) = table.loc[(table["engine"] == speed.GENERATE) & (table["cache"] == cache), "speed"]
        return of.text("{:.1f}") if cache != "none" else f"{of.value:.1f}"

    return give


def _fastest(found: Results) -> Estimate:
    return tables.median(found.speeds.per_repeat[found.speeds.fastest])


def _gains() -> dict[str, float]:
    return tables.published_gains()


NUMBERS: dict[str, Callable[[Results], str]] = {
    "published_equal": lambda _: " and ".join(device for device, gain in _gains().items() if gain == 1) or "none",
    "published_ahead": lambda _: between([gain - 1 for gain in _gains().values() if gain != 1], "{:.0%}"),
    "published_spread": lambda _: f"{tables.published_spread():.0%}",
    "model": lambda found: found.speed.about["models"][0]["name"],
    "threads": lambda found: str(found.speed.about["machine"]["threads"]),
    "n_tokens": lambda found: str(found.speed.about["settings"]["n_new_tokens"]),
    "n_repeats": lambda found: str(found.speed.about["settings"]["n_repeats"]),
    "generate_none": _generate("none"),
    "generate_dynamic": _generate("dynamic"),
    "generate_static": _generate("static"),
    "head_view": lambda found: f"{tables.head_ms(found.speed.rows, speed.HEAD_VIEW):.1f}",
    "head_copy": lambda found: f"{tables.head_ms(found.speed.rows, speed.HEAD_COPY):.1f}",
    "cache_gain": _said(_over(DYNAMIC, NONE)),
    "static_eager": _said(_over(STATIC, DYNAMIC)),
    "static_compiled": _said(_over(COMPILED_STATIC, COMPILED_DYNAMIC)),
    "compiled_stock": _said(_over(COMPILED_STATIC, STATIC)),
    "one_row": _said(_over(ONE_ROW, STATIC)),
    "over_generate": _said(_over_generate(ONE_ROW)),
    "bandwidth": lambda found: f"{found.bound.bytes_per_second / 1e9:.0f}",
    "bytes_per_token": lambda found: f"{found.bound.bytes_per_token / 1e6:.0f}",
    "limit": lambda found: f"{found.bound.tokens_per_second:.0f}",
    "fastest": lambda found: _fastest(found).text("{:.0f}"),
    "limit_share": _said(_limit_share),
    "crossover_eager": lambda found: tables.crossover(found.speed.rows, False),
    "kv_per_token": lambda found: f"{found.kv_per_token:,}",
    "kv_static_early": lambda found: f"{found.early_bytes['static'] / 2**20:.1f}",
    "kv_dynamic_early": lambda found: f"{found.early_bytes['dynamic'] / 2**20:.2f}",
}
