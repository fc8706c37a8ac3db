"""How far two computations of the same thing are apart.

Never a bare "same": bits equal, tokens equal, or within x.  Differences are taken in float64, where those of two
numbers of 32 bits or less are exact or as good as exact, so the measure adds no rounding of its own.
"""

from dataclasses import dataclass

import torch

from kvbook.measuring import choosing


@dataclass(frozen=True)
class Drift:
    """Difference of two tensors, over their last dimension.

    Attributes
    ----------
    max_abs : Tensor of float64
        Largest absolute difference.
    rms : Tensor of float64
        Root mean square of the difference.
    reference_rms : Tensor of float64
        Root mean square of the first tensor.
    differing_share : Tensor of float64
        Share of elements whose values differ; 0 means that all are equal, bit for bit but for the sign of zero.
    """

    max_abs: torch.Tensor
    rms: torch.Tensor
    reference_rms: torch.Tensor
    differing_share: torch.Tensor

    @property
    def relative_rms(self) -> torch.Tensor:
        """Drift without a scale: `rms` over `reference_rms`."""
        return self.rms / self.reference_rms


def drift(reference: torch.Tensor, other: torch.Tensor) -> Drift:
    """Compare two tensors along their last dimension.

    Parameters
    ----------
    reference, other : Tensor, shape (..., n)
        Two computations of the same numbers.

    Returns
    -------
    Drift
        Each entry of shape (...).

    Raises
    ------
    ValueError
        When the shapes differ: broadcasting would compare what does not belong together.
    """
    if reference.shape != other.shape:
        raise ValueError(f"shapes differ: {tuple(reference.shape)} and {tuple(other.shape)}")
    first, second = reference.double(), other.double()
    difference = first - second
    return Drift(
        max_abs=difference.abs().amax(-1), rms=difference.square().mean(-1).sqrt(),
        reference_rms=first.square().mean(-1).sqrt(), differing_share=(difference != 0).double().mean(-1),
    )


def over_spread(reference: torch.Tensor, other: torch.Tensor, spread: torch.Tensor | float) -> torch.Tensor:
    """Measure drift over the spread of the reference, along the last dimension.

    Parameters
    ----------
    reference, other : Tensor, shape (..., n)
        Two computations of the same numbers.
    spread : Tensor of float64, shape (...), or float
        What the root mean square difference is divided by.

    Returns
    -------
    Tensor of float64, shape (...)
        0 where all elements are equal, whatever the spread; infinite where only the other is not finite, NaN where the
        reference is not.
    """
    reference, other = reference.cpu(), other.cpu()
    rms = drift(reference, other).rms
    share = (rms / spread).where(rms != 0, 0.0).where(other.isfinite().all(-1), torch.inf)
    return share.where(reference.isfinite().all(-1), torch.nan)


@dataclass(frozen=True)
class Decision:
    """What a difference of logits means for the next token.

    Attributes
    ----------
    kl_nats : float
        Kullback-Leibler divergence of the other distribution from the reference, in nats.
    top1_flip : bool
        Whether the most probable token is another one.
    margin : float
        Reference logit of its most probable token minus that of the second.
    """

    kl_nats: float
    top1_flip: bool
    margin: float


def decision(reference: torch.Tensor, other: torch.Tensor) -> Decision:
    """Compare two vectors of logits as distributions and as greedy choices.

    Parameters
    ----------
    reference, other : Tensor, shape (vocabulary_size,)
        Logits.
    """
    first, second = torch.log_softmax(reference.double(), -1), torch.log_softmax(other.double(), -1)
    return Decision(
        # Rounding can leave a divergence of equal distributions a hair below zero.
        kl_nats=(first.exp() * (first - second)).sum().clamp(min=0).item(),
        top1_flip=bool(choosing.greedy(reference) != choosing.greedy(other)),
        margin=choosing.margin(reference.double()).item(),
    )


def _bits_of(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if reference.shape != other.shape or reference.dtype != other.dtype:
        raise ValueError(f"{tuple(reference.shape)} {reference.dtype} against {tuple(other.shape)} {other.dtype}")
    # Signed and as wide as the dtype: the bits of a float, read as one of these, count the numbers from zero on.
    integers = getattr(torch, f"int{8 * reference.dtype.itemsize}")
    return reference.contiguous().view(integers), other.contiguous().view(integers)


def bits_equal(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compare two floating-point tensors bit by bit: 0 and -0 differ, and a NaN equals itself.

    Parameters
    ----------
    reference, other : Tensor, shape (...)
        Of one shape and dtype.

    Returns
    -------
    Tensor of bool, shape (...)

    Raises
    ------
    ValueError
        When shapes or dtypes differ.
    """
    one, two = _bits_of(reference, other)
    return one == two


def ulps(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Count the representable numbers between two computations of each element: 0 is equal, 1 is the next number.

    Near zero numbers lie close, so one element that cancels can be many ulps off by next to nothing: read the median.

    Parameters
    ----------
    reference, other : Tensor, shape (...)
        Of one floating dtype, finite.

    Returns
    -------
    Tensor of int64, shape (...)
        Both zeros count as one number.

    Raises
    ------
    ValueError
        When shapes or dtypes differ.
    """
    sign = -(1 << (8 * reference.element_size() - 1))
    # A float is sign and magnitude, an integer two's complement: below zero the order of the bits runs backwards.
    places = (torch.where(bits < 0, sign - bits.long(), bits.long()) for bits in _bits_of(reference, other))
    return (next(places) - next(places)).abs()
