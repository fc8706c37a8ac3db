"""The chapter on the forum thread about reusing a prompt's cache."""

from kvbook.settings import Count, DTypes, Text, TextSettings, at_least


class PromptReuseSettings(TextSettings):
    """Settings of the chapter on the forum thread about reusing a prompt's cache.

    Attributes
    ----------
    second_model : str
        A second model, with the same `weights`; the document's were Llama-3.1 and Qwen2.5, both instruct.
    corpus : str
        ``"stdlib"`` or a folder of text files; where texts are cut in two.
    n_samples : int
        Texts that are cut in two and continued with and without the first part's cache.
    n_prompts : int
        Questions that follow the thread's prefix, beside its own two; each seed takes others.
    n_positions : int
        Places in each file at which it is asked whether a cut changes the ids.
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16; the document used the library's default and bfloat16.
    n_new_tokens : int
        Tokens that the greedy decoding writes; the document's number.
    """

    second_model: Text = "qwen2"
    n_samples: Count = 10
    n_prompts: at_least(0) = 4
    n_positions: Count = 40
    dtypes: DTypes = ("float32", "bfloat16")
    n_new_tokens: Count = 20
