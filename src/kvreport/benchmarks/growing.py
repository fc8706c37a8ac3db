"""What `kvbook bench --growth` gave: exponents, and what larger work would take by them."""

from typing import Any

import numpy as np
import pandas as pd

EXPERIMENT = "growth"
_PIECE = ["what", "counts"]


# Larger work than any that was measured: which line it continues, to which size.
LARGER = {
    ("kvbook check", "texts"): 10_000, ("chapter 6: drift", "texts"): 10_000,
    ("kvbook scores", "tokens"): 10_000_000, ("numbers of a page", "rows"): 10_000_000,
}


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Give each size's seconds and bytes, medians over the repeats."""
    return rows.groupby([*_PIECE, "size"], sort=False).median().reset_index()


def exponent(sizes: Any, amounts: Any) -> float:
    """Fit the exponent with which an amount grows over the last hundredfold: 1 is in proportion to the size.

    At smaller sizes what is done once, whatever the size, hides the growth.
    """
    last = np.asarray(sizes) >= max(sizes) / 100
    return float(np.polyfit(np.log(np.asarray(sizes)[last]), np.log(np.asarray(amounts)[last]), 1)[0])


def steepest(sizes: Any, amounts: Any) -> float:
    """Give the exponent between the two largest sizes."""
    return exponent(np.asarray(sizes)[-2:], np.asarray(amounts)[-2:])


def table(rows: pd.DataFrame) -> pd.DataFrame:
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
