"""The chapter on the blog post about past_key_values."""

from typing import Literal

from kvbook.settings import Count, DTypeName, Names, StreamedSettings, Text, at_least, some


class PastTablesSettings(StreamedSettings):
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

    model: Text = "gpt2"
    families: Names = ("roberta", "mpt", "falcon")
    dtype: DTypeName = "float32"
    quantizations: some(Literal["none", "8bit", "4bit"]) = ("none", "8bit", "4bit")
    corpus: Text = "stdlib"
    n_samples: Count = 20
    n_tokens: at_least(3) = 32

    @property
    def dtypes(self) -> tuple[str]:
        """The only dtype, as experiments in several have theirs."""
        return (self.dtype,)
