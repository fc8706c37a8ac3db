"""Settings of the chapter on serving engines."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvbook.settings import Settings, several


class ServingEnginesSettings(Settings):
    """Settings of the chapter on serving engines.

    Attributes
    ----------
    populations : tuple of str
        Of which texts the prompts are the beginnings: ``"stdlib"``, ``"english"``, ``"chat"``, or folders.
    n_samples : int
        Prompts of each.
    prompt_tokens : int
        Tokens of each.
    new_tokens : int
        Tokens that are written after each, greedily; fewer where the text ends.
    """

    populations: Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)] = ("stdlib",)
    n_samples: Annotated[int, Field(ge=1)] = 4
    prompt_tokens: Annotated[int, Field(ge=2)] = 49
    new_tokens: Annotated[int, Field(ge=2)] = 16
