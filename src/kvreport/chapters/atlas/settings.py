"""Settings of the chapter on the atlas."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvbook.settings import Settings, several


class AtlasSettings(Settings):
    """Settings of the chapter on the atlas.

    Attributes
    ----------
    architectures : tuple of str
        Model types; ``"all"`` for every causal one of the installed transformers.
    """

    architectures: Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)] = ("all",)
