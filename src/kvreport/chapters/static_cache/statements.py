"""The numbers and statements of the chapter on static and dynamic caches."""

from collections.abc import Callable

import pandas as pd

from kvbook.measuring.estimates import Estimate, two_digits
from kvreport.chapters.static_cache import (
    beside_llama_cpp,
    claims,
    results,
    speed,
    step_budget,
    step_tables,
    tables,
    weights_or_cache,
)
from kvreport.chapters.static_cache.results import Results
from kvreport.publishing.judging import Measured, fact, facts
from kvreport.publishing.rules import Bound, Quantity, every
from kvreport.publishing.statements import Statement
from kvreport.publishing.wording import between

EXPERIMENTS = results.EXPERIMENTS
NONE, DYNAMIC, STATIC = ((cache, False, False, False) for cache in tables.KINDS)
COMPILED_DYNAMIC, COMPILED_STATIC = ((cache, True, False, False) for cache in ("dynamic", "static"))
ONE_ROW, LARGE_PAGES = (("static", True, True, pages) for pages in (False, True))

_SPEEDS = Quantity("ratio of two ways' tokens a second", "repeat")
_BYTES = Quantity("bytes of the static cache over those of the dynamic one", form="{:.1f}")
_AS_FAST = Bound(1, "arithmetic", "as fast")
_NEARLY = Bound(1.15, "ours", "nearly as fast", "ratio")
_HALF_MORE = Bound(1.5, "ours", "half as fast again", "ratio")

_SHARE_OF_STEP = Quantity("share of a profiled step that its kernels take", "repeat", "pages", "{:.0%}")
_SAVED = Quantity("share of what large pages save that the kernels save", "repeat", form="{:.0%}")
_LONGEST = Quantity("a step at the longest context over one at the shortest", series="dtype", form="{:.1f}")
_TWICE = Bound(2, "ours", "twice as long", "ratio")
_SHARED = Quantity("share of the text before static and dynamic differ", form="{:.0%}")
_ALL = Bound(1, "arithmetic", "all of it")
_MOST = Bound(0.5, "ours", "more than half", "share")

Measure = Callable[[Results], list[Measured]]


def _over(way: tables.Way, against: tables.Way) -> Measure:
    """Measure a way's tokens a second over another's, both in the loop; a device or a model can leave a way out."""

    def measure(found: Results) -> list[Measured]:
        if found.speed is None or not {way, against} <= set(found.speeds.per_repeat):
            return []
        return claims.of_repeats(claims.over(found, way, against))

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
    return [one for cache in ("dynamic", "static") for one in claims.of_repeats(each[cache] / each["none"], cache)]


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
    return claims.of_repeats(per_second / found.bound.tokens_per_second)


def _kernel_seconds(found: Results, pages: str) -> pd.DataFrame:
    """Give seconds of a step's parts by repeat, kernels together."""
    rows = found.budget.rows
    parts = rows[rows["pages"] == pages].pivot_table(index="repeat", columns="part", values="seconds")
    return parts.assign(kernels=parts[step_budget.LAYERS] + parts[step_budget.HEAD])


def _share_of_kernels(found: Results, pages: str) -> Estimate:
    parts = _kernel_seconds(found, pages)
    return tables.median(parts["kernels"] / parts[step_budget.PROFILED])


def _kernels(found: Results) -> list[Measured]:
    if found.budget is None:
        return []
    n_repeats = found.budget.rows["repeat"].nunique()
    return [
        Measured(pages, _share_of_kernels(found, pages), n_repeats) for pages in found.budget.rows["pages"].unique()
    ]


def _saved_in_kernels(found: Results) -> list[Measured]:
    if found.budget is None:
        return []
    saved = _kernel_seconds(found, "usual") - _kernel_seconds(found, "large")
    return claims.of_repeats(saved["kernels"] / saved[step_budget.PROFILED])


def _pages_in_budget(found: Results) -> list[Measured]:
    """Measure a step's time on usual pages over that on large ones, in the run that takes steps apart."""
    if found.budget is None:
        return []
    usual, large = (_kernel_seconds(found, pages)[step_budget.STEP] for pages in ("usual", "large"))
    return claims.of_repeats(usual / large)


def _between_runs(found: Results) -> list[Measured]:
    """Measure how far the intervals of the gain from large pages lie apart in the two runs; below 0 they overlap."""
    runs = (_over(LARGE_PAGES, ONE_ROW)(found), _pages_in_budget(found))
    if not all(runs):
        return []
    low, high = sorted((one.estimate for (one,) in runs), key=lambda estimate: estimate.value)
    return [fact(high.low - low.high)]


def _over_llama_cpp(found: Results) -> list[Measured]:
    """Measure llama.cpp's seconds of a step over ours, by turns."""
    if found.beside is None:
        return []
    seconds = found.beside.rows.pivot(index="repeat", columns="program", values="step_s")
    return claims.of_repeats(seconds[beside_llama_cpp.THEIRS] / seconds[beside_llama_cpp.OURS])


def _longest(batch: int) -> Measure:
    """Measure how much longer a step takes at the longest context than at the shortest, in each dtype."""

    def measure(found: Results) -> list[Measured]:
        if found.batches is None:
            return []
        some = found.contexts[found.contexts["batch"] == batch].sort_values("context")
        return facts((dtype, of["ms"].iloc[-1] / of["ms"].iloc[0]) for dtype, of in some.groupby("dtype", sort=False))

    return measure


def _doubled(found: Results, batch: int) -> str:
    at = step_tables.doubled_at(found.contexts, "bfloat16", batch)
    return f"at about {two_digits(at):,.0f} tokens" if at < float("inf") else "at no length measured"


