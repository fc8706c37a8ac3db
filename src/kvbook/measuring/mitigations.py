"""The five mitigations that issue 25420 tried on Llama, as switches on a stock model.

The issue names them in a line each and shows no code; what we take each to mean:

``attention linears``
    The query, key, value and output projections of the attention multiply in fp32 (16-bit weights and inputs are
    converted) and round their result to the model's dtype once.
``whole attention``
    The attention module runs in fp32, its projections and what it writes to the cache included; its result is rounded.
``rotary``
    Sines, cosines and the rotation of queries and keys are in fp32; rotated queries and keys are rounded.
``input norm``, ``post-attention norm``
    The norm before the attention, or before the MLP, runs in fp32 to the end, its weight's product included, and its
    result is rounded.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from kvbook import UserError

STOCK = "stock"
NAMES = (STOCK, "attention linears", "whole attention", "rotary", "input norm", "post-attention norm")

# An object, the name of its attribute, and what takes its place.
Patch = tuple[Any, str, Callable]


def supported(architecture: str) -> bool:
    """Tell whether the switches fit: they name the modules of Llama's classes, which Qwen2 shares."""
    return architecture in ("llama", "qwen2", "mistral")


def _projections(attention: nn.Module) -> tuple[nn.Linear, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj


def _linear_in_fp32(module: nn.Linear, rounds: bool = True) -> Patch:
    weight = module.weight.float()
    bias = None if module.bias is None else module.bias.float()
    return module, "forward", lambda x: linear(x.float(), weight, bias).to(x.dtype if rounds else torch.float32)


def _norm_in_fp32(module: nn.Module) -> Patch:
    weight, epsilon = module.weight.float(), module.variance_epsilon

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)

    return module, "forward", forward


def _attention_in_fp32(module: nn.Module) -> list[Patch]:
    stock = module.forward

    def forward(hidden_states: torch.Tensor, position_embeddings=None, attention_mask=None, **rest):
        wide = tuple(part.float() for part in position_embeddings)
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        output, scores = stock(
            hidden_states=hidden_states.float(), position_embeddings=wide, attention_mask=attention_mask, **rest
        )
        return output.to(hidden_states.dtype), scores

    return [(module, "forward", forward), *(_linear_in_fp32(each, rounds=False) for each in _projections(module))]


def _rotary_in_fp32(model: PreTrainedModel) -> list[Patch]:
    embedding = model.model.rotary_emb
    stock_embedding = embedding.forward
    module: ModuleType = sys.modules[type(model.model.layers[0].self_attn).__module__]
    stock_apply = module.apply_rotary_pos_emb

    def forward(x: torch.Tensor, *rest, **named) -> tuple[torch.Tensor, torch.Tensor]:
        # It computes in fp32 and rounds to its first argument's dtype.
        return stock_embedding(x.float(), *rest, **named)

    def apply(q: torch.Tensor, k: torch.Tensor, *rest, **named) -> tuple[torch.Tensor, torch.Tensor]:
        wide_q, wide_k = stock_apply(q.float(), k.float(), *rest, **named)
        return wide_q.to(q.dtype), wide_k.to(k.dtype)

    return [(embedding, "forward", forward), (module, "apply_rotary_pos_emb", apply)]


# What each mitigation replaces in a layer.
_IN_A_LAYER: dict[str, Callable[[nn.Module], list[Patch]]] = {
    STOCK: lambda _layer: [],
    "attention linears": lambda layer: [_linear_in_fp32(each) for each in _projections(layer.self_attn)],
    "whole attention": lambda layer: _attention_in_fp32(layer.self_attn),
    "input norm": lambda layer: [_norm_in_fp32(layer.input_layernorm)],
    "post-attention norm": lambda layer: [_norm_in_fp32(layer.post_attention_layernorm)],
}


def prepare(model: PreTrainedModel, name: str) -> list[Patch]:
    """Build a mitigation's replacements, fp32 copies of weights included, without switching it on."""
    if not supported(model.config.model_type):
        raise UserError(f"the mitigations of issue 25420 are Llama's; {model.config.model_type} has other modules")
    if name not in NAMES:
        raise UserError(f"no mitigation {name!r}: choose one of {', '.join(NAMES)}")
    if name == "rotary":
        return _rotary_in_fp32(model)
    return [patch for layer in model.model.layers for patch in _IN_A_LAYER[name](layer)]


@contextmanager
def applied(patches: list[Patch]) -> Iterator[None]:
    """Switch a prepared mitigation on for the length of a ``with`` block; everything is put back, also after an error.

    Not safe in threads: what it replaces belongs to the model, and for ``rotary`` to the model's module.
    """
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield
