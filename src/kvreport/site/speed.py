"""How fast this book itself is: the last bench of each processor, and the targets that they meet."""

from kvreport.benchmarks import results
from kvreport.publishing import processors
from kvreport.site.overlay import csv_table


def speed() -> str:
    """Write the table of ratios, or say that there is none."""
    runs = results.latest()
    if not runs:
        return "No bench has been run on this copy of the book: `make bench` measures one, and the next build shows it."
    settings = next(iter(runs.values())).about["settings"]
    made = "; ".join(
        f"{processors.device(run.about['machine'])}, torch {run.about['machine']['torch']}, run `{run.hash}`"
        for run in runs.values()
    )
    caption = (
        "Ratios of `make bench`, each of two pieces of work that took turns: median of the turns, and in brackets the "
        "lowest and the highest, or against `generate` a 95 % interval; above 1 the first is the faster. "
        f"Drift on `{settings['model']}` ({settings['weights']} weights), "
        f"statistics and decoding in the full-size architecture of `{settings['shape']}` with random weights. {made}."
    )
    ratios = results.beside(runs).rename(columns=results.headings(runs))
    return csv_table("tab-speed", caption, [ratios.columns, *ratios.to_numpy()])


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
    met = results.against_targets(runs).rename(columns=results.headings(runs))
    return csv_table("tab-targets", caption, [met.columns, *met.to_numpy()])
