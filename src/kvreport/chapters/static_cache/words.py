"""What the chapter on static and dynamic caches says in words: captions, and the numbers of its prose."""

import pandas as pd

from kvbook.measuring import decoding, estimates
from kvreport.chapters.static_cache import speed, tables
from kvreport.chapters.static_cache.results import Results, Speeds
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, between

_ONE_ROW = ("static", True, True)
# A growth over a hundred tokens is not read off fewer steps than half as many.
_SHORT = 50
_EAGER = ("static", False, False)


def _fastest(table: pd.DataFrame) -> tuple[str, bool, bool]:
    """Choose the way of the loop that is compiled as well as the run could: the one-row form, where it was run."""
    loop = table[table["engine"] == speed.LOOP]
    return _ONE_ROW if (loop["one_row"] == 1).any() else ("static", True, False)


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    run, texts = results.speed, results.texts
    asked = run.about["settings"]
    where = f"{wording.models(run)}, {DTYPES[asked['dtype']]}; {wording.machine(run)}"
    timed = f"{where}; {asked['n_new_tokens']} new tokens, {asked['n_repeats']} runs of each way by turns"
    size = decoding.together(run.about["models"][0]["layers"])
    layers = "one layer, used" if size == 1 else f"{size} neighbouring layers (one without a cache), one graph"
    unit = f"{layers} for all" if asked["scope"] == "layer" else "the whole forward pass"
    repeats = asked["n_repeats"]
    ends = "from the lowest to the highest of" if repeats < estimates.FEWEST_UNITS else "95 % interval over"
    spread = f"median, {ends} {repeats} run{'s' * (repeats > 1)}"
    written = f"{wording.models(texts)}; {wording.machine(texts)}; one prompt, greedy, {asked['n_new_tokens']} tokens"
    found = findings(results)
    said = {
        "fig-static-published": (
            f"{found['fig-static-published']} Tokens a second: the document's (hollow) and this run's (filled). Where a static "
            f"cache's forward pass was not compiled, that is said. {timed}; without a cache one call, not warmed up.",
            "A line a device with three markers, no cache, dynamic and static.",
        ),
        "fig-static-grid": (
            f"{found['fig-static-grid']} Tokens a second ({spread}) by kind of cache and by compilation of {unit}. The loop's "
            "are of decoding alone, those of `generate` of the whole call. Dashed: what the bandwidth of memory allows. "
            f"{timed}; without a cache at some lengths only, and one whole call.",
            "A list of ways, eager and compiled, against tokens a second, with a dashed line at the limit of memory.",
        ),
        "tab-static-grid": (
            f"The figure's numbers ({spread}), the share of the memory limit, and the seconds of the first two steps, compilation "
            f"included. {timed}.",
            "",
        ),
        "tab-static-phases": (
            "Time of the first decode step (with its compilation), of the prefill up to the first token, and of a decode step "
            f"behind the warm-up: median [5 %, 95 % of all]. {timed}.",
            "",
        ),
        "fig-static-length": (
            f"{found['fig-static-length']} Time of a decode step against the number of tokens, by kind of cache and by "
            f"compilation: median over runs, with a cache also over 15 neighbouring steps. {timed}.",
            "Milliseconds on a logarithmic axis against tokens, a line a kind of cache, eager and compiled.",
        ),
        "tab-static-shapes": (
            "What is fed and what is held in the document's five steps: shape of the ids, shape of the first layer's keys, their "
            f"`len`, the tokens cached, and the size of all keys and values. {where}.",
            "",
        ),
        "tab-static-memory": (
            "Bytes of keys and values as counted and as computed from the configuration, and the peak while a prompt and four "
            "further tokens were run, the counter reset before; on a CPU that is the process's resident memory, which does not "
            f"resolve so few bytes of keys and values, on a GPU what torch allocated. {where}.",
            "",
        ),
        "tab-static-partings": (
            "First token at which the texts of two kinds of cache differ, and the margin between first and second choice "
            f"there. {written}.",
            "",
        ),
        "tab-static-texts": (
            f"The texts in {DTYPES[asked['dtype']]}, of eager steps, cut around the first token that differs, or at the end where "
            f"none does. {written}.",
            "",
        ),
        "tab-claims-notebook-static": (
            "Claims of the document, in our words and its own, the rule by which each is judged, and what this run says of them. "
            f"{wording.VERDICTS} {timed}.",
            "",
        ),
    }
    return wording.published(said)


def findings(results: Results) -> dict[str, str]:
    """Say in one sentence what each figure shows, by the figure's name."""
    none, dynamic, static = (results.growths[cache] for cache in tables.KINDS)
    return {
        "fig-static-published": _published(results.beside_published),
        "fig-static-grid": _grid(results.speeds),
        "fig-static-length": "The text is too short to show how the time of a step changes with its length."
        if results.speed.rows["step"].max() < _SHORT
        else f"Over a hundred tokens the time of an eager step changes by {none.text('{:+.0%}')} without a cache, "
        f"by {dynamic.text('{:+.1%}')} with the dynamic one and by {static.text('{:+.1%}')} with the static one.",
    }


def _published(beside: pd.DataFrame) -> str:
    speeds = beside.pivot(index=["published", "device"], columns="cache", values="tokens_per_s")
    over = (speeds["static"] / speeds["dynamic"]).rename("over").reset_index()
    over = over.merge(beside.loc[beside["cache"] == "static", ["device", "skipped"]], on="device")

    def told(rows: pd.DataFrame) -> str:
        return " and ".join(
            f"{between(some['over'], '{:.2f}')} times ({'not ' if skipped else ''}compiled)"
            for skipped, some in rows.groupby("skipped")
        )

    here, theirs = (told(over[over["published"] == published]) for published in (False, True))
    return f"With the static cache `generate` is {here} as fast as with the dynamic one here, and {theirs} in the document."


