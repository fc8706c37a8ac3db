"""Data flows one way: a module imports only from those above it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from kvbook.fingerprint import imports_of, reached

PACKAGE = Path(__file__).parents[1] / "src" / "kvbook"

# From the document to the page. A package stands for all modules in it; what these import of one another is
# its own affair.
ORDER = (
    "errors",
    "paths",
    "progress",
    "threads",
    "live",
    "turns",
    "fingerprint",
    "settings",
    "documents",
    "corpus",
    "models",
    "scratch",
    "caches",
    "rounded_caches",
    "passes",
    "onerow",
    "decoding",
    "exact",
    "mitigations",
    "agreement",
    "fits",
    "diagnosis",
    "truth",
    "predictions",
    "replay",
    "timing",
    "memory",
    "machine",
    "records",
    "privacy",
    "recording",
    "experiments",
    "survival",
    "analyses",
    "claims",
    "figures",
    "kernel",
    "preloaded",
    "execution",
    "origin",
    "published",
    "citation",
    "site",
    "bench",
    "sweeps",
    "cluster",
    "__main__",
)

# What only some may import, because they run on machines without it or must start without waiting for it.
HEAVY = {"torch": {"settings", "documents", "claims", "figures", "execution", "site", "paths", "progress"}}


def modules(package: Path) -> dict[str, str]:
    """Give the source of every module by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def part(module: str) -> str | None:
    """Name the part of the package that a module belongs to; None for the package itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def against_the_flow(sources: dict[str, str]) -> list[str]:
    """List every import of something below the importer, or of something that has no place in the order."""
    faults = []
    for module, source in sources.items():
        here = part(module)
        if here is None:
            continue
        if here not in ORDER:
            faults.append(f"{module} has no place in the order")
            continue
        for imported in sorted(imports_of(source, module)):
            there = part(imported)
            if there in (None, here):
                continue
            if there not in ORDER or ORDER.index(there) > ORDER.index(here):
                faults.append(f"{module} imports {imported}")
    return faults


def imports_at_the_top(source: str) -> set[str]:
    """Name the packages that importing a module imports; an import in a function waits until it is called."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_every_module_imports_only_from_those_above_it():
    assert against_the_flow(modules(PACKAGE)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbook.passes", "from kvbook import records"),
        ("kvbook.passes", "from kvbook.figures.publish import Page"),
        ("kvbook.paths", "def later():\n    import kvbook.site.overlay\n"),
        ("kvbook.models.loading", "from ..site import overlay"),
        ("kvbook.helpers", ""),
    ],
)
def test_control_an_import_against_the_flow_is_found(module, source):
    assert len(against_the_flow({module: source})) > 0


def test_control_an_import_with_the_flow_is_no_fault():
    assert against_the_flow({"kvbook.records": "from kvbook import fingerprint, paths"}) == []


@pytest.mark.parametrize("library", HEAVY)
def test_what_must_start_quickly_does_not_import_what_is_slow(library):
    slow = {name for name, source in modules(PACKAGE).items() if library in imports_at_the_top(source)}
    assert slow, "nothing imports it at all: this test looks in the wrong place"
    assert {name for name in slow if part(name) in HEAVY[library]} == set()


# torch is not named in pyproject.toml, so that none is installed over a machine's own; transformers brings these two itself.
BROUGHT = {"torch", "huggingface_hub", "tokenizers"}


def undeclared(sources: dict[str, str]) -> list[str]:
    """List what modules import on being imported that a machine with the package's own dependencies need not have."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    known = {{"pyyaml": "yaml"}.get(name, name) for name in names} | BROUGHT | {"kvbook"} | sys.stdlib_module_names
    return [
        f"{module} imports {package}"
        for module, source in sources.items()
        for package in sorted(imports_at_the_top(source) - known)
    ]


def test_an_experiment_runs_on_a_machine_with_the_packages_own_dependencies():
    sources = modules(PACKAGE)
    needed = reached("kvbook.__main__") | reached("kvbook.experiments.catalogue")
    book_only = {"execution", "site", "cluster", "live", "published", "citation"}
    assert undeclared({name: sources[name] for name in needed if part(name) not in book_only}) == []


def test_control_a_library_that_only_this_books_pins_bring_is_found():
    assert undeclared({"kvbook.models.hub": "import httpx2\nfrom huggingface_hub import errors"}) == [
        "kvbook.models.hub imports httpx2"
    ]
