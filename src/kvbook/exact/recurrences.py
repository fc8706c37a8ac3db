"""Recurrent states: a text is read token by token, with the formula that a decode step has.

transformers reads a text in chunks and single tokens step by step, which are two formulas for one result.  Inside the
switch the first is replaced by a loop of the second.  What is not known here is refused when it is met.
"""

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import cache_utils

from kvbook.exact.kernels import Refusal, met

# Put on a state that a recurrence known here gave, so that one from elsewhere is noticed; with whether it began from
# nothing.
_MARK = "kvbook_anew"


def _marked(state: torch.Tensor, anew: bool = False) -> torch.Tensor:
    setattr(state, _MARK, anew)
    return state


def _mamba2(
    step, hidden_states, dt, A, B, C, *, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, math.inf), return_final_states=False, **_more,
):
    if tuple(dt_limit) != (0.0, math.inf):
        what = f"mamba2_chunk_scan with time steps within {dt_limit}"
        why = "to which transformers holds a text but no single token"
        raise met(f"{what}, {why}", "use a configuration with time_step_limit=(0, inf)")
    batch_size, length, heads, width = hidden_states.shape
    size = B.shape[-1]
    state = hidden_states.new_zeros(batch_size, heads, width, size, dtype=torch.float32)
    if initial_states is not None:
        state.copy_(initial_states)
    over_width = {"dt_bias": dt_bias[:, None].expand(-1, width), "D": D[:, None].expand(-1, width)}
    A = A[:, None, None].expand(-1, width, size)
    out = [
        step(state, hidden_states[:, i], dt[:, i, :, None].expand(-1, -1, width), A, B[:, i], C[:, i],
             z=None, dt_softplus=dt_softplus, **over_width)
        for i in range(length)
    ]
    out = torch.stack(out, 1)
    return (out, _marked(state)) if return_final_states else out


def _mamba(
    step, hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
    **_more
):
    batch_size, channels, length = hidden_states.shape
    state = hidden_states.new_zeros(batch_size, channels, A.shape[-1], dtype=torch.float32)
    out = [
        step(state, hidden_states[..., i], dt[..., i], A, B[..., i], C[..., i],
             # A step is given it as the layer holds it, a scan widened.
             None if D is None else D.to(hidden_states.dtype),
             z=None if z is None else z[..., i], dt_bias=delta_bias, dt_softplus=delta_softplus)
        for i in range(length)
    ]
    out = torch.stack(out, -1)
    return (out, _marked(state, anew=True)) if return_last_state else out


def _contiguous(x: Any) -> Any:
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _delta(step, *arguments, **options):
    # A sum along a row takes another order where the row is scattered, as it is after a convolution of several.
    options.pop("chunk_size", None)
    out, state = step(*map(_contiguous, arguments), **{key: _contiguous(x) for key, x in options.items()})
    return out, None if state is None else _marked(state)


