"""What a page asks for with a comment such as ``<!-- part: ledger -->``: parts that only executed chapters can fill."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sphinx.application import Sphinx

from kvbook.errors import UserError
from kvreport.publishing import captions, citation, evaluated
from kvreport.publishing import checkout as origin
from kvreport.publishing.measures import ROLE
from kvreport.site import changes, environment, first_screen, gallery, history, ledger, running, sentences, speed
from kvreport.site.context import Context

# One on a line of its own; the line becomes the part. Of a figure the name stands after a colon.
_MARK = re.compile(r"^<!-- part: ([^:\n]+?)(?:: (\S+))? -->$", re.MULTILINE)
# Becomes the models and processors behind the numbers of the list item that it ends.
_MADE_ON = re.compile(r"<!-- made on -->")
_ITEM = re.compile(r"^\d+\. ", re.MULTILINE)

# Read from executed chapters: a page that asks for one of these is read again when any of them has run again.
OF_CHAPTERS: dict[str, Callable[[Context], str]] = {
    "ledger": lambda context: ledger.markdown(ledger.verdicts(context.chapters)),
    "outcomes": lambda context: sentences.outcomes(context.chapters),
    "gallery": gallery.markdown,
    "runs": environment.markdown,
}
# A figure of a chapter, which also stands on this page: its name follows.
FIGURE = "figure"
# The others are handed no chapters.
PARTS: dict[str, Callable[[Context], str]] = {
    "processors": environment.recorded_processors,
    "memory": running.memory,
    "cards": running.cards,
    "large checks": running.large_checks,
    "paths": running.paths,
    "colab": running.colab,
    "install": running.install,
    "install line": running.install_line,
    "gpu parameters": running.gpu_parameters,
    "never on cuda": running.never_on_cuda,
    "first screen": lambda _context: first_screen.markdown(),
    "changes": changes.markdown,
    "fork": lambda _context: first_screen.fork(),
    "leads": lambda _context: first_screen.leads(),
    "finer": lambda _context: first_screen.finer(),
    "history": lambda _context: history.markdown(),
    "speed": lambda _context: speed.speed(),
    "targets": lambda _context: speed.targets(),
    "growth": lambda _context: speed.growth(),
    "how to cite": lambda context: f"```none\n{citation.of_book(origin.of(context.root))}```",
}


def connect(app: Sphinx) -> None:
    """Join the build; after `executed`, which has brought every chapter up to date by then."""
    app.connect("source-read", _fill)


def shows_chapters(text: str) -> bool:
    """Tell whether a page asks for a part that is read from executed chapters."""
    return any(name in (*OF_CHAPTERS, FIGURE) for name, _ in _MARK.findall(text))


def fill(text: str, context: Context) -> str:
    """Replace every mark in a page's source."""

    def part(mark: re.Match[str]) -> str:
        if mark[1] == FIGURE:
            return gallery.whole(mark[2], context)
        if mark[1] in OF_CHAPTERS:
            return OF_CHAPTERS[mark[1]](context)
        if mark[1] not in PARTS:
            raise UserError(f"a page asks for the part {mark[1]!r}; there are: {', '.join([*OF_CHAPTERS, *PARTS])}")
        return PARTS[mark[1]](replace(context, chapters=()))

    def measured(role: re.Match[str]) -> str:
        if role["chapter"] is None or (book := evaluated.published(role["chapter"])) is None:
            raise UserError(
                f"{role[0]}: on this page a number needs its chapter before it: {{measured}}`layer_drift:...`"
            )
        return captions.filled(role[0].replace(f"{role['chapter']}:", "", 1), book["numbers"])

    def origins(mark: re.Match[str]) -> str:
        item = _ITEM.split(text[: mark.start()])[-1]
        asked = [(role["chapter"], role["what"]) for role in ROLE.finditer(item) if role["maker"] is None]
        books = {chapter: evaluated.published(chapter) for chapter, _ in asked}
        found = (books[chapter]["behind"][key] for chapter, key in dict.fromkeys(asked) if books[chapter])
        return sentences.made_on(one for of_number in found for one in of_number)

    return ROLE.sub(measured, _MARK.sub(part, _MADE_ON.sub(origins, text)))


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname)).parent
    if "<!-- part: changes -->" in source[0]:
        app.env.note_dependency(str(Path(app.srcdir) / changes.SOURCE))
    try:
        source[0] = fill(source[0], Context(list(app.kvbook_chapters.values()), page, Path(app.srcdir)))
    except UserError as error:
        raise SystemExit(f"kvbook: page {docname}: {error}") from None
