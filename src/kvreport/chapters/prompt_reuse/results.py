"""The experiments of the chapter on reusing a prompt's cache."""

from kvreport.chapters.prompt_reuse import continuations, first_layer, split_keys, tokenizer_boundaries

EXPERIMENTS = (
    split_keys.EXPERIMENT, first_layer.EXPERIMENT, continuations.EXPERIMENT, tokenizer_boundaries.EXPERIMENT,
    continuations.REUSED_QUESTIONS,
)
