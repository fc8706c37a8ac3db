"""Where time goes: in a model to the innermost module that ran, elsewhere to the functions that are named."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import nn

# By the end of a module's class, the first that fits; whatever else runs is counted to the last.
PARTS = {
    "Linear": "products", "Norm": "norms", "Attention": "attention besides its products",
    "MLP": "activations", "Experts": "products", "": "the rest",
}


@contextmanager
def kept(model: nn.Module) -> Iterator[dict[str, float]]:
    """Fill a mapping with the seconds of each part while the context is open; on a processor, where nothing waits."""
    seconds: dict[str, float] = defaultdict(float)
    open_since: list[list[float]] = []

    def enter(_module: nn.Module, _given: object) -> None:
        open_since.append([time.perf_counter(), 0.0])

    def leave(part: str) -> Callable[..., None]:
        def end(_module: nn.Module, _given: object, _output: object) -> None:
            start, inside = open_since.pop()
            whole = time.perf_counter() - start
            seconds[part] += whole - inside
            if open_since:
                open_since[-1][1] += whole

        return end

    with ExitStack() as hooks:
        for module in model.modules():
            part = next(part for ending, part in PARTS.items() if type(module).__name__.endswith(ending))
            if part != PARTS[""] or module is model:
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave(part)))
        yield seconds


@contextmanager
def of_calls(parts: dict[str, tuple[object, str]]) -> Iterator[dict[str, float]]:
    """Fill a mapping with the seconds that functions take while the context is open, none of which calls another."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, function: Callable) -> Callable:
        def run(*given: object, **named: object) -> object:
            start = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                seconds[part] += time.perf_counter() - start

        return run

    with ExitStack() as stack:
        for part, (owner, name) in parts.items():
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield seconds
