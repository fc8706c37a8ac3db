"""Tables of the chapter on serving engines."""

from collections.abc import Mapping

import pandas as pd

from kvreport.chapters.serving_engines import measures
from kvreport.chapters.serving_engines import rows as named
from kvreport.engines.listed import ENGINES
from kvreport.publishing import wording
from kvreport.publishing.found import Found
from kvreport.publishing.measures import joined, said


def engines() -> pd.DataFrame:
    """List the engines with their versions, and what each lacks here; all cells text."""
    return pd.DataFrame([
        {"engine": engine.title, "packages": ", ".join(engine.packages), "lacks on this processor": engine.lacks}
        for engine in ENGINES.values()
    ])


def by_way(found: Found) -> pd.DataFrame:
    """Estimate every way of every engine and dtype, in the order of pages."""
    columns = {"texts": measures.TEXTS, "bits": measures.BITS, "moved": measures.MOVED, "reused": measures.REUSED}
    table = joined(columns, found, "outer")
    order = {name: place for place, name in enumerate((*named.TITLES.values(), *named.WAYS))}
    return table.sort_values(["engine", "dtype", "way"], key=lambda of: of.map(order).fillna(0), kind="stable")


def ways(found: Found) -> pd.DataFrame:
    """Lay out what each way changes against a cold request; all cells text."""
    table, prompts = by_way(found), found["cold"]["sample"].nunique()

    def counted(share) -> str:
        return f"{round(share.value * prompts)} of {prompts}"

    return pd.DataFrame({
        "engine": table["engine"], "dtype": table["dtype"].map(said), "way": table["way"],
        "reused tokens": ["not told" if pd.isna(one.value) else f"{one.value:.0f}" for one in table["reused"]],
        "tokens equal": table["texts"].map(counted), "bitwise identical": table["bits"].map(counted),
        "largest |Δ log p|": [f"{one.value:.2g}" for one in table["moved"]],
    })


def on_processors(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Count, on every processor, the answers that a way leaves bitwise identical, and those with equal tokens."""
    laid = {}
    for name, found in everywhere.items():
        counts = ways(found).set_index(["engine", "dtype", "way"]).map(lambda cell: cell.partition(" of ")[0])
        laid[wording.processor(name)] = counts["bitwise identical"] + "/" + counts["tokens equal"]
    return pd.concat(laid, axis=1, sort=False).fillna("not run").reset_index()


def pairs(found: Found) -> pd.DataFrame:
    """Lay out how far every two engines are apart in fp32; all cells text."""
    table = joined({"texts": measures.PAIR_TEXTS, "moved": measures.PAIR_MOVED}, found)
    prompts = found["cold"]["sample"].nunique()
    return pd.DataFrame({
        "engines": table["engines"],
        "tokens equal": [f"{round(one.value * prompts)} of {prompts}" for one in table["texts"]],
        "mean |Δ log p|": [one.text("{:.1e}") for one in table["moved"]],
    })


def exactness(found: Found) -> pd.DataFrame:
    """Estimate how far each engine is from fp64, by engine and dtype."""
    table = joined({"error": measures.ERROR, "kl": measures.KL}, found, "outer")
    return table.assign(label=[f"{one.engine}, {said(one.dtype)}" for one in table.itertuples()])
