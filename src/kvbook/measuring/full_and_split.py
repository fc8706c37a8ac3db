"""The ways to compute the same token's output: all tokens at once, or from a cache.

Shapes follow transformers: ids ``(batch_size, seq_len)``, hidden states ``(batch_size, seq_len, width)``.
"""


from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel


@dataclass(frozen=True)
class LastToken:
    """What a model says at the last position of one sequence.

    Attributes
    ----------
    hidden : Tensor, shape (layers + 1, width)
        The residual stream: row 0 after the embedding, row l after layer l; the last row is after the final norm too,
        as transformers' ``hidden_states`` has it.
    logits : Tensor, shape (vocabulary_size,)
        Scores of the next token.
    """

    hidden: torch.Tensor
    logits: torch.Tensor


def _last(output) -> LastToken:
    return LastToken(torch.stack([state[0, -1] for state in output.hidden_states]), output.logits[0, -1])


def full_pass(model: PreTrainedModel, ids: torch.Tensor) -> LastToken:
    """Run all tokens at once, without a cache.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    ids : Tensor of int64, shape (1, seq_len)
        Token ids.
    """
    # The logits of all rows are computed, though one is kept: with fewer rows the last matrix product has another
    # shape, and the comparison would be with something that nobody runs.
    return _last(model(ids, output_hidden_states=True, use_cache=False))


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> Cache:
    """Fill a fresh dynamic cache with a prefix.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    ids : Tensor of int64, shape (1, prefix_len)
        The prefix.

    Raises
    ------
    ValueError
        When the model returns no cache (``use_cache=False`` in its configuration is overridden here, so it has none).
    """
    # Only keys and values are wanted, so the prefix's logits are not computed but for one row, which nobody reads.
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    if cache is None:
        raise ValueError(f"{type(model).__name__} returned no past_key_values")
    return cache


def states_of(cache: Cache) -> list[torch.Tensor]:
    """List the keys and values that a cache holds, layer by layer."""
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def decode(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> LastToken:
    """Run further tokens on top of a cache, which grows by them.

    Parameters
    ----------
    model : PreTrainedModel
        The model that filled the cache.
    ids : Tensor of int64, shape (1, new_len)
        The tokens after the cached prefix.
    cache : Cache
        Keys and values of the prefix; changed in place.
    """
    return _last(model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True))


def split_pass(model: PreTrainedModel, ids: torch.Tensor) -> LastToken:
    """Run all tokens but the last into a cache, then the last one on top of it.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    ids : Tensor of int64, shape (1, seq_len)
        Token ids, two or more.
    """
    return decode(model, ids[:, -1:], prefill(model, ids[:, :-1]))
