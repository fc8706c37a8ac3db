"""Tables of the chapter on the blog post about past_key_values, as its page shows them."""

import pandas as pd

from kvreport.chapters.blog_past import measures
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined


def variants(found: Found) -> pd.DataFrame:
    """Average the difference over all texts, for every variant."""
    keys = list(measures.SPREAD.by)
    facts = found["texts"].groupby(keys, sort=False).agg(
        held=("held_share", "mean"), largest=("relative_spread", "max"), alone_equal=("alone", "sum"),
        texts=("sample", "size"),
    )
    table = joined({"spread": measures.SPREAD, "flips": measures.FLIPS}, found).join(facts, on=keys)
    return table[[*keys, "held", "spread", "largest", "alone_equal", "flips", "texts"]]
