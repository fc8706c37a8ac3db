"""One decode loop for every kind of cache, eager or compiled, so that nothing else differs between two of them.

The loop is the stock model's own: its embedding, its rotary embedding, its layers, its norm and its head.  What is
compiled is a few neighbouring layers, once for all such groups (weights and caches are arguments), and the head: a
compilation takes seconds, where a graph of all layers takes a minute.  Every call of a compiled function costs tens of
microseconds, which a few layers at a time share.  With ``scope="model"`` the stock model's whole forward is compiled
instead, which is what a GPU needs, where launching kernels is the cost.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from kvbook import UserError
from kvbook.measuring import caches, choosing, large_pages

CacheKind = Literal["none", "dynamic", "static"]
Scope = Literal["layer", "model"]
# The name under which transformers' attention interface finds `one_query_attention`.
ATTENTION = "kvbook_one_query"


@dataclass(frozen=True)
class Way:
    """How tokens are decoded.

    Attributes
    ----------
    cache : {"none", "dynamic", "static"}
        Everything again, or keys and values that grow, or that fill a preallocated room.
    compiled : bool
        Whether `torch.compile` is used.
    one_row : bool
        Whether the step's operations are written for one row, see `one_row`.
    large_pages : bool
        Whether a step reads copies of the weights on large pages (`kvbook.measuring.large_pages`).
    """

    cache: CacheKind
    compiled: bool = False
    one_row: bool = False
    large_pages: bool = False

    def __str__(self) -> str:
        """Name the way for people."""
        form = "one-row form, " if self.one_row else ""
        pages = ", large pages" if self.large_pages else ""
        return f"{self.cache}, {form}{'compiled' if self.compiled else 'eager'}{pages}"


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
    """Write a model's linear layers and attention for one row while a ``with`` block lasts.

    A decode step feeds one token, so each of its matrix products is a matrix times a vector and its attention has one
    query: both read every number once and do next to nothing with it.  General kernels are made for many rows.  Written
    as a multiplication and a sum in fp32, the same step becomes loops that a compiler fuses with what stands around
    them, and that run at the speed of memory.  Without a compiler this form is slow; it is only for `torch.compile`.
    """
    AttentionInterface.register(ATTENTION, one_query_attention)
    with ExitStack() as stack:
        stack.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(ATTENTION)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                stack.enter_context(patch.object(module, "forward", MethodType(one_row_linear, module)))
        yield


class _OfLayer:
    """One layer's cache, in the form in which a layer asks for it; the layer's number does not matter to it."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.held.update(keys, values)


# Layers that are compiled together, at most: more of them save little more and take longer to compile.
MOST_TOGETHER = 5


def together(n_layers: int) -> int:
    """Return how many layers are compiled together: at most five, and so that equal groups make up the whole."""
    return next(size for size in range(MOST_TOGETHER, 0, -1) if n_layers % size == 0)


def _layers_step(
    layers: Sequence[nn.Module], hidden: torch.Tensor, mask: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
    held: Sequence[Any],
) -> torch.Tensor:
    for layer, of_layer in zip(layers, held, strict=True):
        cache = None if of_layer is None else _OfLayer(of_layer)
        hidden = layer(hidden, attention_mask=mask, position_embeddings=(cos, sin), past_key_values=cache)
    return hidden


