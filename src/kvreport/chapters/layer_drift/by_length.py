"""The last token's logits at the fixed length and at drawn ones, side by side: a table and its caption."""

import pandas as pd

from kvbook import lengths
from kvbook.measuring import estimates
from kvbook.runs.records import Run
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES

NAME = "tab-drift-lengths"


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


def caption(runs: list[Run]) -> dict[str, str]:
    """Write name and caption of the table, as `Page.table` takes them."""
    files = min(run.rows["source"].nunique() for run in runs)
    counted = (
        f"95 % interval (Wilson's, at least {files} files)"
        if files >= estimates.FEWEST_UNITS
        else f"lowest and highest of {files} file{'s' * (files > 1)}"
    )
    model = runs[0].about["models"][0]["name"]
    said = (
        f"Texts of {model} whose last token's logits are bitwise identical with and without a cache, at each length; in a "
        f"range each text draws its own. Share with its {counted}. {{numref}}`fig-lengths` says what a length "
        f"does. {wording.corpus(runs[0])[:1].upper()}{wording.corpus(runs[0])[1:]}; {wording.machine(runs[0])}."
    )
    return wording.published({NAME: (said, "")})[NAME]
