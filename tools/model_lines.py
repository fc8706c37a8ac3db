"""Count which lines of a model's own source the atlas's paths execute, an architecture at a time.

Writes ``data/model_lines.csv``.  Counted are the lines in the methods of the classes that a tiny model is made of, and
in the functions of the same file that were called; what only builds a model or draws its weights is left out.
"""

import csv
import inspect
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import transformers

from kvbook import paths
from kvbook.atlas import columns, configurations

RECORDED = paths.ROOT / "data" / "model_lines.csv"
COLUMNS = ("release", "architecture", "file", "lines", "executed", "missed")
BUILDS = ("__init__", "_init_weights", "__init_subclass__")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _lines(codes: set[CodeType]) -> set[int]:
    """List the lines that can be executed; the first one of a function is its signature."""
    return {line for code in codes for *_, line in code.co_lines() if line and line != code.co_firstlineno}


def executed(name: str) -> dict[str, Any]:
    """Run an architecture's paths, and note each line of its file that is reached."""
    model = columns.ready(name, "float32", "cpu").model
    file = inspect.getsourcefile(type(model))
    reached: set[int] = set()
    called: set[CodeType] = set()

    def within(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            reached.add(frame.f_lineno)
        return within

    def enters(frame: FrameType, _event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        called.add(frame.f_code)
        return within

    sys.settrace(enters)
    try:
        columns.measure(name, quick=True)
    finally:
        sys.settrace(None)
    classes = {type(part) for part in model.modules()}
    methods = {
        inspect.unwrap(member).__code__ for kind in classes for key, member in vars(kind).items()
        if inspect.isfunction(inspect.unwrap(member)) and key not in BUILDS
    }
    own = {code for method in methods | called for code in _codes(method)
           if code.co_filename == file and code.co_name not in BUILDS}
    lines = _lines(own)
    missed = sorted(lines - reached)
    return {"file": Path(file).name, "lines": len(lines), "executed": len(lines) - len(missed),
            "missed": " ".join(map(str, missed))}


def _row(name: str) -> dict[str, Any]:
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        return {"architecture": name} | executed(name)
    except Exception as error:
        return {"architecture": name, "file": columns.in_one_line(error)}


def main() -> None:
    """Measure the architectures that are named, or all, each in a process of its own."""
    names = sys.argv[1:] or configurations.names()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool, RECORDED.open("w") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in pool.imap(_row, names, chunksize=1):
            writer.writerow({"release": transformers.__version__} | row)
            file.flush()


if __name__ == "__main__":
    main()
