"""Tables of the chapter on static and dynamic caches, as its page shows them."""

import pandas as pd

from kvbook.measuring import estimates
from kvreport.chapters.static_cache import measures, rows
from kvreport.publishing import documents
from kvreport.publishing.found import Found
from kvreport.publishing.wording import estimated

# The parts of a step, in the order of the page, and their columns.
READING, REST_OF_KERNELS = "reading weights and cache, at the memory limit", "the rest of the kernels"
PARTS = {
    READING: READING, REST_OF_KERNELS: REST_OF_KERNELS, "calls of compiled graphs": rows.CALLS,
    "Python and small operations": "around", "a step, profiled": rows.PROFILED, "a step, not profiled": rows.STEP,
}


def speeds(found: Found) -> pd.DataFrame:
    """Return tokens a second of every way."""
    repeats = found["speeds"].groupby([*rows.WAY, "way"], sort=False).size().rename("repeats").reset_index()
    first = found["first steps"].rename(columns={"all_s": "first_s"})[["way", "first_s"]]
    table = repeats.merge(measures.SPEED.table(found, "speed"), on="way").merge(first, on="way", how="left")
    return table[[*rows.WAY, "speed", "repeats", "first_s", "way"]]


def limit(found: Found) -> float:
    """Return the tokens a second that memory allows."""
    return float(found["limit"]["tokens_per_s"].iloc[0])


def steps(found: Found) -> pd.DataFrame:
    """Return the decode steps of every way of the loop, as they were recorded."""
    return found["steps"].drop(columns="way")


def gains(found: Found) -> pd.DataFrame:
    """Compare every way of the loop with the eager one with a dynamic cache, the slowest first."""
    table = measures.GAIN.table(found, "gain")
    return table.sort_values("gain", key=lambda column: column.map(lambda one: one.value), ignore_index=True)


def beside_published(found: Found) -> pd.DataFrame:
    """Set this run's `generate` beside the document's rows, under a name for this machine and its threads."""
    document, machine = documents.published(rows.DOCUMENT), found.runs["static_speed"].about["machine"]
    count = machine["threads"]
    threads = f", {count} thread{'s' * (count != 1)}" if machine["device"] == "cpu" else ""
    theirs = pd.DataFrame(document["speeds"])[["device", "cache", "tokens_per_s"]].assign(published=True)
    theirs["skipped"] = theirs["device"].isin(document["compilation_skipped"])
    ours = speeds(found).query("engine == @rows.GENERATE")
    ours = ours.assign(
        device=f"ours: {machine['device'].upper()}{threads}", tokens_per_s=ours["speed"].map(lambda one: one.value),
        published=False, skipped=ours["compiled"] == 0,
    )
    table = pd.concat([theirs, ours[list(theirs)]], ignore_index=True)
    return table.assign(skipped=table["skipped"] & (table["cache"] == "static"))


def budget(found: Found) -> pd.DataFrame:
    """Take a step's milliseconds apart, by pages of memory: medians over repeats."""
    reading, step = 1e3 / limit(found), found["step"]
    step = step.assign(**{READING: reading, REST_OF_KERNELS: step["kernels"] - reading})
    medians = {
        pages: [estimates.median_of(of[column].to_numpy()) for column in PARTS.values()]
        for pages, of in step.groupby("pages", sort=False)
    }
    return pd.DataFrame({"part": list(PARTS), **medians})


def budget_table(found: Found) -> pd.DataFrame:
    """Write `budget` for a page."""
    table = budget(found).set_index("part").map(lambda one: estimated(one, "{:.1f}"))
    return table.add_suffix(" pages, ms").reset_index()


def phases_table(timed: pd.DataFrame) -> pd.DataFrame:
    """Write the times of every phase of the loop, apart: of a prefill and a step the median and 5 % to 95 % of all."""
    table = []
    for way, some in timed[timed["engine"] == rows.LOOP].groupby("way", sort=False):
        first = some[some["phase"] == rows.COMPILE].sort_values("step")["seconds"].iloc[0]
        row = {"way": way, "first step, s": f"{first:.2f}"}
        for phase, column in ((rows.PREFILL, "prefill, ms"), (rows.DECODE, "decode step, ms")):
            ms = 1e3 * some[some["phase"] == phase]["seconds"]
            row[column] = estimates.Estimate(*ms.quantile([0.5, 0.05, 0.95]), "range").text("{:.1f}") if len(ms) else ""
        table.append(row)
    return pd.DataFrame(table)


def shapes_table(shapes: pd.DataFrame) -> pd.DataFrame:
    """Write the shapes of every step for a page, from rows of ``static_shapes``."""
    return pd.DataFrame({
        "cache": shapes["cache"], "step": shapes["step"], "fed": shapes["fed"], "keys": shapes["keys_shape"].fillna(""),
        "len(keys)": shapes["first_dimension"].map("{:.0f}".format, na_action="ignore").fillna(""),
        "cached": shapes["cached_tokens"], "KV, KiB": (shapes["kv_bytes"] / 1024).map("{:,.0f}".format),
    })


def memory_table(memory: pd.DataFrame) -> pd.DataFrame:
    """Write bytes in MiB beside what the configuration predicts, from rows of ``static_memory``."""
    memory = memory.assign(over_before=memory["peak_bytes"] - memory["before_bytes"])
    in_bytes = {
        "KV, MiB": "kv_bytes", "KV predicted, MiB": "predicted_bytes", "weights, MiB": "weights_bytes",
        "peak, MiB": "peak_bytes", "peak over before, MiB": "over_before",
    }
    mib = {name: memory[column] / 2**20 for name, column in in_bytes.items()}
    return pd.DataFrame({"cache": memory["cache"], "tokens": memory["n_tokens"], **mib})
