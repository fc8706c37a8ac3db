"""What the documents published: ``data/documents/<document>.yaml``, read and nothing more."""

import functools
from typing import Any

import pandas as pd

from kvbook import paths
from kvbook.settings import read_yaml


@functools.cache
def published(document: str) -> dict[str, Any]:
    """Read everything that was transcribed from a document."""
    return read_yaml(paths.DOCUMENTS / f"{document}.yaml")


def published_drift() -> pd.DataFrame:
    """Give issue 25420's table as tidy rows."""
    rows = []
    for series in published("issue-25420")["drift"]["series"]:
        about = {key: series[key] for key in ("family", "model", "dtype")}
        rows += [about | {"place": "hidden", "layer": i, "max_abs": x} for i, x in enumerate(series["hidden"])]
        rows.append(about | {"place": "logits", "layer": len(series["hidden"]), "max_abs": series["logits"]})
    return pd.DataFrame(rows)
