"""Garbage is collected less often: a command imports millions of objects, which live as long as it does.

To search them again and again during the imports, and once more at the end, takes a third of the imports' time, and
finds nothing.
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
