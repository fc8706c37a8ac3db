"""Tables of the page on the models, as it shows them."""

import pandas as pd

from kvreport.chapters.models.rows import BASELINES, GIB, STORED
from kvreport.publishing.wording import quoted

_SCORES = {"model": "stand-in"} | BASELINES


def as_code(text: str) -> str:
    """Mark text as code for a table's cell: on one line, between more backticks than stand together anywhere in it."""
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
    # Browsers show blanks that stand together as one, unless they are of the kind that does not break.
    shown = shown.replace("\n", "⏎").replace("\t", "→").replace("  ", "\u00a0\u00a0")
    return quoted(shown)


_COUNTS = {"parameters": lambda count: f"{count / 1e6:,.{1 if count < 1e8 else 0}f} M", "vocabulary": "{:,}"}
# How each column is written, by table.
FORMATS = {
    "tab-models-documents": _COUNTS,
    "tab-models-memory": dict.fromkeys(STORED, lambda n: f"{n / GIB:.{1 if n >= GIB else 2}f}"),
    "tab-models-stand-ins": _COUNTS, "tab-models-bits": dict.fromkeys(_SCORES.values(), "{:.2f}"),
    "tab-models-samples": {"text": as_code, "probability": "{:.2f}"},
}


def documents(architectures: pd.DataFrame) -> pd.DataFrame:
    """Cut what a hub id itself says out of the table of architectures."""
    return architectures[["hub id", "used by", "parameters", "layers", "width", "heads", "KV heads", "vocabulary"]]


def shapes(stand_ins: pd.DataFrame) -> pd.DataFrame:
    """Cut the stand-ins' shapes out of their table."""
    columns = ["layers", "width", "heads", "KV heads", "vocabulary", "positions", "tokenizer", "parameters"]
    return stand_ins[["family", *columns]]


def bits(stand_ins: pd.DataFrame) -> pd.DataFrame:
    """Cut the stand-ins' scores out of their table, under the names that a reader knows."""
    return stand_ins[["family", "objective", "tokenizer", *_SCORES]].rename(columns=_SCORES)
