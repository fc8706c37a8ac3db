"""A chapter computes each of its tables once: in its results, from which figures, words, claims and notebook take it."""

import ast
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbook import paths
from kvreport import chapters

FOLDER = Path(chapters.__file__).parent
# Where there are measures, frames are made once, by name.
NAMES = [one.name for one in pkgutil.iter_modules([str(FOLDER)]) if not (FOLDER / one.name / "measures.py").exists()]


def tables_in(code: str) -> set[str]:
    """List the calls of table functions, with what they are given; results are called so inside their class too."""
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return {
        ast.unparse(call).replace("self.", "results.")
        for call in calls
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "tables"
    }


def users_of(name: str) -> Iterator[tuple[str, str]]:
    """Give what takes a chapter's tables: the modules beside its results, and the code of its notebook."""
    for file in sorted((FOLDER / name).glob("*.py")):
        if file.stem not in ("results", "tables"):
            yield file.name, file.read_text()
    for notebook in paths.CHAPTERS.glob(f"*_{name}.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        yield notebook.name, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", NAMES)
def test_no_table_of_the_results_is_computed_a_second_time(name):
    computed = tables_in((FOLDER / name / "results.py").read_text())
    assert computed
    for user, code in users_of(name):
        assert not computed & tables_in(code), user


def not_kept(code: str) -> list[str]:
    """List the functions that compute a table and do not keep it."""
    functions = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef))
    return [
        function.name
        for function in functions
        if tables_in(ast.unparse(ast.Module(function.body, [])))
        and "cached_property" not in {ast.unparse(decorator) for decorator in function.decorator_list}
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_results_derive_is_kept(name):
    assert not_kept((FOLDER / name / "results.py").read_text()) == []


def test_a_table_that_is_computed_again_is_seen():
    # Control, as the code of a figure would do it.
    inside = "class Results:\n    def growth(self):\n        return tables.growth(self.drift.rows)\n"
    assert tables_in(inside) & tables_in("shown = tables.growth(results.drift.rows)")
    assert not tables_in(inside) & tables_in("shown = tables.growth(results.other.rows)")
    assert not_kept(inside) == ["growth"]
    assert not_kept(inside.replace("    def", "    @cached_property\n    def")) == []
