"""A chapter as its page shows it: prose from the source, outputs from the executed copy.

A plain function on notebooks, without Sphinx. Cells are matched by id, so prose can change without a run.
Along the way

- a published figure's caption, name and alternative text become what MyST-NB numbers; its files, a link to it and a
  ready citation follow;
- a published table becomes a numbered directive, which a reader's program reads as a table; the same follows it;
- the cell with this run's parameters follows that with the defaults: parameters are part of a result;
- a last section says how the chapter was run; :mod:`kvreport.site.folds` folds both away.
"""

import copy
import csv
import io
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import UserError, paths
from kvbook.models.corpus import POPULATIONS
from kvreport.publishing import citation, processors, published, wording
from kvreport.publishing.captions import Caption, speaks_of_the_book
from kvreport.publishing.checkout import Origin
from kvreport.running.planning import Chapter
from kvreport.site import pdf

Notebook = dict[str, Any]
Cell = dict[str, Any]

INJECTED = "injected-parameters"

# What a reader calls each file of a figure or table, in the order in which they are offered.
_FILE_KINDS = {"svg": "SVG", "pdf": "PDF", "png": "PNG", "csv": "CSV"}

# What begins the caption of a figure that a reader's own run drew.
YOURS = "*Your run; the caption speaks of the book's.*"
# A caption with one of these words says itself where its rows were measured.
_SAYS_WHERE = re.compile(r"Intel|AMD|processor|machine")
_COUNTS = {"n_samples": "texts", "n_tokens": "tokens each", "n_prompts": "prompts", "n_new_tokens": "tokens written"}

# A cell of a table that MyST would read as the start of a list, a heading, a quotation or a directive: "-", "1.", "#
# x", ":::{note}". Behind backticks that open a directive comes no further one; behind those of inline code there does.
_BLOCK_START = re.compile(r"^\s*([-+*#>]|\d+[.)])(?=\s|$)|^\s*(?:(:)(?=::)|(~)(?=~~)|(`)(?=``[^`]*$))")


def overlay(
    source: Notebook, executed: Notebook, chapter: Chapter, captions: Mapping[str, Caption], site: str | None = None
) -> Notebook:
    """Join a source notebook with the outputs of its executed copy.

    Captions are those that it has in markdown; the site's address is left out where nobody knows it.
    """
    _refuse_failed(executed)
    outputs = {cell["id"]: cell for cell in executed["cells"] if cell["cell_type"] == "code"}
    merged = copy.deepcopy(source)
    cells: list[Cell] = []
    for cell in merged["cells"]:
        cells.append(cell)
        if cell["cell_type"] == "code":
            if (ran := outputs.get(cell["id"])) is None or _text(ran) != _text(cell):
                raise UserError(f"cell {cell['id']!r} is not the one that was executed: execute the chapter again")
            cell |= {"outputs": ran["outputs"], "execution_count": ran.get("execution_count")}
            cells += _following(cell, captions, chapter, site)
            if "parameters" in _tags(cell):
                cells += [ran for ran in outputs.values() if INJECTED in _tags(ran)]
    cells.append(_how_it_was_run(executed["metadata"]["kvbook"], chapter))
    merged["cells"] = cells
    return merged


def _refuse_failed(executed: Notebook) -> None:
    failed = executed["metadata"].get("papermill", {}).get("exception")
    if failed or any(output["output_type"] == "error" for output in published.outputs(executed)):
        raise UserError("its last run failed, and a failed run is never shown: mend it and execute it again")


