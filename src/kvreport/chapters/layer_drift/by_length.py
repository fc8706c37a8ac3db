"""The last token's logits at the fixed length and at drawn ones, side by side."""

import pandas as pd

from kvbook import lengths
from kvbook.measuring import estimates
from kvbook.runs.records import Run
from kvreport.publishing.wording import DTYPES


def table(runs: list[Run]) -> pd.DataFrame:
    """Count, for each run's lengths and each dtype of the first model, the texts whose logits are equal bit for bit."""
    found = []
    for run in runs:
        rows = run.rows[(run.rows["place"] == "logits") & (run.rows["model"] == runs[0].rows["model"].iloc[0])]
        for dtype, some in rows.groupby("dtype", sort=False):
            equal, files = estimates.share_over(some, some["differing_share"] == 0)
            found.append(
                {
                    "tokens": lengths.said(run.about.get("lengths", run.about["settings"]["n_tokens"])),
                    "dtype": dtype,
                    "texts": some["sample"].nunique(),
                    "files": files,
                    "identical": int((some["differing_share"] == 0).sum()),
                    "share": equal,
                    "relative_rms": some["relative_rms"].mean(),
                }
            )
    return pd.DataFrame(found)


def shown(found: pd.DataFrame) -> pd.DataFrame:
    """Lay `table` out for reading."""
    return pd.DataFrame(
        {
            "tokens": found["tokens"],
            "dtype": found["dtype"].map(DTYPES),
            "bitwise identical": [f"{row.identical} of {row.texts}" for row in found.itertuples()],
            "share": found["share"].map(estimates.Estimate.text),
            "mean relative drift": found["relative_rms"].map("{:.2g}".format),
        }
    )
