"""What executed chapters published, read back: figures and tables, each with the run that made it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import UserError, fingerprint, paths
from kvreport.publishing import captions, chapter_name, evaluated, processors, statements
from kvreport.publishing.wording import csv_of

# Sixteen hexadecimal digits, as for the folders of runs.
_HASH_LENGTH = 16


@dataclass(frozen=True)
class Published:
    """A figure or a table of a chapter.

    Attributes
    ----------
    name : str
        Such as ``fig-layer-drift``.
    chapter, title : str
        The chapter's file name without suffix, and its first heading.
    caption : str
        MyST text.
    alt : str
        A figure in words, for readers who cannot see it.
    files : dict of str to str
        Kind of file to its SHA-256.
    run : dict
        What :mod:`kvreport.running.execution` kept of the run: parameters, machine, versions, commit, start, digest of
        all inputs.
    picture : bytes
        The PNG of the page; empty for a table.
    rows : str
        A table as it is shown, in CSV; empty for a figure.
    made_by : tuple of dict
        What :mod:`kvreport.publishing.processors` kept of the runs of its rows; empty where they were not named.
    judged : bool
        Whether it holds verdicts, which are judged when it is read and not when the chapter was executed.
    own : bool
        Whether a reader's run with parameters of its own made it, and its caption speaks of the book's.
    """

    name: str
    chapter: str
    title: str
    caption: str
    alt: str
    files: Mapping[str, str]
    run: Mapping[str, Any]
    picture: bytes = field(default=b"", repr=False)
    rows: str = ""
    made_by: tuple[Mapping[str, Any], ...] = ()
    judged: bool = False
    own: bool = False

    @property
    def kind(self) -> str:
        """``figure`` or ``table``."""
        return "figure" if self.name.startswith("fig-") else "table"

    @property
    def citable(self) -> bool:
        """Whether its rows ship with the book; those of a reader's own run do not."""
        return processors.are_recorded(self.made_by)

    @property
    def run_hash(self) -> str:
        """The chapter run's name: equal for equal code, parameters, data, stand-ins and library versions."""
        return self.run["inputs_sha256"][:_HASH_LENGTH]

    @property
    def rows_hash(self) -> str:
        """The name of the rows behind it: equal rows, equal name, on whatever machine."""
        return self.files["csv"][:_HASH_LENGTH]

    @property
    def place(self) -> str:
        """Where it stands in the site, from the site's root."""
        return f"chapters/{self.chapter}.html#{self.name}"


def read(executed: Path) -> dict[str, Any]:
    """Read an executed copy; its verdicts are judged now, by today's rules, on the rows that it shows."""
    notebook = json.loads(executed.read_text("utf-8"))
    chapter = chapter_name(executed.stem)
    if (book := evaluated.published(chapter))["verdicts"] is None:
        return notebook
    own = evaluated.own(chapter, measured(notebook))
    for item, _ in items(notebook):
        if item["name"] == book["verdicts"]["table"]:
            item["document"] = book["verdicts"]["document"]
            if (judged := book if item.get("published") else own) is not None:
                content = csv_of(pd.DataFrame(judged["verdicts"]["rows"]))
                item |= {"csv": content.decode(), "files": {"csv": hashlib.sha256(content).hexdigest()}, "judged": True}
    return notebook


