"""The chapter on the notebook about static and dynamic caches."""

from typing import Literal

from kvbook.settings import Count, DTypeName, Settings, Text, Weights, at_least, some

# The settings on which the rows depend of all experiments on the timed model.
FIELDS = frozenset({"model", "weights", "dtype", "device", "seed"})


class StaticCacheSettings(Settings):
    """Settings of the chapter on the notebook about static and dynamic caches.

    Attributes
    ----------
    weights : {"random", "stand-in", "hub", "package", "untrained"}
        As elsewhere, for a family's name; by default the true shape, since speed does not depend on what weights have
        learnt.
    dtype : str
        Of weights and arithmetic; the document's was bfloat16.
    n_new_tokens : int
        Tokens that each way writes, no fewer and no more; the document's number.
    n_repeats : int
        How often each way is timed, the ways by turns.
    scope : {"layer", "model"}
        What is compiled: the layer, once for all layers, or the whole forward pass, which takes a minute.
    prompt : str
        The document's.
    contexts : tuple of int
        Tokens that steps of several batches and dtypes attend to; none, and they are not timed.
    text_model : str
        With weights that have learnt something; it writes the texts that are compared.
    """

    model: Text = "smollm2"
    weights: Weights = "random"
    dtype: DTypeName = "bfloat16"
    n_new_tokens: at_least(5) = 200
    n_repeats: Count = 2
    scope: Literal["layer", "model"] = "layer"
    prompt: Text = "The theory of special relativity states "
    contexts: some(at_least(2), 0) = ()
    text_model: Text = "smollm2"


class BesideLlamaCppSettings(StaticCacheSettings):
    """Settings of the comparison with llama.cpp, which is made on demand alone."""
