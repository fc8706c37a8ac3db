"""How far the calls of a streamed check are, kept in a file: a check that was stopped goes on at its last layer."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

# Between two writings.
_SECONDS = 30.0


class KeptCalls:
    """Outputs of parts, and keys and values, of the calls of `kvbook.diagnosis.layerwise`.

    Parameters
    ----------
    file : Path
        Named by all that they depend on.
    """

    def __init__(self, file: Path) -> None:
        self.file, self._last = file, time.monotonic()

    def save(self, calls: Sequence[Any]) -> None:
        """Write how far all calls are, unless that was done just now; what has ended is soon done and not kept."""
        if time.monotonic() - self._last < _SECONDS or any(call.result is not None for call in calls):
            return
        tensors: dict[str, torch.Tensor] = {}
        told = []
        for number, call in enumerate(calls):
            parts = [
                (part, _told(output, f"{number}.{place}", tensors)) for place, (part, output) in enumerate(call.outputs)
            ]
            cache = call.chain.cache if call.chain and not call.before else None
            layers = [
                _told(vars(layer), f"{number}.cache.{index}", tensors)
                for index, layer in enumerate(cache.layers if cache else ())
            ]
            told.append({"parts": parts, "layers": layers})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".new")
        try:
            save_file(tensors, beside, {"told": json.dumps(told)})
        except TypeError:
            # An output that is neither numbers nor tensors; then nothing is kept.
            return
        beside.replace(self.file)
        self._last = time.monotonic()

    def restore(self, calls: Sequence[Any]) -> None:
        """Give all calls what was kept of them."""
        try:
            with safe_open(self.file, framework="pt") as opened:
                told = json.loads(opened.metadata()["told"])
                for call, about in zip(calls, told, strict=True):
                    call.outputs = [(part, _again(output, opened)) for part, output in about["parts"]]
                    if call.chain and not call.before:
                        call.chain.filled = [_again(layer, opened) for layer in about["layers"]]
        except (FileNotFoundError, SafetensorError):
            return

    def forget(self) -> None:
        """Delete the file."""
        self.file.unlink(missing_ok=True)


# Tensors by name, the rest as JSON: no pickle is ever read.


def _told(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        # Two names for the same memory are refused.
        tensors[name] = value.clone().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": {key: _told(each, f"{name}.{key}", tensors) for key, each in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_told(each, f"{name}.{index}", tensors) for index, each in enumerate(value)]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    return {"value": value}


def _again(told: dict[str, Any], opened: Any) -> Any:
    ((kind, value),) = told.items()
    made = {
        "tensor": lambda: opened.get_tensor(value),
        "dict": lambda: {key: _again(each, opened) for key, each in value.items()},
        "tuple": lambda: tuple(_again(each, opened) for each in value),
        "dtype": lambda: getattr(torch, value),
        "device": lambda: torch.device(value),
        "value": lambda: value,
    }
    return made[kind]()
