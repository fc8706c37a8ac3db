"""A model's answer in double precision throughout, and how far two passes of the model itself are from it.

The reference has the weights of the model under test, as that model holds them: what is compared is arithmetic alone.  To
load a model in fp64 is not enough.  transformers' norms, softmaxes and rotary tables ask for fp32 by name, whatever the
model's dtype, and a Llama that was loaded in fp64 is therefore off by roundings of fp32; it has to be run under
`kvbook.measuring.in_fp64.widened`.
"""

import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvbook.models import placement


def in_double_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model with its weights as they are, in fp64; run the copy under `widened`."""
    placement.dtype_on("float64", model.device)
    placement.check_memory("the fp64 reference", 8 * model.num_parameters(), model.device)
    return copy.deepcopy(model).double()


@dataclass(frozen=True)
class Errors:
    """Two computations of the same vectors against the truth, each vector in units of the true one's length.

    With e and f the two errors, ``apart ** 2 = first ** 2 + second ** 2 - 2 * correlation * first * second``: two
    errors that have nothing in common, of one size, are the square root of 2 as far apart as either is from the truth.

    Attributes
    ----------
    first, second : Tensor of float64
        Length of the error.
    apart : Tensor of float64
        Length of the difference of the two.
    correlation : Tensor of float64
        Cosine of the angle between the two errors; NaN where one of them is zero.
    """

    first: torch.Tensor
    second: torch.Tensor
    apart: torch.Tensor
    correlation: torch.Tensor


def errors(truth: torch.Tensor, first: torch.Tensor, second: torch.Tensor, pooled: bool = False) -> Errors:
    """Hold two computations against the truth."""
    length = truth.double().norm(dim=-1, keepdim=True)
    of_first, of_second = ((other.double() - truth.double()) / length for other in (first, second))
    squares = [
        of_first.square().sum(-1),
        of_second.square().sum(-1),
        ((first.double() - second.double()) / length).square().sum(-1),
        (of_first * of_second).sum(-1),
    ]
    if pooled:
        squares = [square.mean(-1) for square in squares]
    return Errors(*(square.sqrt() for square in squares[:3]), squares[3] / (squares[0] * squares[1]).sqrt())
