"""The chapter on whether the difference matters."""

from kvbook.settings import Count, SmallDType, TextSettings, at_least, some

_Long = at_least(16)


class DoesItMatterSettings(TextSettings):
    """Settings of the chapter on whether the difference matters.

    Attributes
    ----------
    n_samples : int
        Texts, and prompts that are continued.
    n_tokens : int
        Tokens of each text: the first half is a prompt and the second half is scored.  Where the model continues a
        text, the first quarter is the prompt, and it writes the rest; a chat's template stands before that.
    longest : int
        Tokens of the texts along which drift is followed; no more than the model's context is used.
    dtypes : tuple of str
        Among float32, float16, bfloat16.
    greedy_only : tuple of str
        Those of them in which texts are continued greedily alone, with a cache and without, and by no other way.
    n_long : int
        Texts of that length.
    text_lengths : tuple of int
        Tokens of each text on which both paths are held against fp64 by position; no more than the model's context.
    n_fit : int
        Texts that the classification head is fitted on.
    n_usage : int
        Prompts that are continued in every cell of what a user changes: a sixteenth of `n_tokens`, or five tokens
        more, is a prompt, and an eighth is written.
    """

    n_samples: Count = 12
    n_tokens: at_least(8) = 96
    longest: _Long = 1024
    dtypes: some(SmallDType) = ("float32", "bfloat16")
    greedy_only: some(SmallDType, 0) = ()
    n_long: Count = 3
    text_lengths: some(_Long) = (256,)
    n_fit: at_least(2) = 24
    n_usage: Count = 2