def _grid(speeds: Speeds) -> str:
    run, best = set(speeds.per_repeat), _fastest(speeds.table)

    last = (
        "compiled and written for one row, {} times the stock eager ones"
        if best[2]
        else "compiled, {} times the eager ones"
    )
    compared = (
        ("eager, the static loop makes {} times the dynamic one's tokens a second", _EAGER, ("dynamic", False, False)),
        ("compiled, {} times the dynamic one's", ("static", True, False), ("dynamic", True, False)),
        (last, best, _EAGER),
    )
    # A device or a model can leave a way out.
    said = [what.format(tables.ratio(speeds.per_repeat, *ways).text()) for what, *ways in compared if set(ways) <= run]
    return f"{'; '.join(said).capitalize()}."


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    rows, repeats, table = results.speed.rows, results.speeds.per_repeat, results.speeds.table
    memory, bound, best = results.memory.rows, results.bound, _fastest(table)
    generate, fastest = _generate(table), _loop(table)[best]
    graphs = int(rows[(rows["engine"] == speed.GENERATE) & (rows["cache"] == "static")]["graphs"].max())
    per_token = int(memory["predicted_bytes"].max() / memory.loc[memory["predicted_bytes"].idxmax(), "n_tokens"])
    parted = results.partings
    first = parted[parted["step"].notna()]
    early = results.shapes.rows.groupby("cache")["kv_bytes"].last()
    gains = tables.published_gains()
    return {
        "published_equal": " and ".join(device for device, gain in gains.items() if gain == 1) or "none",
        "published_ahead": between([gain - 1 for gain in gains.values() if gain != 1], "{:.0%}"),
        "published_spread": f"{tables.published_spread():.0%}",
        "generate_none": generate["none"].text("{:.1f}"),
        "generate_dynamic": generate["dynamic"].text("{:.1f}"),
        "generate_static": generate["static"].text("{:.1f}"),
        "generate_graphs": str(graphs),
        "head_found": _head_found(rows, generate["none"]),
        "loop_fastest": fastest.text("{:.0f}"),
        "cache_gain": tables.ratio(repeats, ("dynamic", False, False), ("none", False, False)).text(),
        "static_eager": tables.ratio(repeats, ("static", False, False), ("dynamic", False, False)).text(),
        "static_compiled": tables.ratio(repeats, ("static", True, False), ("dynamic", True, False)).text(),
        "compiled_stock": tables.ratio(repeats, ("static", True, False), ("static", False, False)).text(),
        "over_generate": tables.against_generate(rows, best).text(),
        "stock_over_generate": tables.against_generate(rows, ("static", True, False)).text(),
        "bandwidth": f"{bound.bytes_per_second / 1e9:.0f}",
        "bytes_per_token": f"{bound.bytes_per_token / 1e6:.0f}",
        "limit": f"{bound.tokens_per_second:.0f}",
        "limit_share": f"{fastest.value / bound.tokens_per_second:.2f}",
        "crossover_eager": tables.crossover(rows, False),
        "crossover_compiled": tables.crossover(rows, True),
        "load": f"{tables.load_seconds(rows):.1f}",
        "kv_per_token": f"{per_token:,}",
        "kv_static_early": f"{early['static'] / 2**20:.1f}",
        "kv_dynamic_early": f"{early['dynamic'] / 2**20:.2f}",
        "partings": f"{len(first)} of {len(parted)}",
        "parting_margins": "; the margins there are "
        + ", ".join(f"{row.margin:.2g} ({DTYPES[row.dtype]})" for row in first.itertuples())
        if len(first)
        else "",
        **recorded_numbers(results.recorded),
    }


def _generate(table: pd.DataFrame) -> pd.Series:
    """Give the estimates of `generate` by cache."""
    return table[table["engine"] == speed.GENERATE].set_index("cache")["speed"]


def _loop(table: pd.DataFrame) -> dict[tables.Way, estimates.Estimate]:
    """Give the estimates of the loop by way."""
    loop = table[table["engine"] == speed.LOOP]
    return {(row.cache, row.compiled, row.one_row): row.speed for row in loop.itertuples()}


def _head_found(rows: pd.DataFrame, uncached: estimates.Estimate) -> str:
    """Say what the head takes on the last row of many, as it is handed over and copied first."""
    head = rows[rows["phase"] == speed.HEAD].groupby("engine")["seconds"].median() * 1e3
    if head.empty:
        return "a time that this run did not take"
    view, copy = head[speed.HEAD_VIEW], head[speed.HEAD_COPY]
    return f"{view:.1f} ms of {1e3 / uncached.value:.0f} ms a token, and {copy:.1f} ms when the row is copied first"


def recorded_numbers(speeds: Speeds) -> dict[str, str]:
    """Write what the prose says of a recorded run with as many tokens as the document's."""
    run, best, generate = speeds.run, _fastest(speeds.table), _generate(speeds.table)
    return {
        "recorded_tokens": str(run.about["settings"]["n_new_tokens"]),
        "recorded_made": f"{wording.models(run)}; {wording.machine(run)}; run {run.hash}",
        "recorded_generate": ", ".join(f"{generate[cache].text('{:.1f}')} ({cache})" for cache in generate.index),
        "recorded_fastest": _loop(speeds.table)[best].text("{:.0f}"),
        "recorded_one_row": tables.ratio(speeds.per_repeat, best, _EAGER).text(),
        "recorded_over_generate": tables.against_generate(run.rows, best).text(),
    }
