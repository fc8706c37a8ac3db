"""Data flows one way: a module imports only from those above it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from kvbook.fingerprint import imports_of, reached
from kvreport.running import catalogue

SRC = Path(__file__).parents[1] / "src"
PACKAGES = {name: SRC / name for name in ("kvbook", "kvreport")}
LIBRARY, REPORT = SRC.parent / "pyproject.toml", SRC / "kvreport" / "pyproject.toml"

# From the document to the page, a part a line: the library's first, then the report's.  A package stands for all
# modules in it; what these import of one another is its own affair, but for the chapters, none of which may import
# another.
ORDER = (
    "kvbook.errors",
    "kvbook.garbage",
    "kvbook.paths",
    "kvbook.progress",
    "kvbook.replacing",
    "kvbook.fingerprint",
    "kvbook.lengths",
    "kvbook.settings",
    "kvbook.models",
    "kvbook.measuring",
    "kvbook.diagnosis",
    "kvbook.exact",
    "kvbook.atlas",
    "kvbook.runs",
    "kvbook.__main__",
    "kvreport.publishing",
    "kvreport.training",
    "kvreport.chapters",
    "kvreport.running",
    "kvreport.benchmarks",
    "kvreport.site",
    "kvreport.commands",
)

# It judges the symptoms of all documents, so it repeats them as their chapters do.
BORROWERS = {None, "bug_or_rounding"}

# What only some may import, because they run on machines without it or must start without waiting for it: by the end of
# a module's name, or by its part.
HEAVY = {
    "torch": (
        "kvbook.settings", "kvbook.paths", "kvbook.progress", "kvbook.__main__", "kvreport.commands",
            "kvreport.publishing",
        "kvreport.running.execution", "kvreport.site", ".figures", ".claims", ".settings",
    )
}


def modules(*folders: Path) -> dict[str, str]:
    """Give the source of every module by its dotted name."""
    found = {}
    for folder in folders or PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def part(module: str) -> str | None:
    """Name the part that a module belongs to; None for a package itself."""
    names = module.split(".")
    return ".".join(names[:2]) if len(names) > 1 else None


def chapter(module: str) -> str | None:
    """Name the chapter that a module belongs to; None outside the chapters."""
    names = module.split(".")
    return names[2] if names[:2] == ["kvreport", "chapters"] and len(names) > 2 else None


def against_the_flow(sources: dict[str, str]) -> list[str]:
    """List every import of something below the importer, of another chapter, or of what has no place in the order."""
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
            if there is None:
                continue
            below = there not in ORDER or ORDER.index(there) > ORDER.index(here)
            other = chapter(imported) not in (None, chapter(module)) and chapter(module) not in BORROWERS
            if below or other:
                faults.append(f"{module} imports {imported}")
    return faults


def circles(sources: dict[str, str]) -> list[str]:
    """List the modules that reach themselves by imports, wherever in a module these stand; a package's face shows its own."""
    faces = {module.rpartition(".")[0] for module in sources}
    direct = {
        module: imports_of(source, module) & set(sources) - {module} - faces for module, source in sources.items()
    }
    found = []
    for module in sources:
        seen: set[str] = set()
        waiting = list(direct[module])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += direct[name]
        if module in seen:
            found.append(module)
    return found


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
    assert against_the_flow(modules()) == []


def test_no_module_reaches_itself():
    assert circles(modules()) == []


def test_control_a_circle_is_found():
    sources = {"kvbook.errors": "from kvbook import paths", "kvbook.paths": "import kvbook.errors"}
    assert circles(sources) == ["kvbook.errors", "kvbook.paths"]


def test_the_library_never_imports_the_report():
    assert not [
        name
        for name, source in modules(PACKAGES["kvbook"]).items()
        if re.search(r"import kvreport|from kvreport", source)
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvbook.measuring.full_and_split", "from kvbook.runs import records"),
        ("kvbook.measuring.full_and_split", "from kvreport.publishing.page import Page"),
        ("kvbook.paths", "def later():\n    import kvreport.site.overlay\n"),
        ("kvreport.publishing.page", "from ..site import overlay"),
        ("kvreport.chapters.layer_drift.tables", "from kvreport.chapters.models import tables"),
        ("kvbook.helpers", ""),
    ],
)
def test_control_an_import_against_the_flow_is_found(module, source):
    assert len(against_the_flow({module: source})) > 0


def test_control_an_import_with_the_flow_is_no_fault():
    assert against_the_flow({"kvbook.runs.records": "from kvbook import fingerprint, paths"}) == []


