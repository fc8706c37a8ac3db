"""The tables of the chapter on whether the difference matters, as a reader sees them, and how numbers are written in it."""

import numpy as np
import pandas as pd

from kvbook.measuring.estimates import Estimate, two_digits
from kvreport.chapters.does_it_matter import first_divergence, variants
from kvreport.publishing.wording import DTYPES, power_of_ten


def spread(estimate: Estimate) -> str:
    """Write a small estimate and half its interval, as (1.7 ± 0.2) × 10⁻⁴; a skew one or a range, as 1.4 [0.0, 4.1] × 10⁻⁷."""
    if estimate.value == 0:
        return "0"
    exponent = int(np.floor(np.log10(abs(estimate.value))))
    value, low, high = (number / 10.0**exponent for number in (estimate.value, estimate.low, estimate.high))
    power = f" × {power_of_ten(10.0**exponent, 0)[4:]}" if exponent else ""
    below, above = value - low, high - value
    skew = max(below, above) > 1.5 * min(below, above) and round(max(below, above), 1) > 0.1
    if skew or estimate.kind == "range":
        return Estimate(value, low, high, estimate.kind).text("{:.1f}") + power
    return f"({value:.1f} ± {(high - low) / 2:.1f}){power}"


def _percent(estimate: Estimate) -> str:
    """Write a share in per cent with its interval, for a column whose header says so."""
    return _times(estimate, 100).text("{:.1f}")


def _small_percent(estimate: Estimate) -> str:
    """Write a share as `_percent` does, or one below its last digit as `spread` does."""
    return _percent(estimate) if estimate.value >= 1e-3 else spread(_times(estimate, 100))


def _times(estimate: Estimate, factor: float, less: float = 0) -> Estimate:
    ends = (factor * (end - less) for end in (estimate.value, estimate.low, estimate.high))
    return Estimate(*ends, estimate.kind)


def _small(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else power_of_ten(value, 0)


def tokens(count: float) -> str:
    """Write a number of tokens to two significant digits."""
    return "never" if np.isinf(count) else f"{two_digits(count):,.0f}"


def axes_shown(axes: pd.DataFrame) -> pd.DataFrame:
    """Lay the middle of the distributions out for a reader: a row a change, three columns a dtype, all cells text."""
    return _by_dtype(
        axes,
        {
            "divergence": lambda row: spread(row.kl),
            "same top-1 (%)": lambda row: _percent(row.same_top),
            "perplexity (%)": lambda row: change(row.perplexity_ratio),
        },
    )


def tails_shown(axes: pd.DataFrame) -> pd.DataFrame:
    """Lay the tails and the other decisions out for a reader: a row a change, three columns a dtype, all cells text."""
    return _by_dtype(
        axes,
        {
            "99 % below": lambda row: spread(row.kl_99),
            "true token (points)": lambda row: _small(100 * row.rms_delta_p.value),
            "same decision (%)": lambda row: _percent(row.same_decision),
        },
    )


def change(ratio: Estimate) -> str:
    """Write by how many per cent a ratio is off 1, and half its interval."""
    if ratio.low == ratio.high == 1:
        return "0"
    if ratio.kind == "range":
        return _times(ratio, 100, less=1).text("{:+.2f}")
    # Plus zero, for what rounds to minus zero.
    return f"{round(100 * (ratio.value - 1), 2) + 0:+.2f} ± {50 * (ratio.high - ratio.low):.2f}"


def _by_dtype(axes: pd.DataFrame, cells) -> pd.DataFrame:
    shown = pd.DataFrame({"change": list(dict.fromkeys(axes["way"]))})
    for name, write in cells.items():
        for dtype, rows in axes.groupby("dtype", sort=False):
            written = {row.way: write(row) for row in rows.itertuples()}
            shown[f"{name}, {DTYPES[dtype]}"] = shown["change"].map(written)
    return shown


def partings_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `tables.partings_table` out for a reader; all cells text."""
    shown = []
    for row in table.itertuples():
        cells = {
            "change": row.way,
            "dtype": DTYPES[row.dtype],
            # Not every way and dtype reads the fixed texts.
            "flips (%)": _percent(row.flip_share) if isinstance(row.flip_share, Estimate) else "",
            "flips, expected (%)": (
                _small_percent(row.expected_flips) if isinstance(row.expected_flips, Estimate) else ""
            ),
        }
        for choice in first_divergence.CHOICES:
            together, written = getattr(row, choice), ""
            if isinstance(together, Estimate):
                # Of few pairs there is none.
                interval = "" if np.isnan(together.low) else f" [{100 * together.low:.0f}, {100 * together.high:.0f}]"
                written = f"{100 * together.value:.0f}{interval}"
            cells[f"equal, {choice} (%)"] = written
        shown.append(cells | {"at a tie": "" if row.way == variants.OTHER_DTYPE.name else row.ties})
    return pd.DataFrame(shown)
