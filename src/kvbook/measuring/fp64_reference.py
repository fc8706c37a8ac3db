"""A model's answer in double precision throughout, and how far two passes of the model itself are from it.

The reference has the weights of the model under test, as that model holds them: what is compared is arithmetic alone.
To load a model in fp64 is not enough.  transformers' norms, softmaxes and rotary tables ask for fp32 by name, whatever
the model's dtype, and a Llama that was loaded in fp64 is therefore off by roundings of fp32; it has to be run under
`kvbook.measuring.in_fp64.widened`.
"""

import copy
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from kvbook.models import placement


def in_double_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model with its weights as they are, in fp64; run the copy under `widened`."""
    placement.dtype_on("float64", model.device)
    placement.check_memory("the fp64 reference", 8 * model.num_parameters(), model.device)
    return copy.deepcopy(model).double()


Answer = TypeVar("Answer", bound=tuple[torch.Tensor, ...])


class Reference:
    """One model's answers in fp64, a text's computed once for all dtypes that hold the same numbers.

    Weights that a dtype cannot hold are rounded to others, whose answer is another: then it is computed for that dtype.
    The stand-ins' weights are numbers of bf16, which fp32 holds too; those of the trained model are not.

    Parameters
    ----------
    dtypes : iterable of str
        In which the model will be under test.

    Attributes
    ----------
    model : PreTrainedModel or None
        The copy that answers.
    """

    # Of answers that are kept for another dtype; what is beyond is computed again.
    LIMIT_BYTES = 1e9

    def __init__(self, dtypes: Iterable[str]) -> None:
        self._dtypes = [getattr(torch, name) for name in dtypes]
        self.model: PreTrainedModel | None = None
        self._answers: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        self._shared = False

    def take(self, model: PreTrainedModel) -> None:
        """Answer for this model from now on."""
        if self.model is not None and _same_numbers(self.model, model):
            return
        # Before the next copy, so that there are never two.
        self.model, self._answers = None, {}
        self.model = in_double_precision(model)
        others = (dtype for dtype in self._dtypes if dtype != model.dtype)
        self._shared = any(_holds(dtype, self.model) for dtype in others)

    def of(self, text: Hashable, answer: Callable[[PreTrainedModel], Answer]) -> Answer:
        """Return the answer to a text; to be asked for under `widened` and ``torch.inference_mode``."""
        if text in self._answers:
            return self._answers[text]
        found = answer(self.model)
        held = (tensor for tensors in (*self._answers.values(), found) for tensor in tensors)
        if self._shared and sum(tensor.nbytes for tensor in held) <= self.LIMIT_BYTES:
            self._answers[text] = found
        return found


def _numbers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _same_numbers(copied: PreTrainedModel, model: PreTrainedModel) -> bool:
    ours, theirs = _numbers(copied), _numbers(model)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name].to(ours[name])) for name in ours)


def _holds(dtype: torch.dtype, copied: PreTrainedModel) -> bool:
    """Tell whether a dtype can hold a model's weights as they are."""
    return all(torch.equal(weight.to(dtype).to(weight), weight) for weight in copied.parameters())


class Errors(NamedTuple):
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
    apart = (first.double() - second.double()) / length
    pairs = ((of_first, of_first), (of_second, of_second), (apart, apart), (of_first, of_second))
    one, two, difference, product = ((x * y).sum(-1).mean(-1) if pooled else (x * y).sum(-1) for x, y in pairs)
    return Errors(one.sqrt(), two.sqrt(), difference.sqrt(), product / (one * two).sqrt())
