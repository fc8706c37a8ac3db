"""Sliding windows: refused where keys have left the window, for then no two passes align their blocks alike."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from kvbook.exact.kernels import NotInvariant

_LAYERS = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)


def _guarded(stock: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(stock)
    def update(self, *arguments, **options):
        found = stock(self, *arguments, **options)
        # A static layer's own length is a tensor; it keeps the number beside it.
        held = getattr(self, "cumulative_length_int", None) or int(self.cumulative_length)
        window = getattr(self, "sliding_window", None) or self.max_cache_len
        if held > window:
            raise NotInvariant(
                f"row_invariant() met {type(self).__name__} with {held} tokens in a window of {window}: keep the text within "
                "the sliding window, or use a model with full attention"
            )
        return found

    return update


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Refuse a cache that has dropped keys; a text within its window passes."""
    stock = {layer: layer.update for layer in _LAYERS}
    for layer, update in stock.items():
        layer.update = _guarded(update)
    try:
        yield
    finally:
        for layer, update in stock.items():
            layer.update = update