# What reads a text, by its name in transformers' modules: what makes of it a loop of steps, and what reads a token.
_SCANS: dict[str, tuple[Callable[..., Any], str]] = {
    "mamba2_chunk_scan": (_mamba2, "mamba2_selective_state_update"),
    "mamba_selective_scan": (_mamba, "mamba_selective_state_update"),
    "torch_chunk_gated_delta_rule": (_delta, "torch_recurrent_gated_delta_rule"),
    "torch_recurrent_gated_delta_rule": (_delta, "torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": (_delta, "recurrent_kimi_delta_attention"),
    "recurrent_kimi_delta_attention": (_delta, "recurrent_kimi_delta_attention"),
}


class _Within(threading.local):
    """Whether the states of the class at work in this thread, which takes marks off, begin from nothing."""

    anew: bool | None = None


_within = _Within()


# What takes the place of a method is given the stock one first.


def _known(anew: bool, stock, *arguments, **options):
    """Trust a class whose states are not a scan's result: a row of the last token, or several results together."""
    with patch.object(_within, "anew", anew):
        return stock(*arguments, **options)


def _guarded(stock, self, recurrent_states: torch.Tensor, state_idx: int = 0, **options) -> torch.Tensor:
    anew = getattr(recurrent_states, _MARK, _within.anew)
    if anew is None:
        raise met("a recurrent state from a formula that it does not know", "leave the block for this model")
    held = self.recurrent_states[state_idx]
    if anew and held is not None and bool(held.any()):
        what = "mamba_selective_scan on top of a state, which transformers leaves out"
        raise met(what, "feed the text whole, or one token at a time")
    return stock(self, recurrent_states, state_idx=state_idx, **options)


_NO_CACHE = SimpleNamespace(get_linear_cache=lambda _layer: None, set_linear_cache=lambda _layer, _state: None)


def _token_by_token(stock, self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **more):
    """Begin linear attention with zeros, where the class would take another formula for no state."""
    cache = _NO_CACHE if past_key_values is None else past_key_values

    def held(layer: int) -> torch.Tensor:
        shape = (len(hidden_states), self.num_attention_heads, self.head_dim, self.head_dim)
        return hidden_states.new_zeros(shape) if (found := cache.get_linear_cache(layer)) is None else found

    from_zeros = SimpleNamespace(get_linear_cache=held, set_linear_cache=cache.set_linear_cache)
    return stock(self, hidden_states, position_embeddings, attention_mask, past_key_values=from_zeros, **more)


# A cache that hands back what it is given, in the dtype that a cache would have been given it in.
_AS_GIVEN = SimpleNamespace(update=lambda keys, values, _layer: (keys, values))


def _as_with_a_cache(stock, self, hidden_states, layer_past=None, *arguments, **options):
    """Round keys as they are for a cache also where there is none: CodeGen's are in 32 bits, whatever its dtype."""
    return stock(self, hidden_states, _AS_GIVEN if layer_past is None else layer_past, *arguments, **options)


def _relative_to_the_query(
    stock, self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **more
):
    """Feed MPT's attention a bias that is taken from the query that it belongs to.

    transformers counts MPT's bias from the last key that there is, and leaves it to the softmax to take the shift out
    again.  It does, but for rounding: the score that the bias is added to is rounded at another size for every number
    of keys.
    """
    length, layer, past, place = hidden_states.shape[1], self.layer_idx, past_key_values, position_bias.device
    held = 0 if past is None else int(past.get_seq_length(layer))
    keys = length if past is None else past.get_mask_sizes(length, layer)[0]
    query = torch.arange(held, held + length, device=place)[:, None]
    # The last entry but one is minus the slope times one.
    bias = -position_bias[:, :, -2:-1] * (torch.arange(keys, device=place) - query).to(position_bias.dtype)
    return stock(self, hidden_states, bias, past, attention_mask, **more)


# What takes the place of a class's forward.
_WRAPPED: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _token_by_token,
    "ZayaCCAProjection": functools.partial(_known, False),
    "ZambaMambaMixer": functools.partial(_known, True),
    "CodeGenAttention": _as_with_a_cache,
    "MptAttention": _relative_to_the_query,
    # Its text and its single tokens go through formulas of their own.
    "xLSTMModel": Refusal(
        "xLSTMModel", "whose cached pass is another formula than its full pass", "use a model without it"
    ),
}


def _in_place_of(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(*arguments, **options):
        return ours(stock, *arguments, **options)

    return method


def _is_modeling(name: str) -> bool:
    return name.startswith("transformers.models.") and ".modeling_" in name


def _replacements(module: ModuleType) -> Iterator[tuple[object, str, Callable[..., Any]]]:
    """List what to put where for one module."""
    held = vars(module)
    for scan in _SCANS.keys() & held.keys():
        ours, step = _SCANS[scan]
        yield module, scan, functools.partial(ours, getattr(module, step))
    for kind in _WRAPPED.keys() & held.keys():
        yield held[kind], "forward", _in_place_of(held[kind].forward, _WRAPPED[kind])


class _Replaced(contextlib.ExitStack, MetaPathFinder):
    """Puts back at its end what was replaced; what modules bring that are imported meanwhile is replaced too."""

    def __init__(self) -> None:
        super().__init__()
        # What was in the place of what is there now.
        self._stock: dict[Callable[..., Any], Callable[..., Any]] = {}

    def put(self, place: object, name: str, function: Callable[..., Any]) -> None:
        held = getattr(place, name)
        if held in self._stock:
            # Imported from a module where it is replaced already, or the same class once more.
            self.callback(setattr, place, name, self._stock[held])
        else:
            self._stock[function] = held
            self.enter_context(patch.object(place, name, function))

    def put_into(self, module: ModuleType) -> None:
        for replacement in list(_replacements(module)):
            self.put(*replacement)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Find a module of transformers as Python does, and replace in it what is known once it has been executed."""
        spec = PathFinder.find_spec(fullname, path, target) if _is_modeling(fullname) else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # What was found before the end may be executed after it.
            if self in sys.meta_path:
                self.put_into(module)

        spec.loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def token_by_token() -> Iterator[None]:
    """Read texts with the formula of a decode step, in transformers' classes, also in those imported meanwhile."""
    with _Replaced() as changed:
        # Older releases have no such class; there the switch is refused, unless it is asked for untried.
        if layer := getattr(cache_utils, "LinearAttentionLayer", None):
            changed.put(layer, "update_recurrent_state", _in_place_of(layer.update_recurrent_state, _guarded))
        for name, module in list(sys.modules.items()):
            if _is_modeling(name):
                changed.put_into(module)
        sys.meta_path.insert(0, changed)
        changed.callback(sys.meta_path.remove, changed)
        yield
