"""Comparing cached with uncached computation in Transformer language models, honestly."""

from typing import Any

__version__ = "0.2.0.dev0"

# Where what a user imports from here really is: torch and transformers take seconds to import, and only these need
# them.
_OWN_LOOP = {
    "check_step": "kvbook.diagnosis.steps", "assert_cache_matches": "kvbook.diagnosis.assertions",
    "check_scores": "kvbook.scores.comparing",
}


def __getattr__(name: str) -> Any:
    if name in _OWN_LOOP:
        import importlib

        return getattr(importlib.import_module(_OWN_LOOP[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
