"""Data flows one way: a module imports only from those above it."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvbook import fingerprint
from kvreport.running import catalogue

imports_of = functools.cache(fingerprint.imports_of)
SRC = Path(__file__).parents[1] / "src"
BOTH = ("kvbook", "kvreport")
LIBRARY, REPORT = SRC.parent / "pyproject.toml", SRC / "kvreport" / "pyproject.toml"

# From the document to the page: the library's parts first, then the report's. What the modules of a part import of one
# another is its own affair, except that no chapter may import another.
ORDER = (
    *(f"kvbook.{name}" for name in (
        "garbage", "paths", "progress", "native", "older", "fingerprint", "lengths", "settings",
        "models", "measuring", "diagnosis", "scores", "server", "exact", "atlas", "releases", "runs", "commands",
        "__main__",
    )),
    *(f"kvreport.{name}" for name in (
        "publishing", "training", "engines", "chapters", "running", "benchmarks", "site", "commands",
    )),
)
# It judges the symptoms of all documents, so it repeats them as their chapters do.
BORROWERS = {None, "bug_or_rounding"}

# What runs on machines without a library that computes, or must start without waiting for one: parts, modules, and what
# draws a chapter's page; its package itself holds what it takes.
LIGHT = (
    "kvbook.settings", "kvbook.paths", "kvbook.progress", "kvbook.scores", "kvbook.__main__", "kvbook.commands",
    "kvreport.commands", "kvreport.publishing", "kvreport.running.execution", "kvreport.site",
)
DRAWS = (".rows", ".measures", ".tables", ".figures")
COMPUTES = {"torch", "transformers"}
# transformers brings these itself.
BROUGHT = {"huggingface_hub", "packaging", "tokenizers"}
# Modules that only some systems have.
POSIX = {"fcntl", "grp", "pwd", "resource", "termios"}


@functools.cache
def modules(*packages: str) -> dict[str, str]:
    """Return the source of every module of packages by its dotted name."""
    found = {}
    for path in sorted(path for package in packages for path in (SRC / package).rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path.read_text("utf-8")
    return found


def part(module: str) -> str | None:
    """Name the part that a module belongs to; None for a package itself."""
    names = module.split(".")
    return ".".join(names[:2]) if len(names) > 1 else None


def chapter(module: str) -> str | None:
    """Name the chapter that a module belongs to; None outside the chapters."""
    return module.split(".")[2] if module.startswith("kvreport.chapters.") else None


def against_the_flow(sources: dict[str, str]) -> list[str]:
    """List every import of something below the importer, of another chapter, or of what has no place in the order."""
    places = {name: place for place, name in enumerate(ORDER)}
    inside = {module: source for module, source in sources.items() if part(module)}
    faults = [f"{module} has no place in the order" for module in inside if part(module) not in places]
    for module, source in inside.items():
        for imported in filter(part, sorted(imports_of(source, module))):
            below = places.get(part(imported), len(ORDER)) > places.get(part(module), len(ORDER))
            other = chapter(imported) not in (None, chapter(module)) and chapter(module) not in BORROWERS
            if below or other:
                faults.append(f"{module} imports {imported}")
    return faults


def behind(start: Iterable[str], imports: Callable[[str], Iterable[str]]) -> set[str]:
    """List these modules and all that they reach by imports."""
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imports(name)
    return seen


def circles(sources: dict[str, str]) -> list[str]:
    """List the modules that reach themselves by imports, at any place in them; a package shows its own modules."""
    others = set(sources) - {module.rpartition(".")[0] for module in sources}
    direct = {module: imports_of(source, module) & others - {module} for module, source in sources.items()}
    return [module for module in sources if module in behind(direct[module], direct.get)]


@functools.cache
def top(source: str) -> str:
    """Return the imports that importing a module makes; one in a function waits until it is called."""
    return "\n".join(ast.unparse(x) for x in ast.parse(source).body if isinstance(x, ast.Import | ast.ImportFrom))


@functools.cache
def imports_at_the_top(source: str) -> set[str]:
    """Name the packages that importing a module imports."""
    nodes = ast.parse(top(source)).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names}


def computing_behind(module: str, sources: dict[str, str]) -> list[str]:
    """List the modules behind a module's imports, at the top of each, that import what computes."""

    def imported(name: str) -> set[str]:
        return imports_of(top(sources[name]), name) & sources.keys()

    return sorted(name for name in behind([module], imported) if COMPUTES & imports_at_the_top(sources[name]))


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


