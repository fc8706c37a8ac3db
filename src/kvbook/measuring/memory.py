"""Bytes: what a cache should take by its model's shape, what it takes, and the peak of a piece of work."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import Cache, PretrainedConfig

T = TypeVar("T")

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kv_heads(config: PretrainedConfig) -> int:
    """Read how many heads of keys and values a configuration has."""
    # Falcon's first generation shares one head among all queries and says so in a word of its own.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Predict the bytes of keys and values of one token: 2 x layers x key/value heads x head width x bytes of a number.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model.
    dtype : torch.dtype
        Of the cache.
    """
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * kv_heads(text) * head_dim * dtype.itemsize


def cache_bytes(cache: Cache) -> int:
    """Count the bytes of the keys and values that a cache holds or has made room for."""
    return sum(tensor.nbytes for layer in cache.layers if layer.is_initialized for tensor in (layer.keys, layer.values))


def _hand_back_free_memory() -> None:
    """Return the system what the C library keeps of freed memory: work that reuses it would seem to need none."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc keeps so much that it offers this.
    if trim is not None:
        trim(0)


def peak(work: Callable[[], T], device: torch.device) -> tuple[T, int | None]:
    """Run a piece of work and give its result and the most bytes that were in use meanwhile, the counter reset before.

    Parameters
    ----------
    work : callable
        Without arguments.
    device : torch.device
        On CUDA the bytes are those that torch has allocated there; on a CPU they are the process's resident memory, its
        code and libraries included, by Linux's own counter.

    Returns
    -------
    result : object
    n_bytes : int or None
        None where no such counter can be reset.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device)
    try:
        # 5 resets the high-water mark of the resident memory (proc(5)).
        # Opened first: where it is missing, nothing else is done.
        with _RESET.open("w") as reset:
            _hand_back_free_memory()
            reset.write("5")
    except OSError:
        return work(), None
    result = work()
    mark = re.search(r"^VmHWM:\s+(\d+)", _STATUS.read_text("utf-8"), re.MULTILINE)
    return result, int(mark[1]) * 1024 if mark else None
