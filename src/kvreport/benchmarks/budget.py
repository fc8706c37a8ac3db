"""Where a model's time goes: to the innermost of its modules that ran."""

from contextlib import AbstractContextManager

from torch import nn

from kvreport.benchmarks import apart

# By the end of a module's class, the first that fits; whatever else runs is counted to the last.
PARTS = {
    "Linear": "products", "Norm": "norms", "Attention": "attention besides its products",
    "MLP": "activations", "Experts": "products", "": "the rest",
}


def kept(model: nn.Module) -> AbstractContextManager[dict[str, float]]:
    """Fill a mapping with the seconds of each part while the context is open; on a processor, where nothing waits."""
    parts = [(_part_of(module), module, "forward") for module in model.modules()]
    return apart.counted(part for part in parts if part[0] != PARTS[""] or part[1] is model)


def _part_of(module: nn.Module) -> str:
    return next(part for ending, part in PARTS.items() if type(module).__name__.endswith(ending))
