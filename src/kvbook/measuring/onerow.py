"""The operations of a decode step, written for the one row that they have.

A decode step feeds one token, so each of its matrix products is a matrix times a vector and its attention has one
query: both read every number once and do next to nothing with it.  General kernels are made for many rows.  Written as
a multiplication and a sum in fp32, the same step becomes loops that a compiler fuses with what stands around them, and
that run at the speed of memory.  Without a compiler this form is slow; it is only for `torch.compile`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from unittest.mock import patch

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

# The name under which transformers' attention interface finds `one_query_attention`.
ATTENTION = "kvbook_one_query"


def one_row_linear(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """Multiply one row by a matrix: products and their sum in fp32, rounded once."""
    if inputs.numel() != inputs.shape[-1]:
        return nn.functional.linear(inputs, module.weight, module.bias)
    row = inputs.reshape(-1).float()
    # A strided view is one of memory, so the compiler writes the row down before it goes on. Otherwise it fuses what
    # made the row, say a norm, into the loop over the matrix, and computes it again for every one of its rows.
    row = row.as_strided(row.shape, row.stride())
    sums = (row * module.weight.float()).sum(-1)
    if module.bias is not None:
        sums = sums + module.bias.float()
    return sums.to(inputs.dtype).view(*inputs.shape[:-1], -1)


def one_query_attention(
    _layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, **_
) -> tuple[torch.Tensor, None]:
    """Attend from one query, in fp32, in the form that transformers' attention interface asks for."""
    batch_size, heads, queries, head_dim = query.shape
    if batch_size != 1 or queries != 1:
        raise ValueError(f"{batch_size} x {queries} queries: this attention is written for one")
    groups = key.shape[1]
    asked = query.view(groups, heads // groups, 1, head_dim).float()
    scores = (asked * key.view(groups, 1, -1, head_dim).float()).sum(-1) * (scaling or head_dim**-0.5)
    if attention_mask is not None:
        scores = scores + attention_mask.view(1, 1, -1).float()
    weights = torch.softmax(scores, -1)
    output = (weights[..., None] * value.view(groups, 1, -1, head_dim).float()).sum(-2)
    return output.view(1, 1, heads, head_dim).to(query.dtype), None


@contextmanager
def one_row(model: PreTrainedModel) -> Iterator[None]:
    """Write a model's linear layers and attention for one row while a ``with`` block lasts."""
    AttentionInterface.register(ATTENTION, one_query_attention)
    with ExitStack() as stack:
        stack.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(ATTENTION)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                stack.enter_context(patch.object(module, "forward", MethodType(one_row_linear, module)))
        yield
