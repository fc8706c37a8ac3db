"""The chapter on which path is right."""

from kvbook.settings import Count, Names, TextSettings, at_least


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

    families: Names = ("gpt2", "qwen2")
    n_samples: Count = 10
    n_tokens: at_least(8) = 72

    @property
    def n_decoded(self) -> int:
        """Tokens that are fed one by one, and scored."""
        return self.n_tokens // 2
