"""Settings of the chapter on exact caches."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kvbook.settings import Counts, DTypeName, TextSettings, numbers, several


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

    model: Annotated[str, Field(min_length=1)] = "llama"
    families: Annotated[tuple[str, ...], BeforeValidator(several), Field(min_length=1)] = ("all",)
    n_samples: Annotated[int, Field(ge=1)] = 3
    n_tokens: Annotated[int, Field(ge=8)] = 45
    lengths: Annotated[tuple[Annotated[int, Field(ge=2)], ...], BeforeValidator(numbers), Field(min_length=1)] = (
        17, 64,
    )
    threads: Counts = (1, 2)
    dtypes: Annotated[tuple[Literal["float32", "float16", "bfloat16"], ...], BeforeValidator(several),
        Field(min_length=1)] = ("float32", "bfloat16", "float16")
    cost_shape: Annotated[str, Field(min_length=1)] = "smollm2"
    cost_dtype: DTypeName = "bfloat16"
    n_prefill: Annotated[int, Field(ge=2)] = 512
    n_context: Annotated[int, Field(ge=1)] = 200
    n_steps: Annotated[int, Field(ge=1)] = 8
    n_repeats: Annotated[int, Field(ge=1)] = 6
