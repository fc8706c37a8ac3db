"""The chapter on exact caches."""

from kvbook.settings import Count, Counts, DTypeName, SmallDType, Text, TextSettings, at_least, counts, some


class ExactCachesSettings(TextSettings):
    """Settings of the chapter on exact caches.

    Attributes
    ----------
    families : tuple of str
        Models that go through every way of feeding the same tokens; ``"all"`` for every causal family whose weights are
        here.
    n_samples : int
        Texts.
    n_tokens : int
        Length of each.
    lengths : tuple of int
        Lengths of the texts that are fed in uneven chunks; each of the `n_samples` texts has one of them, in turn.
    threads : tuple of int
        With how many threads of a CPU these are fed: all lengths with the first number, then all with the next.
    dtypes : tuple of str
        Among float32, float16, bfloat16.
    cost_shape : str
        Family whose true shape, with random weights, is timed.
    cost_dtype : str
        In which it is timed.
    n_prefill, n_context, n_steps : int
        Tokens of the timed prefill; tokens in the cache before the timed decode steps; how many steps.
    n_repeats : int
        How often each of the two arithmetics is timed.
    """

    model: Text = "llama"
    families: some(str) = ("all",)
    n_samples: Count = 3
    n_tokens: at_least(8) = 45
    lengths: counts(2) = (17, 64)
    threads: Counts = (1, 2)
    dtypes: some(SmallDType) = ("float32", "bfloat16", "float16")
    cost_shape: Text = "smollm2"
    cost_dtype: DTypeName = "bfloat16"
    n_prefill: at_least(2) = 512
    n_context: Count = 200
    n_steps: Count = 8
    n_repeats: Count = 6
