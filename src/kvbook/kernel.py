"""The process that executes a chapter: IPython's kernel, whose garbage collector passes over what the first cell imports.

torch and transformers bring about a million objects that live as long as the process.  Looking through them again and again
while they are imported, whenever enough is new, and once more at the end took about three seconds a chapter.
"""

import gc
import sys
from pathlib import Path
from typing import Any


def start() -> None:
    """Start the kernel on the command line's connection file; collect garbage from the end of the first cell on."""
    from ipykernel.kernelapp import IPKernelApp

    gc.disable()
    app = IPKernelApp.instance()
    app.initialize()
    events = app.shell.events

    def collect_from_here(*_: Any) -> None:
        events.unregister("post_run_cell", collect_from_here)
        gc.freeze()
        gc.enable()

    events.register("post_run_cell", collect_from_here)
    app.start()


if __name__ == "__main__":
    # As ipykernel's own launcher does: a notebook's folder must not hide a library. IPython adds it back later.
    if Path(sys.path[0]) == Path.cwd():
        del sys.path[0]
    start()
