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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbook import paths
from kvreport.publishing import keep
from kvreport.running import execution, planning
from kvreport.running.planning import Chapter

# What only tabulates is not needed here.
_TABULATES = ("page.table(", "page.claims(")


def of(chapters: Iterable[Chapter]) -> contextlib.AbstractContextManager[Any]:
    """Begin to draw a chapter's figures where its rows are still those of its page; end when they are there."""
    stale = [chapter for chapter in chapters if chapter.why_stale()]
    if len(stale) == 1 and stale[0].runs_kept() and _page(stale[0]).is_file():
        return subprocess.Popen([sys.executable, "-m", __name__, stale[0].stem], stderr=subprocess.DEVNULL)
    return contextlib.nullcontext()


def draw(chapter: Chapter) -> None:
    """Run a chapter's cells that draw, and put each picture on its page."""
    # With matplotlib, for which a build need not wait.
    from kvreport.publishing import page

    page.show = lambda data, metadata: "image/png" in data and _put(chapter, data, metadata)
    names: dict[str, Any] = {}
    for cell in planning.read_notebook(chapter.source)["cells"]:
        # An exercise's answer draws nothing, and imports torch.
        if cell["cell_type"] == "code" and cell["id"] != "answer":
            code = ast.parse("".join(cell["source"]))
            code.body = [line for line in code.body if not ast.unparse(line).startswith(_TABULATES)]
            exec(compile(code, chapter.stem, "exec"), names)
            names.update(chapter.parameters if "parameters" in cell["metadata"].get("tags", ()) else {})


def _put(chapter: Chapter, data: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Show a picture in the place of the figure's last one; Sphinx then reads the page again in any case."""
    picture, file, figure = base64.b64decode(data["image/png"]), _page(chapter), metadata["image/png"]["name"]
    name, html = f"{hashlib.sha256(picture).hexdigest()}.png", file.read_text("utf-8")
    last = re.search(rf'id="{figure}">\s*<a [^>]*href="\.\./_images/([^"]+)"', html)
    if last and last[1] != name:
        (paths.BUILD / ".doctrees" / "chapters" / f"{chapter.stem}.doctree").unlink(missing_ok=True)
        keep(paths.HTML / "_images" / name, picture)
        keep(file, html.replace(last[1], name).encode())
        print(f"{chapter.stem}: {figure} is on its page, the rest follows", flush=True)


def _page(chapter: Chapter) -> Path:
    return paths.HTML / "chapters" / f"{chapter.stem}.html"


if __name__ == "__main__":
    chapter = next(one for one in planning.plan() if one.stem == sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="kvbook-") as staged:
        os.environ |= execution.environment(chapter, Path(staged), chapter.runs_kept())
        os.chdir(paths.CHAPTERS)
        draw(chapter)
