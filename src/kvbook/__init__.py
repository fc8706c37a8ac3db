"""Comparing cached with uncached computation in Transformer language models, honestly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__version__ = "0.3.0.dev0"

# Where what a user imports from here really is: torch and transformers take seconds to import, and only these need
# them.
_OWN_LOOP = {
    "check_step": "kvbook.diagnosis.steps", "assert_cache_matches": "kvbook.diagnosis.assertions",
    "check_scores": "kvbook.scores.comparing",
}


class UserError(Exception):
    """Input that cannot be used; its message is one line that says what to do.

    The command line prints the message alone and exits with status 2; a notebook shows it without a traceback.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython calls this hook instead of printing its own traceback: the reader needs the line, not our stack.
        return [f"{type(self).__name__}: {self}"]


@contextmanager
def refusing(words: str | Callable[[Any], str], *kinds: type[BaseException]) -> Iterator[None]:
    """Raise a `UserError` of these words instead of an error of these kinds; of any kind where none is named."""
    kinds = kinds or (Exception,)
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(words if isinstance(words, str) else words(error)) from error


def __getattr__(name: str) -> Any:
    if name in _OWN_LOOP:
        import importlib

        return getattr(importlib.import_module(_OWN_LOOP[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
