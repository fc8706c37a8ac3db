"""What the atlas knows of a class whose cache is wrong: the cause and the remedy, by model type and by path."""

from collections.abc import Collection
from dataclasses import dataclass

# Paths on which several tokens are fed onto a filled cache.
_CHUNKED = frozenset({"in two parts", "chunked prefill"})


@dataclass(frozen=True)
class Fault:
    """A fault that a class has in some releases.

    Attributes
    ----------
    types : tuple of str
        Model types of transformers.
    paths : frozenset of str
        The paths of `kvbook check` that it makes wrong; where another one is wrong, it is another fault.
    cause, remedy : str
        What to say.
    """

    types: tuple[str, ...]
    paths: frozenset[str]
    cause: str
    remedy: str


FAULTS = (
    Fault(
        ("mamba", "falcon_mamba", "jamba", "zamba"), _CHUNKED,
        "a second chunk begins with an empty recurrent state",
        "feed the prompt in one call, and single tokens after it",
    ),
    Fault(
        ("bamba",), _CHUNKED | {"token by token"},
        "positions begin at 0 again on a filled cache",
        "pass position_ids, as generate() does",
    ),
)


def fault(model_type: str, wrong: Collection[str]) -> Fault | None:
    """Find the known fault of a model type that explains which paths are wrong."""
    return next((each for each in FAULTS if model_type in each.types and set(wrong) <= each.paths), None)
