"""What a page asks for with a comment such as ``<!-- part: ledger -->``: parts that only executed chapters can fill."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sphinx.application import Sphinx

from kvbook import UserError, paths
from kvreport.publishing import captions, checkout, citation, evaluated
from kvreport.publishing.measures import ROLE
from kvreport.running.planning import Chapter
from kvreport.site import changes, environment, first_screen, gallery, history, ledger, running, sentences, speed

# One on a line of its own; the line becomes the part. Of a figure the name stands after a colon.
_MARK = re.compile(r"^<!-- part: ([^:\n]+?)(?:: (\S+))? -->$", re.MULTILINE)

# Read from executed chapters, and written with links from a page's folder: a page that asks for one of these is read
# again when any of them has run again.
OF_CHAPTERS: dict[str, Callable[[Sequence[Chapter], Path], str]] = {
    "ledger": lambda chapters, _page: ledger.markdown(ledger.verdicts(chapters)),
    "outcomes": lambda chapters, _page: sentences.outcomes(chapters),
    "runs": lambda chapters, _page: environment.markdown(chapters), "gallery": gallery.markdown,
}
# A figure of a chapter, which also stands on this page: its name follows.
FIGURE = "figure"
# The others are handed no chapters.
PARTS: dict[str, Callable[[], str]] = {
    "changes": changes.markdown, "history": history.markdown, "processors": environment.recorded_processors,
    "first screen": first_screen.markdown, "fork": first_screen.fork, "leads": first_screen.leads,
    "finer": first_screen.finer,
    "memory": running.memory, "cards": running.cards, "large checks": running.large_checks, "paths": running.paths,
    "install": running.install, "install line": running.install_line, "colab": running.colab,
    "gpu parameters": running.gpu_parameters, "never on cuda": running.never_on_cuda,
    "speed": speed.speed, "targets": speed.targets, "growth": speed.growth,
    "how to cite": lambda: f"```none\n{citation.of_book(checkout.of(paths.ROOT))}```",
}


def shows_chapters(text: str) -> bool:
    """Tell whether a page asks for a part that is read from executed chapters."""
    return any(name in (*OF_CHAPTERS, FIGURE) for name, _ in _MARK.findall(text))


def fill(text: str, chapters: Sequence[Chapter], page: Path) -> str:
    """Replace every mark in the source of a page in a folder; the chapters have been executed."""
    # A page asks for a hundred numbers of a dozen chapters.
    published = functools.cache(evaluated.published)

    def part(mark: re.Match[str]) -> str:
        if mark[1] == FIGURE:
            return gallery.whole(mark[2], chapters, page)
        if mark[1] in OF_CHAPTERS:
            return OF_CHAPTERS[mark[1]](chapters, page)
        if mark[1] not in PARTS:
            raise UserError(f"a page asks for the part {mark[1]!r}; there are: {', '.join([*OF_CHAPTERS, *PARTS])}")
        return PARTS[mark[1]]()

    def measured(role: re.Match[str]) -> str:
        numbers = published(role["chapter"])["numbers"] if role["chapter"] else {}
        if not numbers:
            remedy = "on this page a number needs its chapter before it: {measured}`layer_drift:...`"
            raise UserError(f"{role[0]}: {remedy}")
        return captions.filled(role[0].replace(f"{role['chapter']}:", "", 1), numbers)

    # Models and processors behind the numbers of the list item that the mark ends.
    def origins(mark: re.Match[str]) -> str:
        item = re.split(r"^\d+\. ", text[: mark.start()], flags=re.MULTILINE)[-1]
        asked = dict.fromkeys((role["chapter"], role["what"]) for role in ROLE.finditer(item) if role["maker"] is None)
        found = (published(chapter)["behind"][what] for chapter, what in asked if published(chapter)["numbers"])
        return sentences.made_on(one for of_number in found for one in of_number)

    return ROLE.sub(measured, _MARK.sub(part, re.sub("<!-- made on -->", origins, text)))


def fill_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill a page, when every chapter is up to date."""
    if "<!-- part: changes -->" in source[0]:
        app.env.note_dependency(str(Path(app.srcdir) / changes.SOURCE))
    try:
        source[0] = fill(source[0], list(app.kvbook_chapters.values()), Path(app.env.doc2path(docname)).parent)
    except UserError as error:
        raise SystemExit(f"kvbook: page {docname}: {error}") from None
