"""Tables of the chapter on which path is right, as its page shows them."""

import numpy as np
import pandas as pd

from kvbook.measuring.estimates import Estimate
from kvreport.chapters.which_path_is_right import measures
from kvreport.chapters.which_path_is_right.rows import CACHED, SERIES
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined
from kvreport.publishing.wording import DTYPES, power_of_ten

_SERIES = list(SERIES)


def series(found: Found) -> pd.DataFrame:
    """Compare each path's error with the uncached one's, text by text."""
    texts, layers = found["texts"].groupby(_SERIES, sort=False), found["layers"]
    counts = pd.DataFrame({"n": texts.size(), "ties": texts.size() - texts["closer"].count()})
    whole = layers[layers["place"] == "logits"].set_index(_SERIES)[["error_full", "error"]]
    columns = {
        "ratio": measures.RATIOS, "closer": measures.SHARES_CLOSER, "closer_rows": measures.SHARES_OF_ROWS,
        "correlation": measures.CORRELATIONS, "apart": measures.DISTANCES,
    }
    table = counts.join(whole).join(joined(columns, found, "outer").set_index(_SERIES))
    order = ["n", "error_full", "error", "ratio", "closer", "ties", "closer_rows", "correlation", "apart"]
    return table[order].reset_index()


def shift(found: Found) -> pd.DataFrame:
    """Ask whether a path's difference from the uncached one has a direction, or scatters about zero."""
    columns = {"likelihood": measures.LIKELIHOODS, "entropy": measures.ENTROPIES, "common": measures.SHARES_IN_COMMON}
    return joined(columns, found, "outer")


def quality(found: Found) -> pd.DataFrame:
    """Score both paths on the text itself and against the reference's distribution."""
    logits, table = found["logits"], measures.DIFFERENCE.table(found).set_index(_SERIES)
    of = logits[logits["path"] == CACHED].groupby(_SERIES, sort=False)
    table = table.join(of[["nats_full", "kl_full", "kl"]].mean()).join(of[["top1_full", "top1"]].sum())
    table = table.assign(rows=of.size()).reset_index()
    return pd.DataFrame({
        "model": table["model"], "dtype": table["dtype"].map(DTYPES),
        "nats per token, no cache": table["nats_full"].map("{:.4f}".format),
        "cached minus no cache": table["estimate"].map(_signed),
        "KL to fp64: no cache, cached": table["kl_full"].map(power_of_ten) + ", " + table["kl"].map(power_of_ten),
        "top-1 token as in fp64: no cache, cached": [
            f"{row.top1_full:,.0f}, {row.top1:,.0f} of {row.rows:,}" for row in table.itertuples()
        ],
    })


def _signed(estimate: Estimate) -> str:
    """Write an estimate of any size with one power of ten for all three numbers."""
    if not (largest := max(abs(estimate.low), abs(estimate.high))):
        return "0"
    power = int(np.floor(np.log10(largest)))
    numbers = estimate.over(10.0**power).text("{:+.1f}")
    return f"{numbers} × {power_of_ten(10.0**power).rpartition(' ')[2]}" if power else numbers
