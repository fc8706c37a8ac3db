"""English prose that ships with what is installed: Python's help topics, and READMEs and long docstrings of packages.

The book's stand-ins learn from Python source alone, so they have not read it, but for the help topics: these are a
module of the standard library, in its part for training.  Texts that overlap count once.
"""

import ast
import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

# Pinned, so that another machine has the same texts; the hash that a run records tells.
PACKAGES = (
    "accelerate", "bitsandbytes", "gguf", "ipykernel", "matplotlib", "numpy", "pandas", "papermill", "pydantic",
    "safetensors", "scipy", "seaborn", "sphinx", "torch", "tqdm", "typer",
)
# Characters below which a text is no prose to read on in.
_LONG = 3000
# A line of so many words is a piece of a sentence; so large a share of the lines must be, and so few may be code.
_WORDS, _SENTENCES, _CODE = 7, 0.35, 0.1
_CODE_BEGINS = (">>>", "...", "$", "#", "..", "|", "+-")
# Texts of which a tenth of the runs of eight words stood in another one before are the same text again.
_RUN, _OVERLAP = 8, 0.1


@functools.cache
def texts() -> dict[str, str]:
    """Collect what is installed, by name; of a file the longest docstring alone, for its docstrings are alike."""
    found = {f"topics/{name}": text for name, text in topics.items()}
    for package in filter(importlib.util.find_spec, PACKAGES):
        about = importlib.metadata.metadata(package)
        found[f"README/{package}"] = about.get_payload() or about["Description"] or ""
        root = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        for file in root.rglob("*.py"):
            if "tests" not in file.parts:
                found[f"docstrings/{package}/{file.relative_to(root).as_posix()}"] = _longest_docstring(file)
    kept, seen = {}, set()
    for name in sorted(found):
        text = found[name]
        if len(text) >= _LONG and _is_prose(text):
            words = text.split()
            runs = {tuple(words[i : i + _RUN]) for i in range(len(words))}
            if len(runs & seen) <= _OVERLAP * len(runs):
                kept[name] = text
            seen |= runs
    return kept


def _longest_docstring(file: Path) -> str:
    source = file.read_text("utf-8")
    # Most files have no long string that is prose, and are not worth parsing.
    if not any(len(string) >= _LONG and _is_prose(string) for string in source.split('"""')[1::2]):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return max((ast.get_docstring(node) or "" for node in nodes), key=len)


def _is_prose(text: str) -> bool:
    """Tell sentences from lists of parameters, tables and code."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    sentences = sum(len(line.split()) >= _WORDS for line in lines)
    code = sum(line.startswith(_CODE_BEGINS) for line in lines)
    return sentences >= _SENTENCES * len(lines) and code <= _CODE * len(lines)
