"""Settings of ``python -m kvbook check``."""

from typing import Annotated

from pydantic import Field

from kvbook.settings import DTypes, TextSettings


class CheckSettings(TextSettings):
    """Settings of ``python -m kvbook check``.

    Attributes
    ----------
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16; the finest decides most.
    n_samples, n_tokens : int
        Texts, and tokens of each at most.
    """

    dtypes: DTypes = ("float64", "float32", "float16", "bfloat16")
    n_samples: Annotated[int, Field(ge=1)] = 4
    n_tokens: Annotated[int, Field(ge=4)] = 32
