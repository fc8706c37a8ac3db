"""MPT's position bias, taken from the query that it belongs to.

transformers counts MPT's bias from the last key that there is, and leaves it to the softmax to take the shift out
again. It does, but for rounding: the score that the bias is added to is rounded at another size for every number of
keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def _bias(position_bias: torch.Tensor, seq_len: int, past: object, layer: int) -> torch.Tensor:
    """Write the bias out for every query and key."""
    held = 0 if past is None else int(past.get_seq_length(layer))
    keys = seq_len if past is None else past.get_mask_sizes(seq_len, layer)[0]
    # The last entry but one is minus the slope times one.
    slopes = -position_bias[:, :, -2:-1]
    query = torch.arange(held, held + seq_len, device=position_bias.device)[:, None]
    return slopes * (torch.arange(keys, device=position_bias.device) - query).to(position_bias.dtype)


def relative_to_the_query(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Feed MPT's attention, given its stock forward, a bias that does not depend on how many keys there are."""

    @functools.wraps(stock)
    def forward(self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **more):
        bias = _bias(position_bias, hidden_states.shape[1], past_key_values, self.layer_idx)
        return stock(self, hidden_states, bias, past_key_values, attention_mask, **more)

    return forward
