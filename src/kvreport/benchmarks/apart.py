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
from typing import Any, NamedTuple
from unittest.mock import patch

from kvbook import garbage

REST = "the rest"


class Parts(NamedTuple):
    """Modules that a command imports, in this order, and functions that it calls; time counts to the innermost.

    `first` is what it calls before any of these imports, if anything.
    """

    imports: dict[str, tuple[str, ...]]
    calls: dict[str, str]
    first: str = ""


COMMANDS = {
    "check": Parts(
        {
            "torch and transformers imported": ("torch", "transformers.models.llama.modeling_llama"),
            "further imports": ("kvbook.diagnosis.check",),
        },
        {
            "configuration": "kvbook.models.loading:describe", "tokenizer": "kvbook.models.loading:tokenizer",
            "texts": "kvbook.diagnosis.check:samples_of", "weights": "kvbook.models.loading:load",
            "passes": "kvbook.diagnosis.check:_Measured._rows_of", "judging": "kvbook.diagnosis.check:_Measured.judged",
        },
        "kvbook.diagnosis.cores:settle",
    ),
    "build": Parts(
        {
            "imports": ("kvreport.site.build", "kvreport.site.executed"),
            "Jupyter Book and Sphinx imported": ("jupyter_book.cli.main", "jupyter_book.sphinx", "sphinx.application"),
        },
        {
            "whether chapters are stale": "kvreport.running.execution:bring_up_to_date",
            "Sphinx's extensions imported": "sphinx.application:Sphinx.__init__",
            "citations": "kvreport.site.executed:write_citations",
            "whether pages have changed": "kvreport.site.executed:read_again_what_was_run_again",
            "figures numbered": "sphinx.environment.collectors.toctree:TocTreeCollector.assign_figure_numbers",
            "pages written, and all else of Sphinx": "sphinx.application:Sphinx.build",
        },
    ),
}


def timed(command: list[str], **options: Any) -> tuple[dict[str, float], subprocess.CompletedProcess]:
    """Run one of `COMMANDS`; return the seconds of its parts, which add up to the whole, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="kvbook-apart-") as scratch:
        written, start = Path(scratch) / "seconds.json", time.perf_counter()
        called = [sys.executable, "-m", "kvreport.benchmarks.apart", str(written), *command]
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


def main(written: str, *command: str) -> None:
    """Run a command in this process, and write the seconds of its parts to a file."""
    parts, seconds = COMMANDS[command[0]], {}
    garbage.look_less_often()
    if parts.first:
        pkgutil.resolve_name(parts.first)()
    for part, modules in parts.imports.items():
        start = time.perf_counter()
        for module in modules:
            importlib.import_module(module)
        seconds[part] = time.perf_counter() - start
    from kvbook import __main__ as program

    sys.argv = ["kvbook", *command]
    try:
        with of_calls(parts.calls) as taken:
            program.main()
    finally:
        Path(written).write_text(json.dumps(seconds | taken), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
