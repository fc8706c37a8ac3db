"""Looking for garbage less often: what a command imports is millions of objects that live as long as it does.

Looking through them again and again while they are imported, and once more at the end, takes a third of what the
imports take, and finds nothing.
"""

import atexit
import gc

# Python's own are 700, 10 and 10. A model that nothing holds any more is still found, some hundred thousand objects
# later.
_THRESHOLDS = (50_000, 5, 2)


def look_less_often() -> None:
    """Have this process look for garbage when there may be much, and not at its end."""
    gc.set_threshold(*_THRESHOLDS)
    atexit.register(gc.freeze)
