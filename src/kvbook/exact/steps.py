"""A decode step's products and attention, looked up once and then found without torch's dispatcher.

There each microsecond counts: to reach a function of Python through the dispatcher takes longer than to look up what a
product of one row needs.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from kvbook.exact import rows
from kvbook.exact.attention_kernel import KERNELS


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
    """Tell whether somebody changes or watches what goes through the dispatcher: autocast, or a dispatch mode."""
    cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return cast or torch._C._len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def without_the_dispatcher(replaced: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Let layers and attention go past the dispatcher in a step, to what replaces them; those that are not stay stock."""
    ours = replaced.get("aten::scaled_dot_product_attention")
    linear, attend = torch.nn.Linear.forward, torch.nn.functional.scaled_dot_product_attention

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = None if _watched() else product(x, self.weight, self.bias)
        return linear(self, x) if out is None else out

    def attend_directly(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        query = arguments[0] if arguments else None
        a_step = query is not None and query.dim() == 4 and query.shape[2] == 1
        directly = a_step and query.device.type.upper() in KERNELS and not _watched()
        return (ours if directly else attend)(*arguments, **options)

    if "aten::linear" in replaced:
        torch.nn.Linear.forward = forward
    if ours is not None:
        torch.nn.functional.scaled_dot_product_attention = attend_directly
    try:
        yield
    finally:
        torch.nn.Linear.forward, torch.nn.functional.scaled_dot_product_attention = linear, attend
