"""Settings of ``kvbook check``."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from kvbook.settings import CacheDType, DTypes, TextSettings

_UNITS = {"MB": 1e6, "GB": 1e9, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: object) -> object:
    """Read 8GB as a number of bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([\d.]+)\s*([A-Z]+)", value.strip().upper())
    if not found or found[2] not in _UNITS:
        raise ValueError("write it as 8GB")
    return float(found[1]) * _UNITS[found[2]]


class CheckSettings(TextSettings):
    """Settings of ``kvbook check``.

    Attributes
    ----------
    dtypes : tuple of str or None
        Among float64, float32, float16, bfloat16; None takes as many as the verdict needs, two as a rule.
    n_samples, n_tokens : int
        Texts, and tokens of each at most.
    thorough : bool
        Whether every dtype is run, and every path of `kvbook.diagnosis.thorough`.
    cache_dtype : str or None
        What the cache is meant to keep keys and values in: float32, float16, bfloat16, fp8, int8, int4 or int2; None
        for what the model computes in.
    memory : float or None
        Bytes in which the check is to run, as a number or as "8GB"; weights are then streamed. None loads the whole
        model.
    """

    dtypes: DTypes | None = None
    n_samples: Annotated[int, Field(ge=1)] = 4
    n_tokens: Annotated[int, Field(ge=4)] = 24
    thorough: bool = False
    cache_dtype: CacheDType | None = None
    memory: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_bytes)] = None
