"""Environments of engines: made from the package index, one folder each beside the book's own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from kvbook import UserError, paths, progress
from kvreport.engines.listed import ENGINES, Engine

FOLDER = paths.BUILD / "engines"
_ERROR_LINES = 3


def engine_of(name: str) -> Engine:
    """Look an engine up, or refuse its name."""
    if name not in ENGINES:
        raise UserError(f"there is no engine {name!r}: choose from {', '.join(ENGINES)}")
    return ENGINES[name]


def python_of(name: str) -> Path:
    """Name the Python of an engine's environment, whether it is there or not."""
    return FOLDER / name / "bin" / "python"


def is_here(name: str) -> bool:
    """Tell whether an engine's environment was made whole."""
    return python_of(name).exists()


def make_all(names: Sequence[str]) -> list[str]:
    """Make the environments that are missing, name those that cannot be made, and return their names."""
    failed = []
    for name in names:
        try:
            make(name)
        except UserError as error:
            failed.append(name)
            progress.note(str(error))
    return failed


def make(name: str) -> None:
    """Make an engine's environment unless it is there."""
    engine, final = engine_of(name), FOLDER / name
    if is_here(name):
        print(f"kvbook: {engine.title} is in {final}")
        return
    # A folder that was made whole is kept; the pip of a half-made one is not to be trusted.
    shutil.rmtree(final, ignore_errors=True)
    began = time.monotonic()
    try:
        _run(engine, sys.executable, "-m", "venv", str(final))
        _run(engine, str(python_of(name)), "-m", "pip", "install", "--quiet", *engine.packages)
        if engine.unwanted:
            _run(engine, str(python_of(name)), "-m", "pip", "uninstall", "--quiet", "--yes", *engine.unwanted)
    except BaseException:
        shutil.rmtree(final, ignore_errors=True)
        raise
    if engine.beside:
        (packages,) = (final / "lib").glob("python*/site-packages")
        (packages / "book.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    size = sum(file.stat().st_size for file in final.rglob("*") if file.is_file()) / 1e9
    print(f"kvbook: {engine.title}: made in {time.monotonic() - began:.0f} s, {size:.1f} GB in {final}", flush=True)


def _run(engine: Engine, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split("\n")[-_ERROR_LINES:]).strip()
        raise UserError(f"{engine.title} is left out, for it cannot be installed: {said or 'pip says nothing'}")


def variables_of(engine: Engine) -> dict[str, str]:
    """Return the environment of an engine's process: one thread, no network, and no packages but its own."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(FOLDER), "PYTHONUNBUFFERED": "1"}
    return own | fixed | engine.variables
