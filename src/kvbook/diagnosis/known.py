"""What the atlas knows of a class whose cache is wrong: the cause and the remedy, by model type, path and release.

``known.json`` is made of the recorded history by tools/history.py.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

FILE = Path(__file__).with_name("known.json")


class Fault(NamedTuple):
    """Why a class is wrong in some releases, and what to do about it."""

    cause: str
    remedy: str


def fault(model_type: str, wrong: Collection[str], release: str) -> Fault | None:
    """Find the known fault of a model type, in a release of transformers, that explains which paths are wrong."""
    for each in json.loads(FILE.read_text("utf-8")):
        if model_type in each["types"] and set(wrong) <= set(each["paths"]):
            mended = each["types"][model_type]
            if mended is None:
                return Fault(each["cause"], each["remedy"])
            if Version(release) < Version(mended):
                return Fault(each["cause"], f"{each['remedy']}, or use transformers {mended} or newer")
    return None
