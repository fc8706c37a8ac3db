"""Something else in an attribute's place while a block lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Set an attribute of a class, module or instance to something else, and put it back, also after an error."""
    # What is inherited, such as a module's method, is back once ours is gone.
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
