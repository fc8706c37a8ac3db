"""Is it a bug or rounding: a model measured at several roundoffs, the judge of the rows, and bugs to try it on.

What a check is asked stands here, apart from what checks, so that a wrong question is refused before torch is imported.
"""

from typing import Annotated

from pydantic import Field

from kvbook.settings import CacheDType, DTypes, StreamedSettings, TextSettings


class CheckSettings(StreamedSettings, TextSettings):
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
    """

    dtypes: DTypes | None = None
    n_samples: Annotated[int, Field(ge=1)] = 4
    n_tokens: Annotated[int, Field(ge=4)] = 24
    thorough: bool = False
    cache_dtype: CacheDType | None = None
