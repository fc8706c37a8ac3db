"""What a docstring refers to exists: Sphinx checks that only for what has a page."""

import ast
import re
from pathlib import Path

import pytest

import kvbook
from kvbook.paths import ROOT

PACKAGE = Path(kvbook.__file__).parent
REFERENCE = re.compile(r":(mod|func|class|meth|data):`~?(kvbook[\w.]*)`")


def names(package: Path) -> set[str]:
    """Give the dotted names of all modules, and of what is defined in them."""
    found = set()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.add(module)
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(f"{module}.{node.name}")
                members = node.body if isinstance(node, ast.ClassDef) else []
                found |= {f"{module}.{node.name}.{m.name}" for m in members if isinstance(m, ast.FunctionDef)}
            elif isinstance(node, ast.Assign):
                found |= {f"{module}.{target.id}" for target in node.targets if isinstance(target, ast.Name)}
    return found


def to_nothing(text: str, known: set[str]) -> list[str]:
    """List the references to names that do not exist."""
    return [target for _, target in REFERENCE.findall(text) if target not in known]


@pytest.fixture(scope="module")
def known() -> set[str]:
    return names(PACKAGE)


def test_every_reference_to_our_own_names_one_that_exists(known):
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "pages").rglob("*.md")]
    assert {path.name: lost for path in sources if (lost := to_nothing(path.read_text("utf-8"), known))} == {}


def test_control_a_reference_to_nothing_is_found(known):
    assert to_nothing("See :func:`kvbook.origin.of` and :mod:`~kvbook.site`.", known) == []
    assert to_nothing("See :func:`kvbook.origin.nowhere`.", known) == ["kvbook.origin.nowhere"]


def test_every_module_that_a_page_documents_exists(known):
    pages = (ROOT / "pages" / "api").glob("*.md")
    named = {name for page in pages for name in re.findall(r"automodule:: (\S+)", page.read_text("utf-8"))}
    assert named
    assert named <= known
