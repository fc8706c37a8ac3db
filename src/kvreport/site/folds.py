"""A chapter's page for readers: answer, figure, evidence and remedy stand open, all else is folded below them.

Sections on a document's claims and on a reader's own run, the parameters, and how the chapter was run move to the end.
A section marked ``{.fold}`` in the line above its heading is folded where it stands.
"""

import re
from collections.abc import Callable, Iterable

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx_design.shared import create_component, is_component

# Titles of the sections that only some readers want.
_AT_THE_END = re.compile(r".* claims?|Your run against the book")
# Classes of the cells with the defaults, and with what a run set.
_PARAMETERS = {"tag_parameters", "tag_injected-parameters"}


def connect(app: Sphinx) -> None:
    """Join the build."""
    app.add_transform(Folds)


class Folds(SphinxTransform):
    """Fold what most readers pass over."""

    # After targets have been joined to the sections that they name.
    default_priority = 300

    def apply(self) -> None:
        """Change a chapter's tree; other pages stay as they are."""
        if not self.env.docname.startswith("chapters/"):
            return
        sections = list(self.document.findall(nodes.section))
        run = self._taken(lambda node: is_component(node, "dropdown") and "kvbook-run" in node["container_classes"])
        parameters = self._taken(lambda node: not _PARAMETERS.isdisjoint(node["classes"]))
        asides = [section for section in sections if _AT_THE_END.fullmatch(section[0].astext())]
        folds = [_folded(section[0].astext(), section[1:], section["ids"]) for section in asides]
        for section in asides:
            section.parent.remove(section)
        end = nodes.section("", nodes.title("", "Behind this page"), ids=["behind-this-page"])
        end += [*folds, *([_folded("Parameters", parameters)] if parameters else []), *run]
        sections[0] += end
        for section in sections:
            if "fold" in section["classes"]:
                section.replace_self(_folded(section[0].astext(), section[1:], section["ids"]))

    def _taken(self, wanted: Callable[[nodes.container], bool]) -> list[nodes.container]:
        """Take containers out of the page."""
        found = list(self.document.findall(lambda node: isinstance(node, nodes.container) and wanted(node)))
        for node in found:
            node.parent.remove(node)
        return found


def _folded(title: str, content: Iterable[nodes.Node], ids: Iterable[str] = ()) -> nodes.container:
    classes = {"container_classes": ["sd-mb-3", "kvbook-run"], "title_classes": [], "body_classes": []}
    fold = create_component("dropdown", opened=False, has_title=True, icon=None, chevron=None, **classes)
    fold += [nodes.rubric("", title, ids=list(ids)), *content]
    return fold
