"""Tables of the chapter on the blog post about past_key_values, as its page shows them."""

import pandas as pd

from kvreport.chapters.blog_past import measures
from kvreport.chapters.blog_past.rows import HANDED
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined


def variants(found: Found) -> pd.DataFrame:
    """Average the difference over all texts, for every variant."""
    keys = list(measures.SPREAD.by)
    facts = found["texts"].groupby(keys, sort=False).agg(
        held=("held_share", "mean"), largest=("relative_spread", "max"), alone_equal=("alone", "sum"),
            texts=("sample", "size")
    )
    table = joined({"spread": measures.SPREAD, "flips": measures.FLIPS}, found).join(facts, on=keys)
    return table[[*keys, "held", "spread", "largest", "alone_equal", "flips", "texts"]]


def variant_grid(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `variants` out for reading."""
    handed = table["variant"] == HANDED
    layers = ", " + table["layers"].astype(str) + " layer" + (table["layers"] != 1).map({True: "s", False: ""})
    return pd.DataFrame(
        {
            "model": table["model"],
            "weights in": table["quantization"].map({"none": "the dtype", "8bit": "8 bits", "4bit": "4 bits"}),
            "variant": table["variant"] + layers.where(handed, ""),
            "past held": table["held"].map("{:.0%}".format),
            "difference / spread": table["spread"].map(lambda estimate: estimate.text("{:.2g}")),
            "equal to last token alone": table["alone_equal"].astype(str) + " of " + table["texts"].astype(str),
            "top-1 flips": table["flips"].map(lambda estimate: estimate.text("{:.0%}")),
        }
    )
