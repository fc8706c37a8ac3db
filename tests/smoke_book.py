"""This repository's book with the parameter set `smoke`: built once, beside the tests that come before its pages'.

Whichever worker begins it, another one may be the one that waits for it; so all that is known of it lies in a folder
that they share.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvbook.paths import ROOT

# With a space, as in the names of some people's folders.
_NAME = "smoke book"
# Where something has killed it, nobody waits for ever.
_MOST_SECONDS = 3600
# How it ended is there as a whole or not at all.
_COMMAND = ["sh", "-c", '"$@" > "$0/said" 2>&1; echo $? > "$0/status"; mv "$0/status" "$0/ended"']


def begin(shared: Path) -> None:
    """Begin to build it, unless another worker has."""
    place = shared / _NAME
    try:
        place.mkdir()
    except FileExistsError:
        return
    (place / "_build").mkdir()
    (place / "_build/statements").symlink_to(shared / "statements")
    environment = os.environ | {"KVBOOK_BUILD": str(place / "_build"), "PROFILE": "smoke"}
    command = [*_COMMAND, str(place), sys.executable, "-m", "kvbook", "build"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    (place / "pid").write_text(str(process.pid))


def pages(shared: Path) -> Path:
    """Wait for it, and give the folder of its pages."""
    place = shared / _NAME
    end = time.monotonic() + _MOST_SECONDS
    while not (place / "ended").exists():
        assert time.monotonic() < end, (place / "said").read_text("utf-8")
        time.sleep(0.2)
    assert (place / "ended").read_text() == "0\n", (place / "said").read_text("utf-8")
    return place / "_build/html"


def end(shared: Path) -> None:
    """Interrupt it where nobody waits for it any more."""
    place = shared / _NAME
    if (place / "pid").exists() and not (place / "ended").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((place / "pid").read_text()), signal.SIGINT)