STATEMENTS: dict[str, Statement[Results]] = {
    "cache-pays": Statement(every(_SPEEDS, "above", _AS_FAST), _over(DYNAMIC, NONE), headline=True),
    "static-alone": Statement(every(_SPEEDS, "inside", _NEARLY), _over(STATIC, DYNAMIC), headline=True),
    "static-compiled": Statement(
        every(_SPEEDS, "inside", _HALF_MORE), _over(COMPILED_STATIC, COMPILED_DYNAMIC), "this processor"
    ),
    "one-row-pays": Statement(every(_SPEEDS, "above", _HALF_MORE), _over(ONE_ROW, STATIC), "this processor"),
    "large-pages-pay": Statement(every(_SPEEDS, "above", _AS_FAST), _over(LARGE_PAGES, ONE_ROW), "this processor"),
    "runs-disagree-on-pages": Statement(
        every(
            Quantity("distance between two runs' intervals of the gain from large pages"), "above",
            Bound(0, "arithmetic", "apart"),
        ),
        _between_runs, "this processor", on="Intel",
    ),
    "faster-than-llama-cpp": Statement(
        every(Quantity("llama.cpp's time of a step over ours", "repeat"), "above", _AS_FAST),
        _over_llama_cpp, "this processor"
    ),
    "faster-than-generate": Statement(
        every(_SPEEDS, "above", _HALF_MORE), _over_generate(LARGE_PAGES), "this processor"
    ),
    "kernels-take-most": Statement(
        every(_SHARE_OF_STEP, "above", _MOST), _kernels, "this processor"
    ),
    "large-pages-save-kernels": Statement(
        every(_SAVED, "above", _MOST), _saved_in_kernels, "this processor"
    ),
    "cache-outgrows-weights": Statement(
        every(_LONGEST, "above", _TWICE), _longest(max(weights_or_cache.BATCHES)),
        "this processor",
    ),
    "one-sequence-hardly-grows": Statement(
        every(_LONGEST, "below", _TWICE), _longest(1), "this processor", on="Intel"
    ),
    "one-sequence-in-fp16-grows-on-amd": Statement(
        every(_LONGEST, "above", _TWICE),
        lambda found: [one for one in _longest(1)(found) if one.series == "float16"], "this processor", on="AMD",
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
        return f"{of.value:.1f}" if cache == "none" else of.in_two_digits().text("{:.0f}")

    return give


def _fastest(found: Results) -> Estimate:
    return tables.median(found.speeds.per_repeat[found.speeds.fastest])


def _gains() -> dict[str, float]:
    return tables.published_gains()


def _ties(found: Results) -> str:
    if found.texts is None:
        return "not run"
    tied = found.partings["tied"].dropna()
    return f"{int(tied.sum())} of {len(tied)}"


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
    "head_view": lambda found: f"{tables.head_ms(found.speed.rows, speed.HEAD_VIEW):.2g}",
    "head_copy": lambda found: f"{tables.head_ms(found.speed.rows, speed.HEAD_COPY):.2g}",
    "cache_gain": _said(_over(DYNAMIC, NONE)),
    "static_eager": _said(_over(STATIC, DYNAMIC)),
    "static_compiled": _said(_over(COMPILED_STATIC, COMPILED_DYNAMIC)),
    "compiled_stock": _said(_over(COMPILED_STATIC, STATIC)),
    "one_row": _said(_over(ONE_ROW, STATIC)),
    "n_pages": lambda found: f"{found.memory.rows['weights_bytes'].max() / 4096:,.0f}",
    "large_pages": _said(_over(LARGE_PAGES, ONE_ROW)),
    "large_pages_budget": _said(_pages_in_budget),
    "over_llama_cpp": _said(_over_llama_cpp),
    "over_generate": _said(_over_generate(LARGE_PAGES)),
    "kernels_usual": lambda found: _share_of_kernels(found, "usual").text("{:.0%}"),
    "kernels_large": lambda found: _share_of_kernels(found, "large").text("{:.0%}"),
    "longest_context": lambda found: f"{found.contexts['context'].max():,}",
    "cache_is_weights": lambda found: (
        f"{step_tables.as_many_bytes_at(found.contexts, 'bfloat16', max(weights_or_cache.BATCHES)):,.0f}"
    ),
    "cache_is_weights_alone": lambda found: f"{step_tables.as_many_bytes_at(found.contexts, 'bfloat16', 1):,.0f}",
    "doubled_batch": lambda found: _doubled(found, max(weights_or_cache.BATCHES)),
    "n_timed_steps": lambda found: str(found.batches.rows["step"].nunique()),
    "batch": lambda _: str(max(weights_or_cache.BATCHES)),
    "bandwidth": lambda found: f"{found.bound.bytes_per_second / 1e9:.0f}",
    "bytes_per_token": lambda found: f"{found.bound.bytes_per_token / 1e6:.0f}",
    "limit": lambda found: f"{found.bound.tokens_per_second:.0f}",
    "fastest": lambda found: _fastest(found).text("{:.0f}"),
    "limit_share": _said(_limit_share),
    "ties": _ties,
    "crossover_eager": lambda found: tables.crossover(found.speed.rows, False),
    "kv_per_token": lambda found: f"{found.kv_per_token:,}",
    "kv_static_early": lambda found: f"{found.early_bytes['static'] / 2**20:.1f}",
    "kv_dynamic_early": lambda found: f"{found.early_bytes['dynamic'] / 2**20:.2f}",
}
