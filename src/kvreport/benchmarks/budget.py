"""Where a model's time goes: to the innermost of its modules that ran."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import nn

from kvreport.benchmarks.apart import Clock

# By the end of a module's class, the first that fits; whatever else runs is counted to the last.
PARTS = {
    "Linear": "products", "Norm": "norms", "Attention": "attention besides its products",
    "MLP": "activations", "Experts": "products", "": "the rest",
}


@contextmanager
def kept(model: nn.Module) -> Iterator[dict[str, float]]:
    """Fill a mapping with the seconds of each part while the context is open; on a processor, where nothing waits."""
    clock = Clock()
    with ExitStack() as stack:
        for module in model.modules():
            part = next(part for ending, part in PARTS.items() if type(module).__name__.endswith(ending))
            if part != PARTS[""] or module is model:
                stack.enter_context(patch.object(module, "forward", clock.part(part)(module.forward)))
        yield clock.seconds
