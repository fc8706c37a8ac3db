"""Content hashes: of values, of files, and of the source that a module runs.

Nothing is stale because of a clock: a result is redone when what made it has other bytes.
"""

import ast
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvbook import paths

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# The packages whose source is followed, each with its folder; a package that brings experiments of its own adds itself.
PACKAGES = {"kvbook": Path(__file__).resolve().parent}
# What was read in source files, a line for each content, for processes that come later: parsing takes seconds.
_READ = paths.BUILD / "sources.jsonl"


def of_values(values: Any) -> str:
    """Hash anything that JSON can hold; the order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def of_file(path: Path) -> str:
    """Hash a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def once_a_content(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Have a process read a file once for each content, which size and date tell apart."""
    known = functools.cache(lambda path, _size, _changed: read(path))

    @functools.wraps(read)
    def reading(path: Path) -> Any:
        about = path.stat()
        return known(path.absolute(), about.st_size, about.st_mtime_ns)

    return reading


@once_a_content
def of_large_file(path: Path) -> str:
    """Hash a file's bytes once per process and content: experiments ask for the same gigabyte often."""
    return of_file(path)


def _file_of(module: str) -> Path | None:
    package, *names = module.split(".")
    return _source_at(PACKAGES[package].joinpath(*names)) if package in PACKAGES else None


@functools.cache
def _source_at(base: Path) -> Path | None:
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def imports_of(source: str, module: str = "") -> set[str]:
    """List the modules of `PACKAGES` that a piece of source imports, wherever in it the import stands."""
    found: set[str] = set()
    for level, base, names in _read(source).imports:
        parents = module.split(".")[:-level] if level else []
        base = ".".join([*parents, base]).strip(".")
        # `from kvbook.models import training` imports a module, `from kvbook import UserError` a name.
        found |= {name for name in (base, *(f"{base}.{name}".strip(".") for name in names)) if _file_of(name)}
    return found


@functools.cache
def reached(module: str) -> frozenset[str]:
    """List the modules of `PACKAGES` that a module imports, directly or not, and itself."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found and _file_of(name) is not None:
            found.add(name)
            waiting += _imported_by(name)
    return frozenset(found)


@functools.cache
def _imported_by(module: str) -> frozenset[str]:
    """List what a module imports itself: every chapter reaches the same hundred modules."""
    return frozenset(imports_of(_file_of(module).read_text("utf-8"), module))


class _Source(NamedTuple):
    """What is asked of a source file: its imports, as level, module and names, and the hash of what runs."""

    imports: list[tuple[int, str, list[str]]]
    sha256: str


@functools.cache
def _read(source: str) -> _Source:
    """Parse a source file, once for each content: a book asks for the same hundred files at every chapter."""
    key = of_values([sys.version_info[:2], source])
    if (found := _read_before().get(key)) is None:
        found = _parsed(source)
        with suppress(OSError), _READ.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, *found]) + "\n")
    return found


@functools.cache
def _read_before() -> dict[str, _Source]:
    found = {}
    with suppress(OSError):
        for line in _READ.read_text("utf-8", "replace").splitlines():
            # What a process that was killed has left of a line is no JSON.
            with suppress(ValueError):
                key, imports, sha256 = json.loads(line)
                found[key] = _Source([tuple(one) for one in imports], sha256)
    return found


def _parsed(source: str) -> _Source:
    tree = ast.parse(source)
    imports: list[tuple[int, str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.append((0, "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    # No comments, no docstrings, no layout.
    return _Source(imports, hashlib.sha256(ast.dump(tree).encode()).hexdigest())


@once_a_content
def _source_sha256(path: Path) -> str:
    return _read(path.read_text("utf-8")).sha256


def of_source(modules: Iterable[str]) -> str:
    """Hash the source of modules and of every module of `PACKAGES` that they import, directly or not.

    Comments and docstrings do not count: a better explanation must not cost a GPU run. A file of C++, markup or
    tables beside a module counts with it, as it is.
    """
    digest = hashlib.sha256()
    for module in sorted(set().union(*map(reached, modules))):
        path = _file_of(module)
        digest.update(f"{module} {_source_sha256(path)}\n".encode())
        for beside in filter(Path.is_file, map(path.with_suffix, (".cpp", ".html", ".tables.yaml"))):
            digest.update(f"{beside.name} {of_file(beside)}\n".encode())
    return digest.hexdigest()
