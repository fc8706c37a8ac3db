"""A decode step's products, attention and functions, found without torch's dispatcher.

There each microsecond counts: to reach a function of Python through the dispatcher takes longer than to look up what a
product of one row needs, or to square a row.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from unittest.mock import patch

import torch

from kvbook.exact import rows

# What multiplies one row with a weight, or gives None where it does not serve. By the weight's identity, and only as
# long as the weight is there: what is offloaded comes as another tensor each time.
_known: dict[int, tuple[weakref.ref, Callable[..., torch.Tensor | None]]] = {}


def forget() -> None:
    """Let go of what was looked up, when the switch goes off."""
    _known.clear()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Multiply a single row with a weight whose product was prepared; None where it was not, or for more rows."""
    found = _known.get(id(weight))
    return None if found is None else found[1](x, weight, bias)


def prepared(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Look up all that the product of one row with a weight needs, and keep it."""
    # By its data, for a view of the weight itself would keep it alive.
    times, name, inner = rows.for_one(weight.data.t(), bias), id(weight), weight.shape[1]
    pointer, threads, biased = weight.data_ptr(), torch.get_num_threads(), bias is not None

    def its(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        if (
            not x.numel() == inner == x.shape[-1]
            # A module can be given other weights in place of these, and torch another number of threads.
            or weight.data_ptr() != pointer or torch.get_num_threads() != threads
            or biased is (bias is None) or torch.is_grad_enabled()
        ):
            return None
        return times(x, bias)

    _known[name] = weakref.ref(weight, lambda _: _known.pop(name, None)), its
    return times


def _watched(x: torch.Tensor) -> bool:
    """Tell whether somebody changes or watches what goes through the dispatcher: autocast, a mode of torch, a `vmap`.

    Or whether the dispatcher has something to do by itself: to negate what is kept as its negative.
    """
    return (
        # First: such a mode sees whatever a tensor is asked.
        torch._C._len_torch_function_stack() > 0 or torch._C._is_any_autocast_enabled() or x.is_neg()
        or torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.maybe_current_level() is not None
    )


def _linear(_ours: Callable[..., torch.Tensor], stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        # An attribute of a module takes longer to find.
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        out = None if _watched(x) else product(x, weight, bias)
        return stock(self, x) if out is None else out

    return forward


def _attention(ours: Callable[..., torch.Tensor], stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def attend(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        if len(arguments) > 2 and not any(map(_watched, arguments[:3])):
            query = arguments[0]
            if query.dim() == 4 and query.shape[2] == 1 and (query.is_cpu or query.is_cuda):
                return ours(*arguments, **options)
        return stock(*arguments, **options)

    return attend


_NOT_IN_PLACE = {"inplace": False}


def _function(ours: Callable[..., torch.Tensor], stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def function(*arguments: object, **options: object) -> torch.Tensor:
        x = arguments[0] if arguments else None
        directly = (
            type(x) is torch.Tensor and not _watched(x) and x.is_cpu
            and (len(arguments) == 1 or type(arguments[1]) in (int, float))
            and (not options or options == _NOT_IN_PLACE) and not torch.is_grad_enabled()
        )
        return ours(*arguments) if directly else stock(*arguments, **options)

    return function


# What each layer of a step calls, and where it looks for it: a norm's square and root are functions, and so is an
# activation. Functions serve longer texts too.
_CALLED = {
    "aten::linear": (_linear, torch.nn.Linear, "forward"),
    "aten::scaled_dot_product_attention": (_attention, torch.nn.functional, "scaled_dot_product_attention"),
    "aten::pow.Tensor_Scalar": (_function, torch.Tensor, "pow"),
    "aten::rsqrt": (_function, torch, "rsqrt"),
    "aten::silu": (_function, torch.nn.functional, "silu"),
}


@contextlib.contextmanager
def without_the_dispatcher(ours: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Let a step go past the dispatcher to our layers, attention and functions; what we do not have stays stock."""
    with contextlib.ExitStack() as stack:
        for operator, (wrap, owner, name) in _CALLED.items():
            if operator in ours:
                stack.enter_context(patch.object(owner, name, wrap(ours[operator], getattr(owner, name))))
        yield
