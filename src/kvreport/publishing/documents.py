"""What the documents published: ``data/documents/<document>.yaml``, read and nothing more."""

import functools
from typing import Any

from kvbook import paths
from kvbook.settings import read_yaml


@functools.cache
def published(document: str) -> dict[str, Any]:
    """Read everything that was transcribed from a document."""
    return read_yaml(paths.DOCUMENTS / f"{document}.yaml")