def _following(cell: Cell, captions: Mapping[str, Caption], chapter: Chapter, site: str | None) -> list[Cell]:
    """Collect what follows a cell that publishes; of what is published the figure alone stays there."""
    after: list[Cell] = []
    items = [item for item, _ in published.items({"cells": [cell]})]
    figures = [item for item in items if item["name"].startswith("fig-")]
    if len(figures) > 1:
        remedy = "give each a cell, so that each gets a caption"
        raise UserError(f"cell {cell['id']!r} publishes {len(figures)} figures: {remedy}")
    for item in items:
        text, alt = captions[item["name"]]
        caption = f"{YOURS} {text}" if speaks_of_the_book(item) else f"{text}{_where(item, text)}"
        if item in figures:
            look = cell["metadata"].setdefault("mystnb", {})
            look["figure"] = {"name": item["name"], "caption": caption}
            # dark-light: the theme leaves the figure alone, and kvbook.css turns its light and dark round, not its
            # hues, which its legend names.
            look["image"] = {"alt": alt, "classes": "dark-light"}
        else:
            rows = csv.reader(io.StringIO(item["csv"]))
            table = csv_table(item["name"], caption, rows, item.get("filtered", False))
            after.append(_markdown(f"shown-{item['name']}", table))
        after.append(_offered(item, chapter, site))
    shown = [output for output in cell["outputs"] if published.item_of(output) in (None, *figures)]
    # Which runs a chapter has is for programs alone.
    cell["outputs"] = [output for output in shown if "kvbook_runs" not in output.get("metadata", {})]
    return after


def _where(item: Mapping[str, Any], caption: str) -> str:
    """Name the processors that measured a figure or a table, unless its caption does."""
    machines = (made["machine"] or {} for made in item.get("made_by", ()))
    named = list(dict.fromkeys(filter(None, map(processors.in_few_words, machines))))
    if not named or _SAYS_WHERE.search(caption):
        return ""
    return f" Processor{'s' * (len(named) > 1)}: {wording.listed(named)}."


def _offered(item: Mapping[str, Any], chapter: Chapter, site: str | None) -> Cell:
    """Write what follows a figure or a table: its files, a link to it, and how to cite it."""
    name, made = item["name"], cited_in(chapter)
    folder = made if item.get("judged") else chapter.figures
    kinds = [kind for kind in _FILE_KINDS if kind in item["files"]]
    links = [_download(_FILE_KINDS[kind], folder / f"{name}.{kind}", chapter) for kind in kinds]
    cited, how = f"`{name}` {citation.OWN_RUN}.", "How this was run"
    if processors.are_recorded(item.get("made_by", ())):
        bibtex = made / f"{name}.bib"
        links.append(_download("BibTeX", bibtex, chapter))
        cited, how = f"```none\n{bibtex.read_text('utf-8')}```", f"{how}, and how to cite it"
    address = f"{site}chapters/{chapter.stem}.html" if site else ""
    links.append(f"[permalink]({address}#{name})")
    fold = f":::::{{dropdown}} {how}\n{cited}\n\n{_made_by(item)}\n:::::"
    text = f"::::::{{container}} kvbook-downloads\n{' · '.join(links)}\n\n{fold}\n::::::"
    return _markdown(f"downloads-{name}", text)


def cited_in(chapter: Chapter) -> Path:
    """Name the folder of a chapter's citations: BibTeX of every figure and table of the book's rows, and verdicts."""
    return chapter.folders.figures.with_name("citations") / chapter.stem


def write_citations(chapters: Iterable[Chapter], book: Origin) -> None:
    """Write the citations of all chapters."""
    for chapter in chapters:
        for item in published.of(chapter.executed, chapter.source):
            entry = cited_in(chapter) / f"{item.name}.bib"
            # What is the same stays: Sphinx reads a page again when a file that it offers is newer.
            if item.citable:
                paths.keep(entry, citation.of_published(item, book).encode())
            else:
                entry.unlink(missing_ok=True)
            if item.judged:
                paths.keep(entry.with_suffix(".csv"), item.rows.encode())