@pytest.mark.parametrize("library", HEAVY)
def test_what_must_start_quickly_does_not_import_what_is_slow(library):
    slow = {name for name, source in modules().items() if library in imports_at_the_top(source)}
    assert slow, "nothing imports it at all: this test looks in the wrong place"
    assert {name for name in slow if name.endswith(HEAVY[library]) or part(name) in HEAVY[library]} == set()


# What draws a page, in a chapter that names its rows: it reads rows, and takes no library that computes them.
DRAWS = (".rows", ".measures", ".tables", ".figures")
COMPUTES = {"torch", "transformers"}


def computing_behind(module: str, sources: dict[str, str]) -> list[str]:
    """List the modules behind a module's imports, at the top of each, that import what computes."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in sources and name not in seen:
            seen.add(name)
            top = [node for node in ast.parse(sources[name]).body if isinstance(node, ast.Import | ast.ImportFrom)]
            waiting += imports_of("\n".join(map(ast.unparse, top)), name)
    return sorted(name for name in seen if COMPUTES & imports_at_the_top(sources[name]))


def test_a_page_is_drawn_without_what_computes():
    sources = modules()
    named = {module.removesuffix(".rows") for module in sources if chapter(module) and module.endswith(".rows")}
    assert named
    drawing = [f"{package}{name}" for package in named for name in DRAWS]
    assert {module: found for module in drawing if (found := computing_behind(module, sources))} == {}


def test_control_a_library_that_computes_is_found_behind_two_imports():
    sources = {
        "kvreport.chapters.layer_drift.figures": "from kvreport.chapters.layer_drift import tables",
        "kvreport.chapters.layer_drift.tables": "from kvbook.measuring import agreement",
        "kvbook.measuring.agreement": "import torch",
    }
    assert computing_behind("kvreport.chapters.layer_drift.figures", sources) == ["kvbook.measuring.agreement"]
    sources["kvreport.chapters.layer_drift.tables"] = "def later():\n    from kvbook.measuring import agreement\n"
    assert computing_behind("kvreport.chapters.layer_drift.figures", sources) == []


# transformers brings these two itself.
BROUGHT = {"huggingface_hub", "tokenizers"}


def undeclared(sources: dict[str, str], *projects: Path) -> list[str]:
    """List what modules import on being imported that a machine with these projects' dependencies need not have."""
    lines = [line for file in projects for line in tomllib.loads(file.read_text("utf-8"))["project"]["dependencies"]]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in lines}
    known = {{"pyyaml": "yaml"}.get(name, name) for name in names} | BROUGHT | {"kvbook"} | sys.stdlib_module_names
    return [
        f"{module} imports {package}"
        for module, source in sources.items()
        for package in sorted(imports_at_the_top(source) - known)
    ]


# Modules that only some systems have.
POSIX = {"fcntl", "grp", "pwd", "resource", "termios"}


def test_the_library_can_be_imported_where_posix_is_missing():
    sources = modules(PACKAGES["kvbook"])
    assert {name: found for name, source in sources.items() if (found := POSIX & imports_at_the_top(source))} == {}
    assert imports_at_the_top("import resource\n") & POSIX, "control"


# Imported by pytest alone.
PLUGIN = "kvbook.diagnosis.pytest_plugin"


def test_the_library_imports_only_what_it_declares():
    sources = modules(PACKAGES["kvbook"])
    assert undeclared({name: source for name, source in sources.items() if name != PLUGIN}, LIBRARY) == []
    assert undeclared({PLUGIN: sources[PLUGIN]}, LIBRARY) == [f"{PLUGIN} imports pytest"]


def test_an_experiment_runs_on_a_machine_with_the_packages_own_dependencies():
    sources = modules()
    measured = {experiment.measure.__module__ for experiment in catalogue.EXPERIMENTS.values()}
    assert len(measured) > 20
    # The catalogue finds the chapters by itself, so that no import of its own leads to them.
    roots = {"kvreport.running.catalogue", *(f"{name.rpartition('.')[0]}.results" for name in measured)}
    needed = {name: sources[name] for root in roots for name in reached(root)}
    assert [line for line in undeclared(needed, LIBRARY, REPORT) if not line.endswith(" imports kvreport")] == []


def test_control_a_library_that_only_this_books_pins_bring_is_found():
    assert undeclared({"kvbook.models.hub": "import httpx2\nfrom huggingface_hub import errors"}, LIBRARY) == [
        "kvbook.models.hub imports httpx2"
    ]