def test_every_module_imports_only_from_those_above_it_and_the_library_never_the_report():
    assert against_the_flow(modules(*BOTH)) == []
    assert not [name for name, source in modules("kvbook").items() if re.search(r"(import|from) kvreport", source)]


@pytest.mark.parametrize(("module", "source", "n_faults"), [
    ("kvbook.measuring.full_and_split", "from kvbook.runs import records", 2),
    ("kvbook.measuring.full_and_split", "from kvreport.publishing.page import Page", 1),
    ("kvbook.paths", "def later():\n    import kvreport.site.overlay\n", 1),
    ("kvreport.publishing.page", "from ..site import overlay", 2),
    ("kvreport.chapters.layer_drift.tables", "from kvreport.chapters.models import tables", 2),
    ("kvbook.helpers", "", 1),
    ("kvbook.runs.records", "from kvbook import fingerprint, paths", 0),
])
def test_control_an_import_against_the_flow_is_found_and_one_with_it_is_no_fault(module, source, n_faults):
    assert len(against_the_flow({module: source})) == n_faults


def test_no_module_reaches_itself_and_control_a_circle_is_found():
    assert circles(modules(*BOTH)) == []
    pair = {"kvbook.garbage": "from kvbook import paths", "kvbook.paths": "import kvbook.garbage"}
    assert circles(pair) == ["kvbook.garbage", "kvbook.paths"]


def test_what_must_start_quickly_and_what_draws_a_page_imports_nothing_that_computes_directly_or_not():
    sources = modules(*BOTH)
    drawing = {name for name in sources if chapter(name) and (name.endswith(DRAWS) or name.count(".") == 2)}
    assert len(drawing) >= 12 * (len(DRAWS) + 1)
    light = drawing | {name for name in sources if name in LIGHT or part(name) in LIGHT}
    assert {module: found for module in light if (found := computing_behind(module, sources))} == {}


def test_control_a_library_that_computes_is_found_behind_two_imports():
    sources = {
        "kvreport.chapters.layer_drift.figures": "from kvreport.chapters.layer_drift import tables",
        "kvreport.chapters.layer_drift.tables": "from kvbook.measuring import agreement",
        "kvbook.measuring.agreement": "import torch",
    }
    assert computing_behind("kvreport.chapters.layer_drift.figures", sources) == ["kvbook.measuring.agreement"]
    sources["kvreport.chapters.layer_drift.tables"] = "def later():\n    from kvbook.measuring import agreement\n"
    assert computing_behind("kvreport.chapters.layer_drift.figures", sources) == []


def test_the_library_can_be_imported_where_posix_is_missing():
    assert {name for name, source in modules("kvbook").items() if POSIX & imports_at_the_top(source)} == set()
    assert imports_at_the_top("import resource\n") & POSIX, "control"


def test_the_library_imports_only_what_it_declares():
    assert undeclared(modules("kvbook"), LIBRARY) == ["kvbook.diagnosis.pytest_plugin imports pytest"]
    # Control: a library that only this book's pins bring.
    foreign = {"kvbook.models.hub": "import httpx2\nfrom huggingface_hub import errors"}
    assert undeclared(foreign, LIBRARY) == ["kvbook.models.hub imports httpx2"]


def test_an_experiment_runs_on_a_machine_with_the_packages_own_dependencies():
    # The catalogue finds them by itself, so that no import of its own leads to them.
    measuring = {experiment.measure.__module__ for experiment in catalogue.EXPERIMENTS.values()}
    assert len(measuring) > 20
    roots = {"kvreport.running.catalogue", *measuring}
    needed = {name: modules(*BOTH)[name] for root in roots for name in fingerprint.reached(root)}
    assert [line for line in undeclared(needed, LIBRARY, REPORT) if not line.endswith(" imports kvreport")] == []
