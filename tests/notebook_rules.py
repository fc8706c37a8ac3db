"""What a chapter's notebook must be, as a function that lists what it is not."""

import ast
import pkgutil
import re
from typing import Any

MOST_PARAMETERS = 8
MOST_LINES = 80
MAGIC = re.compile(r"^\s*[!%]", re.MULTILINE)
# What nbformat asks of a cell's id.
CELL_ID = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
# A parameter: name, type, default, and a comment that papermill --help-notebook shows.
PARAMETER = re.compile(r"^\w+: [^=]+ = .+  # \S.*$")


def faults(notebook: dict[str, Any]) -> list[str]:
    """List what is wrong with a chapter's notebook.

    Parameters
    ----------
    notebook
        As JSON reads it.

    Returns
    -------
    list of str
        One line a fault; empty when the notebook is as it must be.
    """
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [*_leftovers(notebook, code), *_ids(notebook["cells"]), *_parameters(code), *_thinness(code), *_names(code)]


def _leftovers(notebook: dict[str, Any], code: list[dict[str, Any]]) -> list[str]:
    found = [f"cell {cell.get('id')} holds outputs" for cell in code if cell["outputs"]]
    found += [f"cell {cell.get('id')} holds an execution count" for cell in code if cell["execution_count"] is not None]
    injected = [cell for cell in code if "injected-parameters" in cell["metadata"].get("tags", [])]
    found += [f"cell {cell.get('id')} is one run's parameters" for cell in injected]
    if {"papermill", "kvbook"} & notebook["metadata"].keys():
        found.append("the metadata of a run are in it")
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("its kernel is not python3")
    return found


def _ids(cells: list[dict[str, Any]]) -> list[str]:
    ids = [cell.get("id", "") for cell in cells]
    found = [f"cell {number} has no proper id" for number, cell_id in enumerate(ids, 1) if not CELL_ID.match(cell_id)]
    if len(set(ids)) < len(ids):
        found.append("two cells have one id")
    return found


def _parameters(code: list[dict[str, Any]]) -> list[str]:
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        return [f"{len(tagged)} cells are tagged parameters, not one"]
    lines = [line for line in _source(tagged[0]).splitlines() if line.strip() and not line.startswith("#")]
    found = [f"parameter without type or comment: {line}" for line in lines if not PARAMETER.match(line)]
    if len(lines) > MOST_PARAMETERS:
        found.append(f"{len(lines)} parameters, more than {MOST_PARAMETERS}")
    return found


def _thinness(code: list[dict[str, Any]]) -> list[str]:
    magic = [cell.get("id") for cell in code if MAGIC.search(_source(cell))]
    found = [f"cell {cell_id} holds a magic or a shell command" for cell_id in magic]
    found += [
        f"cell {cell.get('id')} defines {node.name}: that belongs into src/kvbook"
        for cell in code if cell.get("id") not in magic for node in ast.walk(ast.parse(_source(cell)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    lines = sum(bool(line.strip()) for cell in code for line in _source(cell).splitlines())
    return [*found, f"{lines} lines of code, more than {MOST_LINES}"] if lines > MOST_LINES else found


def _names(code: list[dict[str, Any]]) -> list[str]:
    """Say what the cells take from a module that does not have it: only an execution would meet that."""
    # Magics and shell commands are a fault of their own, and no Python.
    trees = [ast.parse(source) for source in map(_source, code) if not MAGIC.search(source)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [(node, alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node, alias in named}
    return [
        f"{imported[node.value.id]} has no {node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
        if not hasattr(pkgutil.resolve_name(imported[node.value.id]), node.attr)
    ]


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])
