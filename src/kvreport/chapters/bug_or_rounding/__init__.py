"""The chapter on bug or rounding."""

from kvbook.settings import Count, DTypes, Names, StreamedSettings, TextSettings, text_length


class BugOrRoundingSettings(StreamedSettings, TextSettings):
    """Settings of the chapter on bug or rounding.

    Attributes
    ----------
    model : str
        Repeats the symptoms that need no particular family.
    families : tuple of str
        Models, beside `model`, into which bugs are injected; those of the blog post also repeat its call.
    n_samples : int
        Texts.
    n_tokens : int or str
        Tokens of each, or a range of which each text draws its own.
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16; the finest decides most.
    """

    families: Names = ("gpt2", "llama", "qwen2", "smollm2", "mpt", "falcon", "roberta")
    n_samples: Count = 3
    n_tokens: text_length(4) = "33-190"
    dtypes: DTypes = ("float64", "float32", "float16", "bfloat16")
