"""How fast this book itself is: the last bench of each processor."""

from kvreport.publishing import processors
from kvreport.running import bench_table as bench
from kvreport.site.context import Context
from kvreport.site.overlay import table_directive


def markdown(_context: Context) -> str:
    """Write the table, or say that there is none."""
    runs = bench.latest()
    if not runs:
        return "No bench has been run on this copy of the book: `make bench` measures one, and the next build shows it."
    settings = next(iter(runs.values())).about["settings"]
    made = "; ".join(
        f"{processors.device(run.about['machine'])}, torch {run.about['machine']['torch']}, run `{run.hash}`"
        for run in runs.values()
    )
    caption = (
        "Ratios of `make bench`, each of two pieces of work that took turns: median of the turns, and in brackets the lowest "
        "and the highest, or against `generate` a 95 % interval; above 1 the first is the faster. "
        f"Drift on `{settings['model']}` ({settings['weights']} weights), "
        f"statistics and decoding in the full-size architecture of `{settings['shape']}` with random weights. {made}."
    )
    ratios = bench.beside(runs).rename(columns={name: bench.heading(run) for name, run in runs.items()})
    return table_directive({"caption": caption, "name": "tab-speed", "csv": ratios.to_csv(index=False)})
