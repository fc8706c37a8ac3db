"""A decode step as one call: `one_call.cpp`, for a model of Llama's build in bf16 on a CPU.

`kvbook.measuring.decoding` calls a compiled graph for every few layers, and the kernels in it read several rows of a
matrix at once.  Here one call reads all weights, each thread row after row.  It is an experiment: it tells how much of
a step's time is due to neither weights nor memory.
"""

import ctypes
from pathlib import Path

import torch
from transformers import PreTrainedModel, StaticCache

from kvbook import UserError, native

_SOURCE = Path(__file__).with_name("one_call.cpp")
_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
# Sums may be reordered: the order is ours. Not -ffast-math: with it the whole process flushes small numbers to 0.
_FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=fast")
# What the arrays of a thread have room for, there.
_WIDEST, _WIDEST_HEAD, _LONGEST, _MOST_THREADS = 2 * 8192, 256, 16384, 64


class _Layer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in (
        "norm", "query", "key", "value", "output", "second_norm", "gate", "up", "down", "keys", "values",
    )]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _NUMBER) for name in ("layers", "width", "inner", "heads", "groups", "head", "vocabulary", "room")),
        ("epsilon", _FLOAT), ("scale", _FLOAT), *((name, _POINTER) for name in ("embedding", "norm", "lm_head")),
    ]


def fits(model: PreTrainedModel) -> bool:
    """Tell whether a model is one that the step is written for."""
    config = model.config
    widths = (config.hidden_size, getattr(config, "intermediate_size", 0))
    return (
        type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.bfloat16 and model.device.type == "cpu"
        and config.hidden_act == "silu" and not (config.attention_bias or config.mlp_bias)
        and all(width % 16 == 0 and width <= _WIDEST for width in widths) and config.hidden_size <= _WIDEST // 2
        and config.head_dim <= _WIDEST_HEAD and config.num_attention_heads * config.head_dim % 16 == 0
    )


class OneCall:
    """Greedy decoding of one sequence with a static cache, a call a token.

    Weights are read where they are when `start` is called, so they must stay there.

    Parameters
    ----------
    model : PreTrainedModel
        See `fits`.
    room : int
        Tokens that the cache has room for.

    Raises
    ------
    UserError
        When the step is not written for the model, or cannot be compiled.
    """

    def __init__(self, model: PreTrainedModel, room: int) -> None:
        if not fits(model) or room > _LONGEST or torch.get_num_threads() > _MOST_THREADS:
            raise UserError(f"a step in one call is for models of Llama's build in bf16, not {type(model).__name__}")
        made = native.library(_SOURCE, *_FLAGS)
        if made is None:
            raise UserError("a step in one call takes a compiler of C++ (Debian: apt-get install g++)")
        self._call = made.kvbook_step
        self._call.restype = _NUMBER
        self._call.argtypes = [_POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER, ctypes.c_int]
        self._model, self._room = model, room

    def start(self, ids: torch.Tensor) -> int:
        """Run a prompt of shape (1, prompt_len) with the stock model, and give the first new token."""
        model, config = self._model, self._model.config
        self._cache, self._length = StaticCache(config=config, max_cache_len=self._room), ids.shape[1]
        logits = model(ids, past_key_values=self._cache, logits_to_keep=1).logits
        body, at = model.model, torch.Tensor.data_ptr
        self._layers = (_Layer * config.num_hidden_layers)(*(
            _Layer(*map(at, (
                layer.input_layernorm.weight, *(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkvo"),
                layer.post_attention_layernorm.weight,
                *(getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")), held.keys, held.values,
            )))
            for layer, held in zip(body.layers, self._cache.layers, strict=True)
        ))
        self._about = _Model(
            config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.vocab_size, self._room, config.rms_norm_eps,
            body.layers[0].self_attn.scaling, at(body.embed_tokens.weight), at(body.norm.weight),
            at(model.lm_head.weight),
        )
        places = torch.arange(self._room)[None]
        self._angles = [each[0].contiguous() for each in body.rotary_emb(body.embed_tokens.weight[None], places)]
        heads = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
        self._scratch = torch.empty(2 * config.hidden_size + heads + 2 * config.intermediate_size + config.vocab_size)
        return int(logits[0, -1].argmax())

    def close(self) -> None:
        """Forget the cache."""
        del self._cache, self._layers

    def step(self, token: int) -> int:
        """Feed a token, and give the next one: the largest logit, and of equal ones the first."""
        if self._length >= self._room:
            raise ValueError(f"the cache has room for {self._room} tokens")
        cosine, sine = (each[self._length].data_ptr() for each in self._angles)
        token = self._call(
            ctypes.byref(self._about), self._layers, token, self._length, cosine, sine, self._scratch.data_ptr(),
            torch.get_num_threads(),
        )
        self._length += 1
        return token
