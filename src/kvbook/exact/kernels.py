"""torch's own kernels, called past whatever is registered over them, and the errors of this package."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from kvbook import UserError


class NotInvariant(UserError):
    """An operation cannot be made row-invariant; the message names it and says what to do."""


def met(what: str, remedy: str) -> NotInvariant:
    """Make the error for something that is not made invariant."""
    return NotInvariant(f"row_invariant() met {what}: {remedy}")


@dataclass(frozen=True, eq=False)
class Refusal:
    """Stands for what cannot be made row-invariant."""

    name: str
    reason: str = "which it cannot make row-invariant"
    remedy: str = "leave the block for this operation, or use a model without it"

    def __call__(self, *_arguments: object, **_options: object) -> NoReturn:
        """Raise, whatever was asked."""
        raise met(f"{self.name}, {self.reason}", self.remedy)


@functools.cache
def base(operator: str, key: str) -> Callable[..., object]:
    """Return the kernel that torch brings for an operator.

    Parameters
    ----------
    operator : str
        Such as ``aten::mm``; with its overload, such as ``aten::mean.dim``.
    key : str
        Dispatch key, ``CPU`` or ``CUDA``.

    Notes
    -----
    Must be called before anything is registered over the operator; the result stays what it was.
    """
    kernel = torch.library.get_kernel(operator, key)
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))


def key_of(tensor: torch.Tensor) -> str:
    """Return the dispatch key of a tensor's device."""
    return "CUDA" if tensor.is_cuda else "CPU"


def no_gradients(operator: str, *tensors: torch.Tensor | None) -> None:
    """Refuse to run where a gradient would be asked for: only the forward pass is made invariant.

    Raises
    ------
    NotInvariant
        When autograd is on and one of the tensors wants a gradient.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        remedy = "put the forward pass under torch.inference_mode() or torch.no_grad()"
        raise NotInvariant(f"row_invariant() has no backward pass ({operator} wants a gradient): {remedy}")


def draw(shape: tuple[int, ...], seed: int, scale: float = 1.0, used_in: torch.dtype | None = None) -> torch.Tensor:
    """Draw normal numbers on the host, without touching the caller's random state.

    In 32 bits, but in 64 for use in 64: there products of 32-bit numbers are exact, and would not tell whether a
    product is rounded before it is added.
    """
    dtype = torch.float64 if used_in == torch.float64 else torch.float32
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale


def pairs(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pair the indices 0 to size - 1 at random; an odd one is left out.

    Notes
    -----
    What is summed in 32 bits and then rounded to 16 hides nearly every difference between two orders of addition: it
    would take a hundred thousand numbers to see one. So kernels are compared on sums that are zero, pair by pair: what
    is left is the rounding error alone, and 16 bits hold all of its leading ones.
    """
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    half = size // 2
    return order[:half], order[half : 2 * half]


def spread(count: int) -> torch.Tensor:
    """Return powers of two from 1/64 to 64, so that even a short sum of such terms is rounded on the way."""
    return 2.0 ** torch.linspace(-6, 6, count).round()


def cancel(x: torch.Tensor, weight: torch.Tensor, seed: int) -> None:
    """Change rows of equal length, in place, so that the products of any row with any row of `weight` sum to zero.

    Each product meets its negative, see `pairs`.
    """
    size = x.shape[-1]
    plus, minus = pairs(size, seed)
    x[..., plus] *= spread(len(plus))
    x[..., minus], weight[..., minus] = -x[..., plus], weight[..., plus]
    if size % 2:
        x[..., torch.ones(size, dtype=torch.bool).index_fill_(0, torch.cat([plus, minus]), False)] = 0
