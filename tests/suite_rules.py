"""Which tests are slow, and left out by `make test-fast`.

Those that start a process of Python or a browser, that train or compile, or that score or draw so much that it takes
seconds.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

# Files whose tests all are, or share something that is. Of another file, a test that starts a process says so itself,
# and `slow.yaml` names those that compute.
FILES = frozenset({
    "test_adapters", "test_atlas", "test_bench", "test_check_held_out", "test_citation", "test_contributing",
    "test_encoder_decoders", "test_execution", "test_faults", "test_hub", "test_packages", "test_pages",
    "test_row_invariant", "test_server", "test_side_by_side", "test_site", "test_storage", "test_streamed",
    "test_thorough", "test_wheel",
})
COMPUTE = yaml.safe_load(Path(__file__).with_name("slow.yaml").read_text("utf-8"))
# Fixtures that make a test slow: folders in which sweeps run, checkpoints that are trained, a compiler that begins
# anew, what a chapter finds, what is measured of many models, an older release, the trained model.
FIXTURES = frozenset({
    "workplace", "swept", "checkpoint", "freshly_compiled", "results", "measured", "seen", "real_model",
})
# The workers of `make test` begin with what takes longest, so that neither is left with much at the end, and with what
# waits: as long as tests/smoke_book.py builds, that has the core meanwhile.
LONGEST_FIRST = (
    "test_sweeps", "test_faults", "test_row_invariant", "test_from_scratch", "test_packages", "test_site",
    "test_execution", "test_wheel", "test_chapters", "test_side_by_side", "test_security", "test_contributing",
    "test_layer_drift", "test_bench", "test_static_cache", "test_gguf_files", "test_hub", "test_server", "test_atlas",
    "test_models", "test_check_held_out", "test_pages", "test_diagnosis", "test_exact", "test_atlas_independent",
    "test_snippets", "test_storage", "test_which_path_is_right", "test_older_releases", "test_streamed",
    "test_statements",
)
# What their executables are called.
_WATCHED = ("python", "chrom", "unshare")


def is_slow(item: pytest.Item) -> bool:
    """Tell by file, name, fixture or own mark."""
    file, name = item.path.stem, getattr(item, "originalname", item.name)
    uses = FIXTURES.intersection(getattr(item, "fixturenames", ()))
    named = file in FILES or name in COMPUTE.get(file, ())
    return named or bool(uses) or item.get_closest_marker("slow") is not None


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Put the files of `LONGEST_FIRST` first, in its order; everything else stays as it was."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    return sorted(items, key=lambda item: places.get(item.path.stem, len(places)))


def watched(executables: Iterable[object]) -> list[str]:
    """Name the executables that only a slow test may start."""
    names = [Path(str(executable)).name for executable in executables]
    return [name for name in names if name.startswith(_WATCHED)]


def left_out(items: Iterable[pytest.Item]) -> dict[str, int]:
    """Count the slow tests among what was deselected, by file."""
    return dict(Counter(item.path.stem for item in items if item.get_closest_marker("slow")))


def line(counts: dict[str, int]) -> str:
    """Say what was left out."""
    named = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"left out, {sum(counts.values())} slow tests (processes, training, browsers): {named}"
