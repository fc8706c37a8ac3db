"""How fast this book itself is: the last bench of each processor, the targets that they meet, and how work grows."""

from kvbook.runs.records import Run
from kvreport.benchmarks import results
from kvreport.publishing import processors
from kvreport.site.overlay import csv_table


def _made(run: Run) -> str:
    return f"{processors.device(run.about['machine'])}, torch {run.about['machine']['torch']}, run `{run.hash}`"


def speed() -> str:
    """Write the table of ratios, or say that there is none."""
    runs = results.latest()
    if not runs:
        return "No bench has been run on this copy of the book: `make bench` measures one, and the next build shows it."
    settings = next(iter(runs.values())).about["settings"]
    made = "; ".join(map(_made, runs.values()))
    caption = (
        "Ratios of `make bench`, each of two pieces of work that took turns: median of the turns, and in brackets the "
        "lowest and the highest, or against `generate` a 95 % interval; above 1 the first is the faster, or takes "
        "less memory. "
        f"Drift on `{settings['model']}` ({settings['weights']} weights), "
        f"statistics and decoding in the full-size architecture of `{settings['shape']}` with random weights. {made}."
    )
    return csv_table("tab-speed", caption, results.beside(runs).rename(columns=results.headings(runs)))


def targets() -> str:
    """Write the table of targets, a column for each processor; nothing where no bench was run."""
    runs = results.latest()
    if not runs:
        return ""
    caption = (
        "Targets of speed, and what the medians of the benches above say of them. Narrowly: the bracket holds "
        "the target. A cell is empty where that bench did not measure it. "
        "Held to: in matrix products oneDNN took no later instructions than those, by `ONEDNN_MAX_CPU_ISA`."
    )
    return csv_table("tab-targets", caption, results.against_targets(runs).rename(columns=results.headings(runs)))


def growth() -> str:
    """Write how time and memory grow with size, and what larger work would take, on the processor measured last."""
    runs = results.latest(results.GROWTH)
    if not runs:
        return "Growth has not been measured on this copy of the book: `make bench BENCH=--growth` does it."
    run = max(runs.values(), key=lambda run: run.about["finished"])
    repeats = run.about["settings"]["n_repeats"]
    measured = (
        "Seconds and memory at sizes ten times apart, medians of "
        f"{repeats} repeats, each in a process of its own; imports and inputs are not timed. The exponent is fitted to "
        f"the last hundredfold, *at the end* to the last tenfold; 1 is in proportion. MB are what the work held beyond "
        f"what making its inputs had held, which may be nothing. {_made(run)}."
    )
    extrapolated = (
        "What larger work would take: extrapolated from the largest size of the table above by the exponent at its "
        "end, or in proportion where that is below 1. Not measured."
    )
    shown = csv_table("tab-growth", measured, results.growth_table(run.rows))
    return f"{shown}\n\n{csv_table('tab-larger-work', extrapolated, results.larger(run.rows))}"
