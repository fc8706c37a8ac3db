"""Tables behind the chapter on the blog post about past_key_values."""

from typing import Any

import pandas as pd

from kvbook.measuring import estimates as fits
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.blog_past import past_tables
from kvreport.publishing import documents

DOCUMENT = "blog-past"
_COLUMNS = ("without", "with", "absolute", "relative")
FAMILIES = {"gpt2": "GPT-2", "roberta": "RoBERTa", "mpt": "MPT", "falcon": "Falcon"}


def _statistics() -> list[str]:
    return documents.published(DOCUMENT)["statistics"]


def published_tables() -> pd.DataFrame:
    """Give the post's tables as tidy rows."""
    return pd.DataFrame(
        {"family": table["family"], "quantization": table["quantization"], "statistic": name}
        | {column: table[column][index] for column in _COLUMNS}
        for table in documents.published(DOCUMENT)["tables"]
        for index, name in enumerate(_statistics())
    )


def as_in_2023(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep of each family the variant in which the post met it; a family that it does not have, native."""
    expected = rows["family"].map(past_tables.AS_IN_2023).fillna(past_tables.NATIVE)
    return rows[rows["variant"] == expected]


def own_tables(rows: pd.DataFrame) -> pd.DataFrame:
    """Take the post's statistics of the posted text."""
    table = []
    for row in rows[rows["sample"] == past_tables.POSTED].to_dict("records"):
        about = {key: row[key] for key in ("model", "family", "quantization", "variant", "layers")}
        for name in _statistics():
            values = {column: row[f"{column} {name}"] for column in ("without", "with", "absolute", "element")}
            table.append(
                about | {"statistic": name} | values | {"relative": values["absolute"] / abs(values["without"])}
            )
    return pd.DataFrame(table)


def beside_published(own: pd.DataFrame) -> pd.DataFrame:
    """Set our differences beside the post's, for each case that it published."""
    ours = own.drop_duplicates(["family", "quantization", "statistic"])
    both = published_tables().merge(
        ours, on=["family", "quantization", "statistic"], how="left", suffixes=("", " here")
    )
    case = both["family"].map(FAMILIES) + both["quantization"].map({"none": "", "8bit": ", 8 bits", "4bit": ", 4 bits"})
    return pd.DataFrame(
        {
            "case": case,
            "statistic": both["statistic"],
            "published absolute": both["absolute"],
            "here absolute": both["absolute here"],
            "published relative": both["relative"],
            "here relative": both["relative here"],
            "here by element": both["element"],
        }
    )


def relative_apart(beside: pd.DataFrame) -> pd.DataFrame:
    """Keep what the page shows a relative difference of both kinds of, with the factor ``apart`` between the two."""
    # A difference or a logit of zero has no ratio.
    both = beside[(beside["here relative"] > 0) & (beside["here by element"] > 0)]
    ratio = both["here relative"] / both["here by element"]
    return both.assign(apart=ratio.map(lambda one: max(one, 1 / one)))


def by_variant(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the difference over all texts, for every variant."""
    table = []
    keys = ["model", "family", "quantization", "variant", "layers"]
    for values, part in rows.groupby(keys, sort=False):
        resampled = fits.resample(part.assign(all=0), "relative_spread", by="all")
        low, high = resampled.interval()
        table.append(
            dict(zip(keys, values, strict=True))
            | {
                "held": float((part["held"] / (part["n_tokens"] - 1)).mean()),
                "spread": fits.Estimate(float(resampled.mean[0]), float(low[0]), float(high[0]), resampled.kind),
                "largest": float(part["relative_spread"].max()),
                "alone_equal": int((part["alone_max_abs"] == 0).sum()),
                "flips": fits.share_over(part, part["top1_flip"] > 0)[0],
                "texts": len(part),
            }
        )
    return pd.DataFrame(table)


def variant_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `by_variant` out for reading."""
    return pd.DataFrame(
        {
            "model": table["model"],
            "weights in": table["quantization"].map({"none": "the dtype", "8bit": "8 bits", "4bit": "4 bits"}),
            "variant": [_named(row) for row in table.to_dict("records")],
            "past held": [f"{held:.0%}" for held in table["held"]],
            "difference / spread": [estimate.text("{:.2g}") for estimate in table["spread"]],
            "equal to last token alone": [
                f"{n} of {of}" for n, of in zip(table["alone_equal"], table["texts"], strict=True)
            ],
            "top-1 flips": [e.text("{:.0%}") for e in table["flips"]],
        }
    )


def _named(row: dict[str, Any]) -> str:
    if row["variant"] != past_tables.HANDED:
        return row["variant"]
    return f"{row['variant']}, {row['layers']} layer{'s' * (row['layers'] != 1)}"


def roundoffs(rows: pd.DataFrame) -> pd.Series:
    """Give each row's difference over the size of the logits in unit roundoffs of the dtype, or of fp16 where quantized."""
    own = rows["dtype"].map(UNIT_ROUNDOFF)
    # In 8 bits bitsandbytes casts what enters a product to fp16.  In 4 bits it is asked for the run's dtype, and rounds to bf16
    # all the same on a CPU with AVX512-BF16 (`gemv_4bit`): there fp16's roundoff is the finer one, and the stricter bound.
    # The post's 4-bit logits are fp16's.
    unit = own.where(rows["quantization"] == "none", own.clip(lower=UNIT_ROUNDOFF["float16"]))
    return rows["relative_rms"] / unit
