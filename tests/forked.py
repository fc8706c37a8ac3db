"""Processes that a test forks from itself: they have its libraries, which new ones would take seconds to import."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkProcess

_CONTEXT = multiprocessing.get_context("fork")


def start(function: Callable[[], object]) -> ForkProcess:
    """Start a process that calls a function, with everything as the test has it now."""
    process = _CONTEXT.Process(target=function, daemon=True)
    process.start()
    return process


def both(function: Callable[[], str]) -> tuple[list[int | None], set[str]]:
    """Call a function in two processes at once; give their exit codes, and what it gave."""
    said = _CONTEXT.SimpleQueue()
    processes = [start(lambda: said.put(function())) for _ in range(2)]
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes], {said.get() for _ in processes if not said.empty()}
