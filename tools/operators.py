"""Write which operators decode steps call, and what row-invariant arithmetic does with them.

The file is ``data/exact/operators.txt``::

    python tools/operators.py

Each causal architecture of transformers decodes two tokens as a tiny model with random weights, on a CPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbook import paths
from kvbook.atlas import columns, configurations
from kvbook.exact import switch

FILE = paths.DATA / "exact" / "operators.txt"
HEAD = "operator", "architectures", "on a CPU", "on a GPU"
ELEMENT, DATA, REFUSED = "torch's, element by element", "torch's, moves or counts", "refused"
# A sum over a row: on a CPU torch takes each row by itself.
SUM = {"CPU": "torch's, a row by itself", "CUDA": "torch's sum, not tried on a GPU"}
# What has no tag of torch that says so, and what has that of a sum and finds the same in any order.
_ADDS = "native_layer_norm", "_fused_rms_norm", "cumsum", "index_add", "index_add_"
_ROUNDS = "_to_copy", "floor_divide", "polar", "log_sigmoid"
_IN_ANY_ORDER = ("max", "min", "amax", "amin", "argmax", "argmin", "any", "all")


def treatment(operator: str, key: str) -> str:
    """Say what the switch does with an operator, as ``aten::mean.dim``, for the dispatch key ``CPU`` or ``CUDA``.

    Where torch's own stays, its tags tell how it computes.
    """
    if part := switch.part_of(operator, key):
        return f"ours, {part}" if part in switch.PARTS else REFUSED
    space, _, rest = operator.partition("::")
    plain, _, overload = rest.partition(".")
    tags = getattr(getattr(getattr(torch.ops, space), plain), overload or "default").tags
    if plain in _ADDS or (torch.Tag.reduction in tags and plain not in _IN_ANY_ORDER):
        return SUM[key]
    return ELEMENT if torch.Tag.pointwise in tags or plain in _ROUNDS else DATA


class _Watch(TorchDispatchMode):
    """Keeps the names of what is called, down to operators that have a kernel or a treatment of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):
        if switch.part_of(called.name(), "CPU") not in switch.PARTS and called._can_decompose():
            with self:
                return called.decompose(*args, **(kwargs or {}))
        self.names.add(called.name())
        return called(*args, **(kwargs or {}))


def operators(model: torch.nn.Module, feed: Callable[[], object]) -> set[str]:
    """Return the names of torch's operators, as ``aten::mul.Tensor``, that a model calls when it is given one token."""
    watch = _Watch()

    def is_step(given: tuple[object, ...], named: dict[str, object]) -> bool:
        return (*given, named.get("input_ids"))[0].shape[1] == 1

    def enter(_model: torch.nn.Module, given: tuple[object, ...], named: dict[str, object]) -> None:
        if is_step(given, named):
            watch.__enter__()

    def leave(_model: torch.nn.Module, given: tuple[object, ...], named: dict[str, object], _out: object) -> None:
        if is_step(given, named):
            watch.__exit__(None, None, None)

    hooks = [
        model.register_forward_pre_hook(enter, with_kwargs=True), model.register_forward_hook(leave, with_kwargs=True),
    ]
    try:
        with torch.inference_mode():
            feed()
    finally:
        for hook in hooks:
            hook.remove()
    return watch.names


def called(name: str) -> set[str]:
    """Return what an architecture calls, in bf16 or, where it does not compute in that, in fp32."""
    for dtype in ("bfloat16", "float32"):
        try:
            fed = columns.ready(name, dtype, "cpu")
            return operators(fed.model, lambda fed=fed: fed.in_parts(configurations.text(4), [2, 1, 1]))
        except Exception as error:
            print(f"{name}, {dtype}: {columns.in_one_line(error)}")
    return set()


def line(operator: str, *cells: object) -> str:
    """Lay out one row."""
    return f"{operator:36s} {cells[0]!s:>13} {cells[1]!s:27s} {cells[2]!s}"


def table(names: Iterable[str]) -> list[str]:
    """Lay out all operators, those first that most architectures call."""
    count = Counter(operator for name in names for operator in called(name))
    ordered = sorted(count, key=lambda operator: (-count[operator], operator))
    treated = [[treatment(operator, key) for key in ("CPU", "CUDA")] for operator in ordered]
    return [line(*HEAD), *(line(one, count[one], *how) for one, how in zip(ordered, treated, strict=True))]


def main() -> None:
    """Write the file."""
    FILE.write_text("\n".join(table(configurations.names())) + "\n", "utf-8")


if __name__ == "__main__":
    main()
