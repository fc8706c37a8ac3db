"""A pass in double precision that is one throughout.

Models turn to 32 bits inside, whatever dtype they run in: norms, softmax and rotary angles are written so.  In fp64
these are roundings of fp32, and the drift between two passes is then not fp64's.  MPT's softmax brings in a difference
of fp32's size, so that a sound model looks as if it had a bug; a last norm in 32 bits does the opposite and rounds away
the difference that reaches it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvbook import older


class _NothingNarrow(TorchFunctionMode):
    """Answers every request for 32 bits with 64; requests for 16 bits and for integers stay as they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        if function is torch.Tensor.float:
            function, args = torch.Tensor.to, (args[0], torch.float64)
        # Asked at every look at a tensor's shape too, of which a pass has thousands.
        args = [torch.float64 if each is torch.float32 else each for each in args]
        named = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return function(*args, **named)


def widened(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context in which a model of a dtype is run, so that its drift is that dtype's."""
    return _NothingNarrow() if dtype is torch.float64 else nullcontext()


def experts_one_by_one(model: PreTrainedModel) -> bool:
    """Choose a product of experts that has float64; transformers' default for many classes has not."""
    if not older.chooses_experts(model) or model.config._experts_implementation != "grouped_mm":
        return False
    stored = model.state_dict()
    if any(buffer.dim() > 1 and name in stored for name, buffer in model.named_buffers()):
        # MiniMax's checkpoints hold tables of decays that were rounded apart, to fp32: in fp64 they would look like a
        # bug.
        return False
    model.set_experts_implementation("eager")
    return True
