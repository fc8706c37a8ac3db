"""References to numbered figures and tables, without reading a page again for each of them.

For every ``{numref}`` Sphinx reads the whole page that it points to from its file, only to look at one node.  Here each page
is read once and kept until all pages are written; nothing else is done differently.
"""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.std import StandardDomain
from sphinx.environment import BuildEnvironment


def connect(app: Sphinx) -> None:
    """Join the build, in place of Sphinx's own domain."""
    app.add_domain(_Domain, override=True)


class _Domain(StandardDomain):
    """Sphinx's standard domain, which looks at pages that are kept."""

    _kept: "_Kept | None" = None

    def resolve_xref(
        self, env: BuildEnvironment, fromdocname: str, builder: Any, typ: str, target: str, node: Any, contnode: Any
    ) -> nodes.reference | None:
        if typ == "numref":
            # References are resolved only when all pages have been read.
            if self._kept is None:
                self._kept = _Kept(env)
            env = self._kept
        return super().resolve_xref(env, fromdocname, builder, typ, target, node, contnode)


class _Kept:
    """An environment whose pages are read once; they must not be changed."""

    def __init__(self, env: BuildEnvironment) -> None:
        self._env = env
        self._pages: dict[str, nodes.document] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def get_doctree(self, name: str) -> nodes.document:
        """Give a page's tree."""
        if name not in self._pages:
            self._pages[name] = self._env.get_doctree(name)
        return self._pages[name]