def items(notebook: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Read what an executed copy says of each figure and table that it publishes, with the output that does."""
    for output in outputs(notebook):
        if (item := item_of(output)) is not None:
            yield item, output


def item_of(output: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read what an output says of the figure or table that it publishes."""
    metadata = output.get("metadata", {})
    figure = metadata.get("image/png", {})
    return figure if "name" in figure else metadata.get("text/html", {}).get("kvbook_table")


def measured(notebook: Mapping[str, Any]) -> dict[str, str]:
    """Tell which runs an executed copy was made from: experiment to folder."""
    return next(filter(None, (output.get("metadata", {}).get("kvbook_runs") for output in outputs(notebook))), {})


def of(executed: Path, source: Path | None = None) -> list[Published]:
    """List what an executed chapter published, in its order, with the captions of its source."""
    notebook = read(executed)
    written = captions.of(source or paths.CHAPTERS / executed.name)
    about = {"chapter": executed.stem, "title": title(notebook), "run": notebook["metadata"]["kvbook"]}
    found = []
    for item, output in items(notebook):
        if (name := item["name"]) not in written:
            raise UserError(f"{name} has no caption: write one in the notebook, in a block :::{{caption}} {name}")
        found.append(Published(
            **about, name=name, caption=written[name].text, alt=written[name].alt, files=item["files"],
            picture=base64.b64decode(output.get("data", {}).get("image/png", "")), rows=item.get("csv", ""),
            made_by=tuple(item.get("made_by", ())), judged="judged" in item, own=captions.speaks_of_the_book(item),
        ))
    return found


@dataclass(frozen=True)
class Sentence:
    """A statement of a chapter, to be cited.

    Attributes
    ----------
    name : str
        Its id.
    chapter, title : str
        The chapter's file name without suffix, and its first heading.
    text : str
        The sentence, with its numbers.
    rows_hash : str
        The name of the published rows that it was checked on.
    made_by : tuple of dict
        What :mod:`kvreport.publishing.processors` kept of the runs that bear it out.
    """

    name: str
    chapter: str
    title: str
    text: str
    rows_hash: str
    made_by: tuple[Mapping[str, Any], ...]

    @property
    def place(self) -> str:
        """Where it stands in the site, from the site's root."""
        return f"chapters/{self.chapter}.html#statement-{self.name}"


def stated() -> dict[str, Path]:
    """Name the statements of all chapters, in their order, each with its chapter's source."""
    each = ((source, json.loads(source.read_text("utf-8"))) for source in sorted(paths.CHAPTERS.glob("*.ipynb")))
    texts = ((source, text) for source, notebook in each for text in captions.prose(notebook))
    return {match["id"]: source for source, text in texts for match in statements.HOLDS.finditer(text)}


def sentences(sources: Iterable[Path]) -> list[Sentence]:
    """List the statements of these chapters, in their order."""
    found = []
    for source in sources:
        book, notebook = evaluated.published(chapter_name(source.stem)), json.loads(source.read_text("utf-8"))
        rows_hash = fingerprint.of_values(book["rows"])[:_HASH_LENGTH]
        for text in captions.prose(notebook):
            # A sentence without a check is refused where its page is written.
            for match in filter(lambda match: match["id"] in book["statements"], statements.HOLDS.finditer(text)):
                one = book["statements"][match["id"]]
                bearing = [name for name, outcome in one["processors"].items() if outcome == "holds"]
                made_by = tuple(made for name in bearing for made in one["made_by"][name])
                sentence = captions.filled(statements.sentence_before(text, match.start()), book["numbers"])
                found.append(Sentence(match["id"], source.stem, title(notebook), sentence, rows_hash, made_by))
    return found


def title(notebook: Mapping[str, Any]) -> str:
    """Return a notebook's first heading."""
    headings = (re.search(r"^#\s+(.+?)\s*$", text, re.MULTILINE) for text in captions.prose(notebook))
    return next((heading[1] for heading in headings if heading), "Untitled")


def everything(executed: Iterable[Path] | None = None) -> list[Published]:
    """List what all chapters published."""
    if executed is None:
        executed = [p for p in sorted(paths.EXECUTED.glob("*.ipynb")) if not p.name.endswith(".partial.ipynb")]
        if not executed:
            raise UserError(f"no chapter has been executed in {paths.EXECUTED}: run `make book` first")
    return [item for path in executed for item in of(path)]


def outputs(notebook: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Go through the outputs of all cells."""
    for cell in notebook["cells"]:
        yield from cell.get("outputs", ())
