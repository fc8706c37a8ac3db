"""How much a sound cache may drift: by dtype and depth, from rows that a recorded run made on a trained model."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvbook.measuring import UNIT_ROUNDOFF

# Made by `kvbook records reference RUN`, never typed in.
FILE = Path(__file__).with_name("reference.json")
# Other models, texts and processors than the recorded ones may drift by more.  In fine arithmetic a bug is far beyond
# that; in 16 bits it is near.
MARGIN = {"float64": 32.0, "float32": 32.0, "float16": 8.0, "bfloat16": 8.0}
# What even a model of few layers may drift by, in roundoffs: some operations follow the last layer.
_LEAST = 16.0


@functools.cache
def reference() -> dict[str, Any]:
    """Read what was published."""
    return json.loads(FILE.read_text("utf-8"))


def roundoffs(dtype: str, layers: int) -> float:
    """Return the largest published drift for a depth, in roundoffs; deeper than recorded, by its growth per layer."""
    published = reference()["roundoffs"]
    drift = np.maximum(published.get(dtype, published["float32"]), 1.0)
    depth = np.arange(len(drift))
    # A line through the logarithms: one layer's own peak says nothing of another model's.
    growth, start = np.polyfit(depth, np.log(drift), 1)
    above = np.max(np.log(drift) - (start + growth * depth))
    return float(np.exp(start + max(growth, 0.0) * layers + above))


def of(dtype: str, layers: int) -> float:
    """Return the drift of the logits, over their spread, up to which a cache counts as sound."""
    return max(_LEAST, MARGIN[dtype] * roundoffs(dtype, layers)) * UNIT_ROUNDOFF[dtype]
