"""What a docstring refers to exists: Sphinx checks that only for what has a page."""

import ast
import re
from pathlib import Path

import pytest

import kvreport  # noqa: F401 -- adds itself to the packages
from kvbook.fingerprint import PACKAGES
from kvbook.paths import ROOT

REFERENCE = re.compile(r":(mod|func|class|meth|data):`~?(kv(?:book|report)[\w.]*)`")


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
    return set().union(*(names(package) for package in PACKAGES.values()))


def test_every_reference_to_our_own_names_one_that_exists(known):
    sources = [
        *(path for package in PACKAGES.values() for path in package.rglob("*.py")),
        *(ROOT / "pages").rglob("*.md"),
    ]
    assert {path.name: lost for path in sources if (lost := to_nothing(path.read_text("utf-8"), known))} == {}


def test_control_a_reference_to_nothing_is_found(known):
    assert to_nothing("See :func:`kvreport.publishing.checkout.of` and :mod:`~kvreport.site`.", known) == []
    assert to_nothing("See :func:`kvreport.publishing.checkout.nowhere`.", known) == [
        "kvreport.publishing.checkout.nowhere"
    ]


def test_every_module_that_a_page_documents_exists(known):
    pages = (ROOT / "pages" / "api").glob("*.md")
    named = {name for page in pages for name in re.findall(r"automodule:: (\S+)", page.read_text("utf-8"))}
    assert named
    assert named <= known


SECTION = re.compile(r"^ *(Parameters|Returns|Yields|Raises)\n *-{4,}$", re.MULTILINE)


def shown_on_pages() -> set[str]:
    """Name the modules whose functions the API pages show, by their own name or a package's."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "pages").rglob("*.md"))
    named = set(re.findall(r"automodule:: (\S+)", pages))
    for name in list(named):
        package = ROOT / "src" / Path(*name.split(".")) / "__init__.py"
        if package.is_file():
            imports = (node for node in ast.parse(package.read_text("utf-8")).body if isinstance(node, ast.ImportFrom))
            named |= {node.module for node in imports}
    return named


def with_sections(code: str) -> list[str]:
    """List the functions whose docstrings have sections."""
    functions = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if SECTION.search(ast.get_docstring(function, clean=False) or "")]


def test_docstrings_have_sections_where_a_page_shows_them_and_a_plain_text_elsewhere():
    shown, long = shown_on_pages(), {}
    for package in PACKAGES.values():
        for path in package.rglob("*.py"):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            if module not in shown and (found := with_sections(path.read_text("utf-8"))):
                long[module] = found
    assert long == {}


def test_control_a_docstring_with_sections_is_found():
    code = 'def f(x):\n    """Do it.\n\n    Parameters\n    ----------\n    x : int\n    """\n'
    assert with_sections(code) == ["f"]
    assert with_sections('def f(x):\n    """Do it."""\n') == []
