"""Signatures as a reader of the documentation needs them: without the folders of the machine that built it."""

import re
from typing import Any

from sphinx.application import Sphinx

# A dataclass's defaults are shown by their values, whatever they were written as.
_PATH = re.compile(r"(?:Posix|Windows)Path\('[^']*'\)")


def connect(app: Sphinx) -> None:
    """Join the build."""
    app.connect("autodoc-process-signature", _hide_paths)


def without_paths(signature: str) -> str:
    """Replace every path that is a default value by dots."""
    return _PATH.sub("...", signature)


def _hide_paths(
    _app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    return (signature and without_paths(signature), returned)
