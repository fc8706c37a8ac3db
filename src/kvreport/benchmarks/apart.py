"""A command of this project taken apart, in a process of its own: its imports first, then the functions that it calls.

What neither names is the rest: Python's start and end, and many small things.  Nothing here imports torch, which
a build with nothing to do need not.
"""

import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbook import garbage

REST = "the rest"
# The parts by command.
TABLE = Path(__file__).with_suffix(".tables.yaml")


def timed(command: list[str], **options: Any) -> tuple[dict[str, float], subprocess.CompletedProcess]:
    """Run a command of the table; return the seconds of its parts, which add up to the whole, and how it ended."""
    # Here alone: in the command's own process it would be imported in the time of the rest.
    from kvbook.settings import read_yaml

    parts = json.dumps(read_yaml(TABLE)[command[0]])
    with tempfile.TemporaryDirectory(prefix="kvbook-apart-") as scratch:
        written, start = Path(scratch) / "seconds.json", time.perf_counter()
        called = [sys.executable, "-m", "kvreport.benchmarks.apart", str(written), parts, *command]
        done = subprocess.run(called, check=False, **options)
        whole = time.perf_counter() - start
        seconds = json.loads(written.read_text("utf-8")) if written.is_file() else {}
    return seconds | {REST: whole - sum(seconds.values())}, done


@contextmanager
def counted(calls: Iterable[tuple[str, Any, str]]) -> Iterator[dict[str, float]]:
    """Fill a mapping with the seconds of parts while the context is open; a part's calls have an owner and a name.

    Time counts to the innermost part that is open.
    """
    seconds: dict[str, float] = defaultdict(float)
    # Seconds that were counted inside each open part; the first stands for all that is outside of any.
    inside = [0.0]

    @contextmanager
    def counting(part: str) -> Iterator[None]:
        start = time.perf_counter()
        inside.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            seconds[part] += whole - inside.pop()
            inside[-1] += whole

    with ExitStack() as stack:
        for part, owner, name in calls:
            stack.enter_context(patch.object(owner, name, counting(part)(getattr(owner, name))))
        yield seconds


def of_calls(parts: dict[str, str]) -> AbstractContextManager[dict[str, float]]:
    """Count the seconds of functions that are named as `module:name`."""
    named = {part: function.replace(":", ".").rpartition(".") for part, function in parts.items()}
    return counted((part, pkgutil.resolve_name(owner), name) for part, (owner, _, name) in named.items())


def main(written: str, table: str, *command: str) -> None:
    """Run a command in this process, and write the seconds of its parts to a file."""
    parts, seconds = json.loads(table), {}
    garbage.look_less_often()
    if "first" in parts:
        pkgutil.resolve_name(parts["first"])()
    for part, modules in parts["imports"].items():
        start = time.perf_counter()
        for module in modules:
            importlib.import_module(module)
        seconds[part] = time.perf_counter() - start
    from kvbook import __main__ as program

    sys.argv = ["kvbook", *command]
    try:
        with of_calls(parts["calls"]) as taken:
            program.main()
    finally:
        Path(written).write_text(json.dumps(seconds | taken), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
