"""A table as it is written: to its file, in a notebook's output, and for its page."""

import re
from collections.abc import Collection

import pandas as pd


def csv_of(table: pd.DataFrame) -> bytes:
    """Write the rows of a figure or a table, in full precision."""
    return table.to_csv(index=False, lineterminator="\n").encode()


def laid_out(shown: pd.DataFrame, literal: Collection[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """Write what a notebook shows of a table, and the rows of its page, `literal` columns as code."""
    marked_up = shown.assign(**{column: [_quoted(text) for text in shown[column]] for column in literal})
    data = {"text/html": shown.to_html(index=False, border=0), "text/plain": shown.to_string(index=False)}
    return data, {"csv": marked_up.to_csv(index=False)}


def _quoted(text: str) -> str:
    """Write a text as MyST's inline code, where nothing is markup and no quotation mark is bent."""
    if not text:
        return ""
    # A fence must be longer than any run of its own character inside; one space on both sides is taken off again.
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}"
