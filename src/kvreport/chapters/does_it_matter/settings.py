"""Settings of the chapter on whether the difference matters."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvbook.settings import SmallDType, TextSettings, several


class DoesItMatterSettings(TextSettings):
    """Settings of the chapter on whether the difference matters.

    Attributes
    ----------
    n_samples : int
        Texts, and prompts that are continued.
    n_tokens : int
        Tokens that are read of each text: the first half is a prompt, the second half is scored; or written, where the
        model continues the prompt.
    longest : int
        Tokens of the texts along which drift is followed; no more than the model's context is used.
    dtypes : tuple of str
        Among float32, float16, bfloat16.
    n_long : int
        Texts of that length.
    n_fit : int
        Texts that the classification head is fitted on.
    """

    n_samples: Annotated[int, Field(ge=1)] = 12
    n_tokens: Annotated[int, Field(ge=8)] = 96
    longest: Annotated[int, Field(ge=16)] = 1024
    dtypes: Annotated[tuple[SmallDType, ...], BeforeValidator(several), Field(min_length=1)] = ("float32", "bfloat16")
    n_long: Annotated[int, Field(ge=1)] = 3
    n_fit: Annotated[int, Field(ge=2)] = 24
