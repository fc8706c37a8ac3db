"""What a chapter's notebook must be, as a function that lists what it is not."""

import ast
import importlib
import inspect
import re
from typing import Any

from kvbook.runs.experiment import measures_time

MOST_PARAMETERS = 8
MOST_LINES = 80
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
    return [
        *_leftovers(notebook, code),
        *_ids(notebook["cells"]),
        *_parameters(code),
        *_thinness(code),
        *_alone(code),
    ]


def _leftovers(notebook: dict[str, Any], code: list[dict[str, Any]]) -> list[str]:
    found = []
    for cell in code:
        if cell["outputs"]:
            found.append(f"cell {cell.get('id')} holds outputs")
        if cell["execution_count"] is not None:
            found.append(f"cell {cell.get('id')} holds an execution count")
        if "injected-parameters" in cell["metadata"].get("tags", []):
            found.append(f"cell {cell.get('id')} is one run's parameters")
    if "papermill" in notebook["metadata"] or "kvbook" in notebook["metadata"]:
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
    found = []
    lines = 0
    for cell in code:
        source = _source(cell)
        lines += sum(bool(line.strip()) for line in source.splitlines())
        if re.search(r"^\s*[!%]", source, re.MULTILINE):
            found.append(f"cell {cell.get('id')} holds a magic or a shell command")
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append(f"cell {cell.get('id')} defines {node.name}: that belongs into src/kvbook")
    if lines > MOST_LINES:
        found.append(f"{lines} lines of code, more than {MOST_LINES}")
    return found


def needs_the_machine(module: str) -> bool:
    """Tell whether an experiment must not run beside another: it measures time, or sets torch's number of threads itself.

    More busy threads than cores wait for one another, and everything takes several times as long.
    """
    return measures_time(module) or "set_num_threads" in inspect.getsource(importlib.import_module(module))


def _alone(code: list[dict[str, Any]]) -> list[str]:
    """Say which cells need the machine and might be run beside another chapter's, or are kept alone for nothing."""
    found = []
    modules: dict[str, str] = {}
    for cell in code:
        modules |= _imported(_source(cell))
        run = re.findall(r"\b(\w+)\.run\(", _source(cell))
        needy = [name for name in run if needs_the_machine(modules[name])]
        if "alone" in cell["metadata"].get("tags", []):
            if set(run) != set(needy) or not needy:
                found.append(f"cell {cell.get('id')} is tagged alone and runs what can run beside others")
        elif needy:
            found.append(f"cell {cell.get('id')} needs the machine ({', '.join(needy)}) and is not tagged alone")
    return found


def _imported(source: str) -> dict[str, str]:
    """Give the dotted names of what a cell imports by the names that it uses for them."""
    # Magics and shell lines are a fault of their own, and no Python.
    lines = (line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])
