"""What `make bench` gave: the last bench of each processor, as tables, and the targets of speed that they meet.

And what `kvbook bench --growth` gave: exponents, and what larger work would take by them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvbook import paths
from kvbook.runs import records
from kvbook.settings import read_yaml
from kvreport.publishing import processors

EXPERIMENT, GROWTH = "bench", "growth"


class Target(NamedTuple):
    """A target of speed: a line of the bench, the target in words, and the bound.

    Its column is what the bound is on: ``ratio``, which must reach it; ``inverse``, the second's time over the first's
    turned over, which must not pass it; ``seconds`` of the first, likewise.
    """

    what: str
    words: str
    bound: float
    column: str = "inverse"


TARGETS = tuple(Target(**one) for one in read_yaml(Path(__file__).with_suffix(".tables.yaml")))


def latest(experiment: str = EXPERIMENT) -> dict[str, records.Run]:
    """Find the bench that was finished last on each processor, among the recorded ones and those of this machine."""
    found = [file.parent for of in (paths.RECORDED_RUNS, paths.RUNS) for file in of.glob(f"{experiment}/*/run.json")]
    runs = [records.load(folder) for folder in found if folder.suffix != ".partial"]
    runs.sort(key=lambda run: run.about["finished"])
    # Processors of one name can be of two kinds, such as the AMD EPYC.
    return dict(sorted({processors.label([run.about["machine"]]): run for run in runs}.items()))


def _ratio(row: Any) -> str:
    if row.repeats == 1:
        return f"{row.ratio:.2f}"
    # Only the ratio to `generate` has an interval; the others have the lowest and the highest of the turns.
    between = ", " if row.against == "generate" else " to "
    return f"{row.ratio:.2f} [{row.lowest:.2f}{between}{row.highest:.2f}]"


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Write a bench for people; above 1 the first is the faster one, and a share is at most 1."""
    def in_ms(seconds: float) -> str:
        return f"{1000 * seconds:.4g}" if pd.notna(seconds) else ""

    return pd.DataFrame({
        "what": rows["what"], "against": rows["against"], "ratio": map(_ratio, rows.itertuples()),
        "runs": rows["repeats"], "ms": rows["seconds"].map(in_ms), "ms, against": rows["against_seconds"].map(in_ms),
    })


def headings(runs: Mapping[str, records.Run]) -> dict[str, str]:
    """Name the benches' processors in words that a narrow column can break."""
    return {name: name.replace("ONEDNN_MAX_CPU_ISA=", "held to ") for name in runs}


def beside(runs: Mapping[str, records.Run]) -> pd.DataFrame:
    """Set several processors' ratios side by side: the newest bench's first, then what only others measured."""
    lines = ["what", "against"]
    columns = {name: table(run.rows).set_index(lines)["ratio"].rename(name) for name, run in runs.items()}
    newest = max(runs, key=lambda name: runs[name].about["finished"])
    found = pd.concat(columns.values(), axis=1)
    first = columns[newest].index
    return found.reindex(first.append(found.index.difference(first, sort=False))).fillna("").reset_index()


def against_targets(runs: Mapping[str, records.Run]) -> pd.DataFrame:
    """Say on each processor which targets are met; empty where its bench did not measure it."""
    met = {name: [_met(target, run.rows) for target in TARGETS] for name, run in runs.items()}
    return pd.DataFrame({"what": [t.what for t in TARGETS], "target": [t.words for t in TARGETS]} | met)


def _met(target: Target, rows: pd.DataFrame) -> str:
    measured = rows[rows["what"] == target.what]
    if measured.empty:
        return ""
    row = measured.iloc[0]
    if target.column == "seconds":
        return f"{row['seconds']:.1f} s: {'met' if row['seconds'] <= target.bound else 'not met'}"
    shown, least = (1 / row["ratio"], 1 / target.bound) if target.column == "inverse" else (row["ratio"], target.bound)
    narrowly = ", narrowly" if row["lowest"] < least <= row["highest"] else ""
    return f"{shown:.2f}: {'met' if row['ratio'] >= least else 'not met'}{narrowly}"


# Of growth.
_PIECE = ["what", "counts"]
# Larger work than any that was measured: which line it continues, to which size.
LARGER = {
    ("kvbook check", "texts"): 10_000, ("chapter 6: drift", "texts"): 10_000,
    ("kvbook scores", "tokens"): 10_000_000, ("numbers of a page", "rows"): 10_000_000,
}


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Take the median over the repeats of each size's seconds and bytes."""
    return rows.groupby([*_PIECE, "size"], sort=False).median().reset_index()


def exponent(sizes: Any, amounts: Any) -> float:
    """Fit the exponent with which an amount grows over the last hundredfold: 1 is in proportion to the size.

    At smaller sizes what is done once, whatever the size, hides the growth.
    """
    last = np.asarray(sizes) >= max(sizes) / 100
    return float(np.polyfit(np.log(np.asarray(sizes)[last]), np.log(np.asarray(amounts)[last]), 1)[0])


def steepest(sizes: Any, amounts: Any) -> float:
    """Return the exponent between the two largest sizes."""
    return exponent(np.asarray(sizes)[-2:], np.asarray(amounts)[-2:])


def growth_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Write each piece's seconds and memory at every size, and the exponents of both."""
    return pd.DataFrame([_line(of, sizes) for of, sizes in medians(rows).groupby(_PIECE, sort=False)])


def _line(of: tuple[str, str], sizes: pd.DataFrame) -> dict[str, Any]:
    what, counts = of
    added = (sizes["n_bytes"] - sizes["n_bytes_before"]) / 1e6
    return {
        # A command as code, or a page would print the two hyphens of an option as a dash.
        "work": f"`{what}`" if what.startswith("kvbook ") else what, "grows with": counts,
        "sizes": " · ".join(f"{size:,}" for size in sizes["size"]),
        "seconds": " · ".join(f"{seconds:.2g}" for seconds in sizes["seconds"]),
        "exponent": f"{exponent(sizes['size'], sizes['seconds']):.2f}",
        "at the end": f"{steepest(sizes['size'], sizes['seconds']):.2f}",
        "MB added": " · ".join(f"{mega:,.0f}" for mega in added),
    }


def larger(rows: pd.DataFrame) -> pd.DataFrame:
    """Extrapolate from the largest size by the steepest exponent, at least in proportion."""
    by_piece = dict(iter(medians(rows).groupby(_PIECE, sort=False)))
    return pd.DataFrame([_continued(*piece, size, by_piece[piece]) for piece, size in LARGER.items()])


def _continued(what: str, counts: str, size: int, sizes: pd.DataFrame) -> dict[str, Any]:
    last = sizes.iloc[-1]
    seconds = last["seconds"] * (size / last["size"]) ** max(1.0, steepest(sizes["size"], sizes["seconds"]))
    added = (last["n_bytes"] - sizes["n_bytes"].iloc[-2]) / (last["size"] - sizes["size"].iloc[-2])
    n_bytes = last["n_bytes"] + max(0.0, added) * (size - last["size"])
    return {
        "work": f"{what}, {size:,} {counts}", "minutes": f"{seconds / 60:.2g}",
        "GB": f"{n_bytes / 1e9:.2g}", "from": f"{last['size']:,.0f} {counts}",
    }