def _head_step(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    return choosing.greedy(model.lm_head(model.model.norm(hidden[:, -1:])))


class Decoder:
    """Greedy decoding of one sequence, step by step, in one `Way`.

    The one-row form changes the model from `start` to `close`.

    Parameters
    ----------
    model : PreTrainedModel
        A stock decoder in evaluation mode; with ``scope="layer"`` of Llama's build (Llama, SmolLM2, Qwen2, ...).
    way : Way
        What to do.
    room : int
        Tokens that a static cache has room for.
    scope : {"layer", "model"}
        What is compiled.

    Raises
    ------
    UserError
        When the model is not built as the scope needs it.
    """

    def __init__(self, model: PreTrainedModel, way: Way, room: int, scope: Scope = "layer") -> None:
        body = getattr(model, "model", None)
        parts = ("embed_tokens", "rotary_emb", "layers", "norm")
        if scope == "layer" and not all(hasattr(body, part) for part in parts):
            raise UserError(f"{type(model).__name__} is not built as Llama is: compile it whole, with scope=model")
        if way.one_row and (way.cache == "none" or scope == "model"):
            raise UserError("the one-row form is for a cached step compiled layer by layer: choose scope=layer")
        self._model, self._way, self._room, self._scope = model, way, room, scope
        self._changes = ExitStack()
        self._pages = large_pages.LargePages(model) if way.large_pages else None
        self._ids: torch.Tensor | None = None
        # The cache as it stands, or None where there is none.
        self.cache: Cache | None = None
        self._grouped: list[tuple[list[nn.Module], list[Any]]] | None = None
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._hidden: torch.Tensor | None = None
        self._length = 0
        self._settled = False
        self._layers, self._head, self._forward = _layers_step, _head_step, model.forward
        if way.compiled:
            # The first graph is already for any length where lengths grow.
            options: dict[str, Any] = {"fullgraph": True, "dynamic": way.cache != "static"}
            if scope == "layer":
                # A graph would assert the shape and strides of every weight at every call: 3 % of the fastest way's
                # step.
                graph: dict[str, Any] = {"size_asserts": False}
                if way.one_row:
                    # A product and a sum in one instruction, which rounds once: the one-row form adds up in its own
                    # order anyway.
                    graph["cpp.enable_floating_point_contract_flag"] = "fast"
                self._layers = torch.compile(_layers_step, options=graph, **options)
                self._head = torch.compile(_head_step, fullgraph=True, dynamic=False, options=graph)
            else:
                # On a GPU the steps' kernels are replayed as one CUDA graph; other devices have none.
                mode = "reduce-overhead" if model.device.type == "cuda" and way.cache == "static" else "default"
                self._forward = torch.compile(model.forward, mode=mode, **options)

    def close(self) -> None:
        """Put the model back as it was; `start` may be called again."""
        self._changes.close()

    def resume(self, ids: torch.Tensor) -> None:
        """Continue after these tokens without running them, which is possible where nothing is kept of them.

        Parameters
        ----------
        ids : Tensor of int64, shape (1, seq_len)
            All tokens before the next one.

        Raises
        ------
        ValueError
            When there is a cache to fill.
        """
        if self._way.cache != "none":
            raise ValueError("a cache must be filled: call start")
        self._ids = ids

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the prompt, eagerly and with the stock model, and give the first new token.

        Parameters
        ----------
        ids : Tensor of int64, shape (1, prompt_len)
            The prompt.

        Returns
        -------
        Tensor of int64, shape (1, 1)
        """
        self.close()
        self._length, self._settled = ids.shape[1], False
        if self._way.cache == "none":
            self._ids = ids
            return choosing.greedy(self._model(ids, use_cache=False).logits[:, -1:])
        if self._way.cache == "static" and self.cache is not None:
            # The same memory again: a graph that was compiled for its addresses stays valid.
            self.cache.reset()
        else:
            self.cache = caches.make(self._way.cache, self._model.config, self._room)
        self._grouped = self._hidden = None
        token = choosing.greedy(self._model(ids, past_key_values=self.cache).logits[:, -1:])
        if self._pages is not None:
            self._changes.enter_context(self._pages.used())
        if self._way.one_row:
            self._changes.enter_context(one_row(self._model))
        if self._scope == "layer":
            self._forget_addresses()
        return token

    def _forget_addresses(self) -> None:
        # transformers marks a static cache's tensors as never moving, and a graph is then compiled for each layer's own
        # addresses. Here one graph serves all groups of layers.
        if self._way.cache == "static":
            for layer in self.cache.layers:
                for tensor in (layer.keys, layer.values, layer.cumulative_length):
                    tensor.__dict__.pop("_dynamo_static_input_type", None)

    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Feed one token and give the next.

        Parameters
        ----------
        token : Tensor of int64, shape (1, 1)
            The one that the last call gave.

        Returns
        -------
        Tensor of int64, shape (1, 1)
        """
        if self._way.cache == "none":
            self._ids = torch.cat([self._ids, token], 1)
            token = self._ids
        if self._scope == "model":
            options = {"use_cache": False} if self.cache is None else {"past_key_values": self.cache}
            return choosing.greedy(self._forward(token, **options).logits[:, -1:])
        hidden = self._model.model.embed_tokens(token)
        first = 0 if self.cache is None else self._length
        cos, sin = (angles[:, first : first + token.shape[1]] for angles in self._rotary(hidden))
        mask = self._mask(hidden.dtype)
        with self._guards():
            for layers, held in self._groups():
                hidden = self._layers(layers, hidden, mask, cos, sin, held)
            following = self._head(self._model, hidden)
        self._length, self._settled = self._length + 1, True
        return following

    def _groups(self) -> list[tuple[list[nn.Module], list[Any]]]:
        """Return the layers that are computed together, with their caches; what a step needs and no step changes."""
        if self._grouped is None:
            layers = list(self._model.model.layers)
            # Without a cache a step takes long enough for the price of its calls not to matter, and longer to compile.
            held, size = ([None] * len(layers), 1) if self.cache is None else (self.cache.layers, together(len(layers)))
            groups = (slice(first, first + size) for first in range(0, len(layers), size))
            self._grouped = [(layers[group], held[group]) for group in groups]
        return self._grouped

    def _rotary(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of all positions that there is room for."""
        if self._angles is None:
            self._angles = self._model.model.rotary_emb(hidden, torch.arange(self._room, device=hidden.device)[None])
        return self._angles

    def _guards(self) -> AbstractContextManager[Any]:
        # A compiled function asks at every call whether its graph still fits. Behind a static cache's first step all
        # groups have been asked, and neither shapes nor tensors change until the next `start`; lengths that grow are
        # asked again.
        if self._way.compiled and self._way.cache == "static" and self._settled:
            return torch.compiler.set_stance(skip_guard_eval_unsafe=True)
        return nullcontext()

    def _mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Hide the empty places of a static cache; elsewhere every key is for the token."""
        if self._way.cache != "static":
            return None
        if self._hidden is None:
            shape, lowest = (1, 1, 1, self._room), torch.finfo(dtype).min
            self._hidden = torch.full(shape, lowest, dtype=dtype, device=self._model.device)
        self._hidden[..., : self._length + 1] = 0
        return self._hidden