def _made_by(item: Mapping[str, Any]) -> str:
    """Write how a figure's rows were made: the one place for machine, versions, threads and lengths."""
    lines = []
    for made in item.get("made_by", ()):
        settings, machine = made["settings"], made["machine"] or {}
        facts = [f"`{made['experiment']}`", wording.weights_said(", ".join(made["models"]))]
        counts = {words: settings[key] for key, words in _COUNTS.items() if key in settings}
        facts += [f"{n} {words if n != 1 else words.replace('s', '', 1)}" for words, n in counts.items()]
        facts.append(POPULATIONS.get(settings.get("corpus"), ""))
        if "dtypes" in settings:
            facts.append(", ".join(settings["dtypes"]))
        facts += [processors.device(machine)]
        facts += [f"{name} {machine[name]}" for name in ("torch", "transformers", "python") if name in machine]
        seeds = dict.fromkeys(map(str, made["seeds"]))
        facts += [f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"]
        facts += [f"run{'s' * (len(made['runs']) > 1)} {', '.join(run[:8] for run in made['runs'])}"]
        lines.append(f"- {'; '.join(filter(None, facts))}")
    return "\n".join(lines)


def _download(label: str, file: Path, chapter: Chapter) -> str:
    return f"{{download}}`{label} <{Path(os.path.relpath(file, chapter.source.parent)).as_posix()}>`"


def csv_table(name: str, caption: str, rows: pd.DataFrame | Iterable[Iterable[object]], filtered: bool = False) -> str:
    """Write a table, or rows of which the first is the header, as a numbered directive."""
    if isinstance(rows, pd.DataFrame):
        rows = [rows.columns, *rows.to_numpy()]
    lines = io.StringIO()
    # A field of several lines could hold any block of MyST, a directive that includes a file for one.
    safe = ([_BLOCK_START.sub(_escaped, str(field).replace("\n", " ")) for field in row] for row in rows)
    csv.writer(lines, lineterminator="\n").writerows(safe)
    # One line, whatever the caption's own line breaks: it is the directive's argument.
    head = f"::::{{csv-table}} {' '.join(caption.split())}\n:name: {name}\n:header-rows: 1"
    return f"{head}\n:class: kvbook-table{' kvbook-filter' if filtered else ''}\n\n{lines.getvalue()}::::"


def _escaped(start: re.Match[str]) -> str:
    mark = next(filter(None, start.groups()))
    return f"{mark[:-1]}\\{mark[-1]}"


def _how_it_was_run(run: Mapping[str, Any], chapter: Chapter) -> Cell:
    facts = {
        "Parameters": _parameters(run),
        "Model and weights": ", ".join(f"`{name}`" for name in _model(run)),
        "Machine": _machine(run), "Versions": ", ".join(map(" ".join, run["versions"].items())),
        "Commit": _commit(run["commit"]),
        "Started": f"{run['started'].replace('+00:00', '').replace('T', ' ')} UTC",
        "Took": f"{run['duration_s']:g} s",
        "Notebook": _download("with its outputs", chapter.executed, chapter),
    }
    if pdf.wanted():
        facts["This page"] = f"[as PDF](../{pdf.FOLDER}/{chapter.stem}.pdf){{.external}}"
    rows = "\n".join(f"{name}\n: {value}\n" for name, value in facts.items() if value)
    head = ":::::{dropdown} How this was run\n:class-container: kvbook-run"
    return _markdown("how-it-was-run", f"{head}\n\n{rows}:::::")


def _model(run: Mapping[str, Any]) -> list[str]:
    """Name a model, and which weights; a folder, a file and a hub id bring their own."""
    model, weights = run.get("model") or "", run.get("weights") or ""
    return list(filter(None, (model, "" if any(mark in model for mark in ("/", "\\")) else weights)))


def _machine(run: Mapping[str, Any]) -> str:
    machine, share = run["machine"], run.get("shared_threads")
    # Only a processor's threads are shared out.
    is_shared = share is not None and machine["device"] == "cpu" and share < machine["threads"]
    behind = f" ({share} for experiments that measure no time)" if is_shared else ""
    return f"{processors.device(machine)}{behind}, {machine['system']}"


def _commit(commit: str) -> str:
    if commit == "unknown":
        return "unknown (not run from a git checkout)"
    return f"`{commit.rstrip('+')}`{' with uncommitted changes' if commit.endswith('+') else ''}"


def _parameters(run: Mapping[str, Any]) -> str:
    given = ", ".join(f"`{name} = {value!r}`" for name, value in run["parameters"].items())
    rest = "the defaults in the chapter's parameters cell"
    return f"{given}; for the others {rest} (set `{run['profile']}`)" if given else f"{rest} (set `{run['profile']}`)"


def _markdown(cell_id: str, text: str) -> Cell:
    return {"cell_type": "markdown", "id": cell_id, "metadata": {}, "source": text}


def _text(cell: Cell) -> str:
    return "".join(cell["source"])


def _tags(cell: Cell) -> list[str]:
    return cell["metadata"].get("tags", [])
