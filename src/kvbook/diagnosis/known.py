"""What the atlas knows of a class whose cache is wrong: the cause and the remedy, by model type, path and release.

``known.json`` is made of the recorded history by tools/history.py.
"""

import json
from collections.abc import Collection
from pathlib import Path

from packaging.version import Version

FILE = Path(__file__).with_name("known.json")


def fault(model_type: str, wrong: Collection[str], release: str) -> tuple[str, str] | None:
    """Find why a model type is wrong on these paths in a release of transformers: the cause and the remedy."""
    for each in json.loads(FILE.read_text("utf-8")):
        if model_type in each["types"] and set(wrong) <= set(each["paths"]):
            mended = each["types"][model_type]
            if mended is None:
                return each["cause"], each["remedy"]
            if Version(release) < Version(mended):
                return each["cause"], f"{each['remedy']}, or use transformers {mended} or newer"
    return None
