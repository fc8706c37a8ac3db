"""Captions, written in markdown beside their figures and tables.

In a chapter's notebook::

    :::{caption} fig-layer-drift
    :alt: Curves of drift against layer, a colour for each dtype.
    Drift grows in every layer. {measured}`MODEL`, {measured}`TEXTS` texts.
    :::

The alternative text is a figure's, in words, for readers who cannot see it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvbook import UserError
from kvreport.publishing import chapter_name, evaluated, wording
from kvreport.publishing.judging import NOT_RECORDED

BLOCK = re.compile(
    r"^:::\{caption\} (?P<name>\S+)\n(?::alt: (?P<alt>.+)\n)?(?P<text>(?:.|\n)*?)\n:::[ \t]*(?:\n|$)", re.MULTILINE
)
SLOT = re.compile(r"\{measured\}`(?P<key>[^`:]+)`")


class Caption(NamedTuple):
    """What stands below a figure or above a table.

    Attributes
    ----------
    text : str
        MyST.
    alt : str
        Empty for a table.
    """

    text: str
    alt: str = ""


def of(source: Path) -> dict[str, Caption]:
    """Read the captions of a chapter's notebook, by the figure's or table's name, with their numbers filled in."""
    return written(json.loads(source.read_text("utf-8")), evaluated.published(chapter_name(source.stem))["numbers"])


def written(notebook: Mapping[str, Any], numbers: Mapping[str, str]) -> dict[str, Caption]:
    """Read the captions of a notebook, with these numbers filled in."""
    found: dict[str, Caption] = {}
    for block in (block for text in prose(notebook) for block in BLOCK.finditer(text)):
        if (name := block["name"]) in found:
            raise UserError(f"{name} has two captions: keep one")
        alt = block["alt"] or ""
        if name.startswith("fig-") and not alt:
            raise UserError(f"the caption of {name} has no line `:alt:`: say in words what the figure shows")
        text = " ".join(filled(block["text"], numbers).split())
        found[name] = Caption(wording.weights_said(text), alt)
    return found


def prose(notebook: Mapping[str, Any]) -> list[str]:
    """List the texts of a notebook's Markdown cells."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def speaks_of_the_book(item: Mapping[str, Any]) -> bool:
    """Tell whether a figure or table is of a reader's own run, and its caption of the book's.

    The caption of one that compares the two speaks of both.
    """
    return not item.get("published", True) and "your" not in item["name"]


def filled(text: str, numbers: Mapping[str, str]) -> str:
    """Put numbers in their places; ``key@Maker`` is the number on that maker's processor."""

    def number(slot: re.Match[str]) -> str:
        if slot["key"] not in numbers:
            key, _, there = slot["key"].partition("@")
            if there and key in numbers:
                return NOT_RECORDED
            raise UserError(f"the number `{slot['key']}` is nowhere computed: no measure of the chapter has that name")
        return numbers[slot["key"]]

    return SLOT.sub(number, text)
