"""Settings of the chapter on the blog post about past_key_values."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kvbook.settings import DTypeName, Settings, several


class PastTablesSettings(Settings):
    """Settings of the chapter on the blog post about past_key_values.

    Attributes
    ----------
    model : str
        The baseline; the document's was GPT-2.
    families : tuple of str
        The other models: families, hub ids or folders.
    dtype : str
        Of weights and arithmetic; what quantization leaves alone has it.
    quantizations : tuple of str
        Among none, 8bit, 4bit.
    corpus : str
        ``"stdlib"`` or a folder of text files.
    n_samples : int
        Texts besides the posted one.
    n_tokens : int
        Tokens of each.
    """

    model: Annotated[str, Field(min_length=1)] = "gpt2"
    families: Annotated[tuple[str, ...], BeforeValidator(several)] = ("roberta", "mpt", "falcon")
    dtype: DTypeName = "float32"
    quantizations: Annotated[
        tuple[Literal["none", "8bit", "4bit"], ...], BeforeValidator(several), Field(min_length=1)
    ] = ("none", "8bit", "4bit")
    corpus: Annotated[str, Field(min_length=1)] = "stdlib"
    n_samples: Annotated[int, Field(ge=1)] = 20
    n_tokens: Annotated[int, Field(ge=3)] = 32
