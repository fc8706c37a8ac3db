"""A changed figure on its page within seconds, before its chapter is executed and the page rendered anew.

Whoever works on a figure looks at it again and again.  Where only what draws has changed, and in one chapter alone, a
process that imports no torch runs the cells that draw, and puts what they give on the page that is there.  It keeps the
pictures, so that the chapter's kernel, which begins meanwhile, need not draw them again.  What goes wrong, that kernel
says.
"""

import ast
import base64
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbook import paths
from kvreport.running import execution, planning
from kvreport.running.planning import Chapter

# What only tabulates is not needed here.
_TABULATES = ("page.table(", "page.claims(")


@contextlib.contextmanager
def of(chapters: Iterable[Chapter]) -> Iterator[None]:
    """Meanwhile, draw a chapter's figures where its rows are still those of its page; end when they are there."""
    stale = [chapter for chapter in chapters if chapter.why_stale()]
    kept = stale[0].runs_kept() if len(stale) == 1 and _page(stale[0].stem).is_file() else None
    with contextlib.ExitStack() as begun:
        if kept:
            staged = Path(begun.enter_context(tempfile.TemporaryDirectory(prefix="kvbook-")))
            where = {"env": os.environ | execution.environment(stale[0], staged, kept), "cwd": paths.CHAPTERS}
            # What is no Python, the chapter's kernel refuses or understands.
            with contextlib.suppress(SyntaxError):
                command = [sys.executable, "-c", script(stale[0])]
                begun.enter_context(subprocess.Popen(command, **where, stderr=subprocess.DEVNULL))
        yield


def script(chapter: Chapter) -> str:
    """Write a chapter's cells that draw as a program, with its parameters."""
    lines = [f"from kvreport.site import preview\npreview.put_figures_on_page({chapter.stem!r})"]
    for cell in planning.read_notebook(chapter.source)["cells"]:
        # An exercise's answer draws nothing, and imports torch.
        if cell["cell_type"] == "code" and cell.get("id") != "answer":
            code = ast.parse("".join(cell["source"])).body
            lines += [line for line in map(ast.unparse, code) if not line.startswith(_TABULATES)]
            if "parameters" in cell["metadata"].get("tags", ()):
                lines += [f"{name} = {value!r}" for name, value in chapter.parameters.items()]
    return "\n".join(lines)


def put_figures_on_page(stem: str) -> None:
    """Let this process show figures on a chapter's page, where a kernel would show them in its notebook."""
    # With matplotlib, for which a build need not wait.
    from kvreport.publishing import page

    page.show = lambda data, metadata: "image/png" in data and _put(stem, data, metadata)


def _put(stem: str, data: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Show a picture in the place of the figure's last one; Sphinx then reads the page again in any case."""
    picture, file, figure = base64.b64decode(data["image/png"]), _page(stem), metadata["image/png"]["name"]
    name, html = f"{hashlib.sha256(picture).hexdigest()}.png", file.read_text("utf-8")
    last = re.search(rf'id="{figure}">\s*<a [^>]*href="\.\./_images/([^"]+)"', html)
    if last and last[1] != name:
        (paths.BUILD / ".doctrees" / "chapters" / f"{stem}.doctree").unlink(missing_ok=True)
        paths.keep(paths.HTML / "_images" / name, picture)
        paths.keep(file, html.replace(last[1], name).encode())
        print(f"{stem}: {figure} is on its page, the rest follows", flush=True)


def _page(stem: str) -> Path:
    return paths.HTML / "chapters" / f"{stem}.html"
