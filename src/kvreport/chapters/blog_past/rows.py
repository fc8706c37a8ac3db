"""The rows of the chapter on the blog post about past_key_values by name; to read them takes no torch."""

import pandas as pd

from kvbook.measuring import UNIT_ROUNDOFF
from kvreport.publishing import documents

# The chapter's experiment and the revision of its rows.
EXPERIMENTS = {"past_tables": 1}

# How the document's call is run; see `past_tables`.
NATIVE, CACHE_OFF = "native", "use_cache off"
NO_PAST, DECODER, HANDED = "no past returned", "decoder", "past handed over"
UPPER_LEFT, NO_OFFSET, BOTH = "mask upper left", "rotary without offset", "mask and rotary of 2023"
# How it came out in mid-2023.
AS_IN_2023 = {"gpt2": NATIVE, "mpt": CACHE_OFF, "roberta": NO_PAST, "falcon": BOTH}
POSTED = "posted"

DOCUMENT = "blog-past"
FAMILIES = {"gpt2": "GPT-2", "roberta": "RoBERTa", "mpt": "MPT", "falcon": "Falcon"}
BITS = {"none": "no quantization", "8bit": "8 bits", "4bit": "4 bits"}
_CASE = ["family", "quantization", "statistic"]


def roundoffs(rows: pd.DataFrame) -> pd.Series:
    """Express each row's relative difference in unit roundoffs of its dtype, or of fp16 where quantized."""
    own = rows["dtype"].map(UNIT_ROUNDOFF)
    # In 8 bits bitsandbytes casts what enters a product to fp16.  In 4 bits it is asked for the run's dtype, and rounds
    # to bf16 all the same on a CPU with AVX512-BF16 (`gemv_4bit`): there fp16's roundoff is the finer one, and the
    # stricter bound. The post's 4-bit logits are fp16's.
    unit = own.where(rows["quantization"] == "none", own.clip(lower=UNIT_ROUNDOFF["float16"]))
    return rows["relative_rms"] / unit


def texts(past_tables: pd.DataFrame) -> pd.DataFrame:
    """Add to each text's differences what they are counted in, and what tells one text from another."""
    return past_tables.assign(
        roundoffs=roundoffs(past_tables), precision=past_tables["quantization"].map(BITS),
        depth=[f"{layers} layer{'s' * (layers != 1)}" for layers in past_tables["layers"]],
        # In one layer nothing lies above the keys that a later token would have changed.
        deep=past_tables["layers"] > 1, trained=~past_tables["weights"].isin(["stand-in", "untrained"]),
        held_share=past_tables["held"] / (past_tables["n_tokens"] - 1), alone=past_tables["alone_max_abs"] == 0,
        not_alone=past_tables["alone_max_abs"] > 0,
    )


def statistics() -> list[str]:
    """Name the post's statistics of a vector."""
    return documents.published(DOCUMENT)["statistics"]


def published_tables() -> pd.DataFrame:
    """Return the post's tables as tidy rows."""
    return pd.DataFrame(
        {"family": table["family"], "quantization": table["quantization"], "statistic": name}
        | {column: table[column][index] for column in ("without", "with", "absolute", "relative")}
        for table in documents.published(DOCUMENT)["tables"] for index, name in enumerate(statistics())
    )


def own(texts: pd.DataFrame) -> pd.DataFrame:
    """Take the post's statistics of the posted text, each family in the variant in which the post met it."""
    met = texts["family"].map(AS_IN_2023).fillna(NATIVE)
    posted = texts[(texts["variant"] == met) & (texts["sample"] == POSTED)]
    columns = ("without", "absolute", "element")
    tables = [
        posted[_CASE[:2]].assign(statistic=name, **{column: posted[f"{column} {name}"] for column in columns})
        for name in statistics()
    ]
    table = pd.concat(tables)
    return table.assign(relative=table["absolute"] / table["without"].abs())


def beside(own: pd.DataFrame, published_tables: pd.DataFrame) -> pd.DataFrame:
    """Set our differences beside the post's, for each case that it published."""
    both = published_tables.merge(own.drop_duplicates(_CASE), on=_CASE, how="left", suffixes=("", " here"))
    case = both["family"].map(FAMILIES) + both["quantization"].map({"none": "", "8bit": ", 8 bits", "4bit": ", 4 bits"})
    columns = {
        "statistic": "statistic", "published absolute": "absolute", "here absolute": "absolute here",
        "published relative": "relative", "here relative": "relative here", "here by element": "element",
    }
    return pd.DataFrame({"case": case} | {name: both[column] for name, column in columns.items()})


def apart(beside: pd.DataFrame) -> pd.DataFrame:
    """Keep what the page shows a relative difference of both kinds of, with the factor ``apart`` between the two."""
    # A difference or a logit of zero has no ratio.
    both = beside[(beside["here relative"] > 0) & (beside["here by element"] > 0)]
    ratio = both["here relative"] / both["here by element"]
    return both.assign(apart=ratio.map(lambda one: max(one, 1 / one)))
