"""A decode step's products, attention and functions, found without torch's dispatcher.

There each microsecond counts: to reach a function of Python through the dispatcher takes longer than to look up what a
product of one row needs, or to square a row.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from kvbook.exact import rows


class _OneRow(NamedTuple):
    """What the product of one row with a layer's weight needs."""

    alive: weakref.ref
    # Gives None where it does not serve.
    times: Callable[..., torch.Tensor | None]


# By the weight's identity, and only as long as the weight is there: what is offloaded comes as another tensor each time.
_known: dict[int, _OneRow] = {}


def forget() -> None:
    """Let go of what was looked up, when the switch goes off."""
    _known.clear()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Multiply a single row with a weight whose product was prepared; None where it was not, or for more rows."""
    found = _known.get(id(weight))
    return None if found is None else found.times(x, weight, bias)


def prepared(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Look up all that the product of one row with a weight needs, and keep it."""
    # By its data, for a view of the weight itself would keep it alive.
    times, name, inner = rows.for_one(weight.data.t(), bias), id(weight), weight.shape[1]
    pointer, threads, biased = weight.data_ptr(), torch.get_num_threads(), bias is not None

    def its(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        if (
            not x.numel() == inner == x.shape[-1]
            # A module can be given other weights in place of these, and torch another number of threads.
            or weight.data_ptr() != pointer
            or torch.get_num_threads() != threads
            or biased is (bias is None)
            or torch.is_grad_enabled()
        ):
            return None
        return times(x, bias)

    _known[name] = _OneRow(weakref.ref(weight, lambda _: _known.pop(name, None)), its)
    return times


def _watched() -> bool:
    """Tell whether somebody changes or watches what goes through the dispatcher: autocast, a dispatch mode, a `vmap`."""
    return (
        torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
    )


# What each layer of a step calls, and where it looks for it: a norm's square and root, an activation.
_FUNCTIONS = {
    "aten::pow.Tensor_Scalar": (torch.Tensor, "pow"),
    "aten::rsqrt": (torch, "rsqrt"),
    "aten::silu": (torch.nn.functional, "silu"),
}

_NOT_IN_PLACE = {"inplace": False}


def _linear(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        # An attribute of a module takes longer to find.
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        out = None if _watched() else product(x, weight, bias)
        return stock(self, x) if out is None else out

    return forward


def _attention(ours: Callable[..., torch.Tensor], stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attend(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        query = arguments[0] if arguments else None
        a_step = query is not None and query.dim() == 4 and query.shape[2] == 1
        directly = a_step and (query.is_cpu or query.is_cuda) and not _watched()
        return (ours if directly else stock)(*arguments, **options)

    return attend


def _function(ours: Callable[..., torch.Tensor], stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        directly = (
            type(x) is torch.Tensor
            and x.is_cpu
            and (not arguments or type(arguments[0]) in (int, float))
            and (not options or options == _NOT_IN_PLACE)
            and not torch.is_grad_enabled()
            and not _watched()
        )
        return ours(x, *arguments) if directly else stock(x, *arguments, **options)

    return function


@contextlib.contextmanager
def without_the_dispatcher(replaced: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Let a step go past the dispatcher, to what replaces layers, attention and functions; those that are not stay stock."""
    places = {"aten::scaled_dot_product_attention": (torch.nn.functional, "scaled_dot_product_attention"), **_FUNCTIONS}
    with contextlib.ExitStack() as stock:
        for name, (owner, called) in places.items():
            if name in replaced:
                wrap = _function if name in _FUNCTIONS else _attention
                _put(stock, owner, called, wrap(replaced[name], getattr(owner, called)))
        if "aten::linear" in replaced:
            _put(stock, torch.nn.Linear, "forward", _linear(torch.nn.Linear.forward))
        yield


def _put(until: contextlib.ExitStack, owner: object, name: str, other: Callable[..., object]) -> None:
    """Set an attribute to another function until a stack is left."""
    here, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, other)
    until.callback(*((setattr, owner, name, before) if here else (delattr, owner, name)))
