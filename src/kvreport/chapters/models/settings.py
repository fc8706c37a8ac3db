"""Settings of the page on the models."""

from typing import Annotated

from pydantic import Field

from kvbook.settings import DTypeName, Settings


class ModelsSettings(Settings):
    """Settings of the page on the models.

    Attributes
    ----------
    model : str
        ``"all"`` for every family of the registry (every stand-in that ships); or names as elsewhere, with commas
        between them.
    dtype : str
        Of weights and arithmetic.
    prompt : str
        What every model goes on from.
    n_new_tokens : int
        Tokens that each writes.
    """

    model: Annotated[str, Field(min_length=1)] = "all"
    dtype: DTypeName = "float32"
    prompt: Annotated[str, Field(min_length=1)] = "def read_lines(path):\n"
    n_new_tokens: Annotated[int, Field(ge=1)] = 32
