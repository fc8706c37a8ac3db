"""Models and tokenizers that experiments share: one that was read is kept, models within a limit, for who asks next.

A chapter's experiments ask for one model in the same dtypes, one after the other.  Whoever changes a shared model puts
it back as it was.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvbook.models import loading, placement, sources, streamed

# Of all models that are kept, the one in use among them: 135 million parameters in four dtypes.
LIMIT_BYTES = 2.5e9

# By the model's name, the other arguments, and what the request leads to.
_kept: dict[tuple[str, tuple[tuple[str, Any], ...], str], loading.Loaded] = {}
# By their files: a large one takes as long to read as a small model.
_tokenizers: dict[tuple, PreTrainedTokenizerBase] = {}


def load(model: str, memory: float | None = None, **asked: Any) -> loading.Loaded:
    """Load a model as `loading.load` does, or give the one that was read before; or stream one that is too large."""
    options = loading.load.__kwdefaults__ | asked
    # Its weights' hash is part of it: a folder may have been written anew.
    about = loading.identify(model, options["weights"], options["seed"], options["quantization"])
    if streams(loading.config_of(model, options["weights"]), options["dtype"], memory):
        return streamed.load(model, options["dtype"], options["weights"], options["seed"])
    if about["weights"] in sources.DRAWN:
        return loading.load(model, **asked)
    key = (model, tuple(sorted(options.items())), repr(about))
    if key in _kept:
        _kept[key] = _kept.pop(key)
        return _kept[key]
    place = placement.device_of(options["device"])
    make_room(about["parameters"] * placement.dtype_on(options["dtype"], place).itemsize, place)
    loaded = _kept[key] = loading.load(model, tokenizer=tokenizer(model, options["weights"]), **asked)
    make_room(0, place)
    return loaded


def tokenizer(model: str, weights: str = "stand-in") -> PreTrainedTokenizerBase:
    """Load a tokenizer as `loading.tokenizer` does, or give the one that was read before."""
    files = _tokenizer_files(model, weights)
    if files not in _tokenizers:
        _tokenizers[files] = loading.tokenizer(model, weights)
    return _tokenizers[files]


def _tokenizer_files(model: str, weights: str) -> tuple:
    """Tell a tokenizer by its files, which may have been written anew, or by the hub's revision."""
    where = sources.resolve(model, weights)
    folder = Path(where.tokenizer_path)
    files = sorted(folder.iterdir()) if where.tokenizer_path and folder.is_dir() else []
    return where.source, where.name, where.tokenizer_path, where.revision, *(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files
    )


def streams(config: PretrainedConfig, dtype: str, memory: float | None) -> bool:
    """Tell whether a model takes more than half of the memory, if that has a limit, and can be streamed."""
    n_bytes = loading.parameter_count(config) * getattr(torch, dtype).itemsize if memory else 0
    # Experiments copy the weights of masked models.
    return bool(memory) and 2 * n_bytes > memory and not loading.is_masked(config)


def make_room(n_bytes: float, place: torch.device) -> None:
    """Forget what was used longest ago until so many bytes more are within the limit, and twice as many are free."""
    while _kept and (
        n_bytes + sum(loaded.model.get_memory_footprint() for loaded in _kept.values()) > LIMIT_BYTES
        or 2 * n_bytes > placement.free_bytes(place)
    ):
        del _kept[next(iter(_kept))]


def beside(parameters: int, dtypes: Iterable[str]) -> float:
    """Predict the bytes that are kept of a model in other dtypes beside the widest of them."""
    sizes = [parameters * getattr(torch, name).itemsize for name in dict.fromkeys(dtypes)]
    return max(0.0, min(sum(sizes), LIMIT_BYTES) - max(sizes))
