"""What a docstring refers to exists: Sphinx checks that only for what has a page."""

import ast
import importlib
import pydoc
import re

import kvreport  # noqa: F401 -- adds itself to the packages
from kvbook.fingerprint import PACKAGES
from kvbook.paths import ROOT

REFERENCE = re.compile(r"(?::(?:mod|func|class|meth|data):`~?|automodule:: )(kv(?:book|report)[\w.]*)")
SECTION = re.compile(r"^ *(Parameters|Returns|Yields|Raises)\n *-{4,}$", re.MULTILINE)


def to_nothing(text: str) -> list[str]:
    """List the references to names that do not exist."""
    return [target for target in REFERENCE.findall(text) if pydoc.locate(target) is None]


def test_every_reference_to_our_own_names_one_that_exists_and_control_a_reference_to_nothing_is_found():
    sources = [path for package in PACKAGES.values() for path in package.rglob("*.py")]
    sources += (ROOT / "pages").rglob("*.md")
    assert {path.name: lost for path in sources if (lost := to_nothing(path.read_text("utf-8")))} == {}
    # Control.
    assert to_nothing("See :func:`kvreport.publishing.checkout.of` and :mod:`~kvreport.site`.") == []
    lost = "kvreport.publishing.checkout.nowhere"
    assert to_nothing(f"See :func:`{lost}`.") == [lost] == to_nothing(f".. automodule:: {lost}")


def shown_on_pages() -> set[str]:
    """Name the modules whose functions the API pages show: by their own name or a package's."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "pages").rglob("*.md"))
    named = re.findall(r"automodule:: (\S+)", pages)
    packages = (module for module in map(importlib.import_module, named) if hasattr(module, "__path__"))
    return {*named, *(one.__module__ for package in packages for one in vars(package).values() if callable(one))}


def with_sections(code: str) -> list[str]:
    """List the functions whose docstrings have sections."""
    functions = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if SECTION.search(ast.get_docstring(function, clean=False) or "")]


def test_docstrings_have_sections_where_a_page_shows_them_and_plain_text_elsewhere_and_control_one_with_them_is_found():
    shown, long = shown_on_pages(), {}
    for package in PACKAGES.values():
        for path in package.rglob("*.py"):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            if module not in shown and (found := with_sections(path.read_text("utf-8"))):
                long[module] = found
    assert long == {}
    # Control.
    code = 'def f(x):\n    """Do it.\n\n    Parameters\n    ----------\n    x : int\n    """\n'
    assert with_sections(code) == ["f"]
    assert with_sections('def f(x):\n    """Do it."""\n') == []
