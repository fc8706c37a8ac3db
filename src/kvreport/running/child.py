"""A process that calls one function for the build and ends with it.

It imports nothing that reads the environment: the process may be forked from one that was begun earlier, and its own
environment is set here, before anything else is imported.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait


def answer(target: str, argument: str, environment: Mapping[str, str], channel: Connection) -> None:
    """Call a function and send what it gives."""
    # A group of its own: Ctrl-C on a terminal goes to the build, which ends this one.
    if hasattr(os, "setsid"):
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process().sentinel,), daemon=True).start()
    module, _, function = target.partition(":")
    # Whoever asked knows what to do without a result; what went wrong would be said twice if it were said here too.
    with contextlib.suppress(Exception):
        channel.send(getattr(importlib.import_module(module), function)(json.loads(argument)))


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
