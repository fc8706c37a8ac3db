"""Settings of the chapter on which path is right."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvbook.settings import TextSettings, several


class WhichPathSettings(TextSettings):
    """Settings of the chapter on which path is right.

    Attributes
    ----------
    families : tuple of str
        Further models, beside `model`, with the same `weights`; may be empty.
    n_samples : int
        Texts; the unit of resampling is the file that a text is from.
    n_tokens : int
        Length of each; the first half is the prompt, the second is decoded from a cache.
    """

    families: Annotated[tuple[str, ...], BeforeValidator(several)] = ("gpt2", "qwen2")
    n_samples: Annotated[int, Field(ge=1)] = 10
    n_tokens: Annotated[int, Field(ge=8)] = 72

    @property
    def n_decoded(self) -> int:
        """Tokens that are fed one by one, and scored."""
        return self.n_tokens // 2
