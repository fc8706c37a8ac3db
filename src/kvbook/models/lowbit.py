"""Weights in 8 or 4 bits through bitsandbytes: what is asked of it, what it takes, and what it leaves alone.

Both kinds keep embeddings, norms and the output head in the model's own dtype and store the matrices of the linear
layers (GPT-2's ``Conv1D`` included, which transformers transposes on the way) in fewer bits:

``8bit``
    LLM.int8(): one byte an element and one scale a row; inputs are cast to fp16 and rounded to 8 bits for the product.
``4bit``
    FP4, bitsandbytes' default and so that of the document blog-past: half a byte an element and an fp32 scale for every
    64; weights are unpacked for the product, which is asked for in the model's dtype and runs in bf16 on a CPU with
    AVX512-BF16.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvbook import UserError
from kvbook.models import placement

Quantization = Literal["none", "8bit", "4bit"]

# Bytes an element of a linear layer's weight; in 4 bits with its share of a scale of 4 bytes for every 64 elements.
_BYTES = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}
_LIBRARIES = ("bitsandbytes", "accelerate")


def check(quantization: str, dtype: str = "float32") -> None:
    """Refuse a quantization that is unknown, that a dtype has none of, or whose libraries are missing."""
    if quantization not in ("none", *_BYTES):
        raise UserError(f"quantization {quantization!r} is unknown: use 'none', {', '.join(map(repr, _BYTES))}")
    if quantization == "4bit" and dtype == "float64":
        raise UserError("quantization '4bit' takes float32, float16 or bfloat16, not float64: choose one or drop 4bit")
    if quantization != "none":
        placement.need(f"quantization {quantization!r}", *_LIBRARIES, otherwise=", or leave quantization at 'none'")


def identity(quantization: str) -> dict[str, str]:
    """Name the quantization and the library that does it, for a run's record; nothing where there is none."""
    return {} if quantization == "none" else {"quantization": quantization, "bitsandbytes": version("bitsandbytes")}


def _linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the linear layers that a quantization is to replace: all but those of the output head, tied or not."""
    head = model.get_output_embeddings()
    named = dict(model.named_modules())
    top = next((name.partition(".")[0] for name, module in named.items() if module is head), None)
    for name, module in named.items():
        if isinstance(module, nn.Linear | Conv1D) and name.partition(".")[0] != top:
            yield module


def bytes_needed(model: PreTrainedModel, quantization: str, dtype: torch.dtype) -> float:
    """Predict the bytes that a model's weights take."""
    every = sum(p.numel() for p in model.parameters())
    quantized = 0 if quantization == "none" else sum(layer.weight.numel() for layer in _linears(model))
    return quantized * _BYTES.get(quantization, 0) + (every - quantized) * dtype.itemsize


def options(quantization: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what `from_pretrained` takes for a quantization; nothing for ``"none"``."""
    if quantization == "none":
        return {}
    how = {"load_in_8bit": True} if quantization == "8bit" else {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(**how)}


def every_linear_found(quantization: str) -> AbstractContextManager[None]:
    """Let the replacement find Falcon's linear layers, without bitsandbytes' remarks, while a model loads.

    transformers replaces modules whose type is exactly ``nn.Linear``.  Falcon's are of a subclass, which only adds its
    bias in a step of its own, so a Falcon that is asked for in 4 bits comes back unquantized and without a word
    (transformers 5.23).  While this is open, Falcon's class is ``nn.Linear`` itself.
    """
    if quantization == "none":
        return nullcontext()
    from transformers.models.falcon import modeling_falcon

    # "inputs will be cast", once a layer and call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return patch.object(modeling_falcon, "FalconLinear", nn.Linear)


def refuse_untouched(model: PreTrainedModel, name: str, quantization: str) -> None:
    """Refuse a model of which a linear layer was left as it was, which transformers itself would not say."""
    if quantization == "none":
        return
    if left := [type(layer).__name__ for layer in _linears(model) if layer.weight.is_floating_point()]:
        said = f"{len(left)} linear layers were not quantized ({left[0]})"
        raise UserError(f"{name}: {said}: use quantization='none' for this architecture")
