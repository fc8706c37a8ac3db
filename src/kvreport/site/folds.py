"""A chapter's page for readers: answer, figure, evidence and remedy stand open, all else is folded.

Sections on a document's claims and on a reader's own run, the parameters, and how the chapter was run move to the end.
Folded where they stand are what we ran, sections marked ``{.fold}`` in the line above their heading, and long tables.
"""

import re
from collections.abc import Callable, Iterable

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_design.shared import create_component, is_component

# Titles of sections that only some readers want: at the end, and where they stand.
_AT_THE_END = re.compile(r".* claims?|Your run against the book")
_IN_PLACE = "What we ran"
# Classes of the cells with the defaults, and with what a run set.
_PARAMETERS = {"tag_parameters", "tag_injected-parameters"}
# A table with more rows is folded, unless readers search it.
_MOST_ROWS = 4


class Folds(SphinxTransform):
    """Fold what most readers pass over."""

    # After targets have been joined to the sections that they name.
    default_priority = 300

    def apply(self) -> None:
        """Change a chapter's tree; other pages stay as they are."""
        if not self.env.docname.startswith("chapters/"):
            return
        run = self._taken(lambda node: is_component(node, "dropdown") and "kvbook-run" in node["container_classes"])
        parameters = self._taken(lambda node: not _PARAMETERS.isdisjoint(node["classes"]))
        sections = list(self.document.findall(nodes.section))
        asides = [section for section in sections if _AT_THE_END.fullmatch(section[0].astext())]
        for section in asides:
            section.parent.remove(section)
        for table in list(self.document.findall(nodes.table)):
            if "kvbook-table" in table["classes"]:
                _fold_if_long(table)
        end = nodes.section("", nodes.title("", "Behind this page"), ids=["behind-this-page"])
        end += map(_of_section, asides)
        end += [*([_folded("Parameters", parameters)] if parameters else []), *run]
        sections[0] += end
        for section in sections:
            if "fold" in section["classes"] or section[0].astext() == _IN_PLACE:
                section.replace_self(_of_section(section))

    def _taken(self, wanted: Callable[[nodes.container], bool]) -> list[nodes.container]:
        """Take containers out of the page."""
        found = list(self.document.findall(lambda node: isinstance(node, nodes.container) and wanted(node)))
        for node in found:
            node.parent.remove(node)
        return found


class TableNumbers(SphinxPostTransform):
    """Begin the title of a folded table with its number."""

    formats = ("html",)
    default_priority = 100

    def run(self, **_: object) -> None:
        """Number them: a table has its number when all pages have been read."""
        numbers = self.env.toc_fignumbers.get(self.env.docname, {}).get("table", {})
        for title in self.document.findall(lambda node: isinstance(node, nodes.rubric) and "of_table" in node):
            title.insert(0, nodes.Text(f"Table {'.'.join(map(str, numbers[title['of_table']]))}: "))


def _fold_if_long(table: nodes.table) -> None:
    n_rows = sum(len(body) for body in table.findall(nodes.tbody))
    if n_rows <= _MOST_ROWS or "kvbook-filter" in table["classes"]:
        return
    around = table.parent
    place = around.index(table)
    following = around[place + 1 : place + 2]
    content = [table, *(node for node in following if "kvbook-downloads" in node.get("classes", ()))]
    for node in content:
        around.remove(node)
    fold = _folded(table[0].astext().split(". ")[0].rstrip("."), content)
    fold[0]["of_table"] = table["ids"][0]
    around.insert(place, fold)


def _of_section(section: nodes.section) -> nodes.container:
    return _folded(section[0].astext(), section[1:], section["ids"])


def _folded(title: str, content: Iterable[nodes.Node], ids: Iterable[str] = ()) -> nodes.container:
    look = {"container_classes": ["sd-mb-3", "kvbook-run"], "title_classes": [], "body_classes": []}
    fold = create_component("dropdown", opened=False, has_title=True, icon=None, chevron=None, **look)
    fold += [nodes.rubric("", title, ids=list(ids)), *content]
    return fold
