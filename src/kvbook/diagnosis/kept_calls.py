"""How far the calls of a streamed check are, kept in a file: a check that was stopped goes on at its last layer."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils import _pytree

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
        leaves, structure = _pytree.tree_flatten([(call.outputs, _layers_of(call)) for call in calls])
        placed = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        # Two names for the same memory are refused.
        tensors = {str(place): tensor.clone().contiguous() for place, tensor in placed}
        others = [(place, leaf) for place, leaf in enumerate(leaves) if str(place) not in tensors]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".new")
        try:
            # Tensors by their place, the rest as JSON: no pickle is ever read.
            told = {"structure": _pytree.treespec_dumps(structure), "others": json.dumps(others)}
            save_file(tensors, beside, told)
        except (TypeError, NotImplementedError):
            # An output that is neither numbers nor tensors; then nothing is kept.
            return
        beside.replace(self.file)
        self._last = time.monotonic()

    def restore(self, calls: Sequence[Any]) -> None:
        """Hand all calls what was kept of them."""
        try:
            with safe_open(self.file, framework="pt") as opened:
                structure = _pytree.treespec_loads(opened.metadata()["structure"])
                others = dict(json.loads(opened.metadata()["others"]))
                places = range(structure.num_leaves)
                leaves = [others[at] if at in others else opened.get_tensor(str(at)) for at in places]
        # The last is what an older kvbook kept.
        except (FileNotFoundError, SafetensorError, KeyError):
            return
        for call, (outputs, layers) in zip(calls, _pytree.tree_unflatten(leaves, structure), strict=True):
            call.outputs = outputs
            if not call.before:
                call.chain.filled = layers


def _layers_of(call: Any) -> list[dict[str, Any]]:
    """Return what the layers of a cache hold, at the first call on it."""
    cache = None if call.before else call.chain.cache
    # JSON has no form for dtype and device, which no layer reads again once it holds something.
    unkept = torch.dtype | torch.device
    layers = map(vars, cache.layers) if cache else ()
    return [{name: value for name, value in layer.items() if not isinstance(value, unkept)} for layer in layers]
