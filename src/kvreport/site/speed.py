"""How fast this book itself is: the table of the last bench."""

from kvreport.running import bench_table as bench
from kvreport.site.context import Context
from kvreport.site.overlay import table_directive


def markdown(_context: Context) -> str:
    """Write the table, or say that there is none."""
    run = bench.latest()
    if run is None:
        return "No bench has been run on this copy of the book: `make bench` measures one, and the next build shows it."
    settings, machine = run.about["settings"], run.about["machine"]
    caption = (
        f"Ratios of `make bench`, each of two pieces of work that took turns: the median of the turns, and in brackets the "
        f"lowest and the highest; above 1 the first is the faster. Drift on `{settings['model']}` "
        f"({settings['weights']} weights, {settings['n_samples']} texts), statistics and decoding in the true shape of "
        f"`{settings['shape']}` with random weights ({settings['n_new_tokens']} tokens, {settings['dtype']}); "
        f"{machine['device_name']}, torch {machine['torch']}, run `{run.hash}`."
    )
    csv = bench.table(run.rows).to_csv(index=False)
    return table_directive({"caption": caption, "name": "tab-speed", "csv": csv})
