"""A chapter's sentences with their numbers and marks, and what a reader's own run says of each statement.

A sentence that ends in ``{holds}`id``` is a statement.  While its check holds on every published run nothing is shown
but a link to it; else a mark that no reader overlooks, for the book must not be published so.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvbook import UserError
from kvbook.runs.evidence import beside_of, texts_of
from kvreport.publishing import captions, evaluated, processors, published, statements, wording
from kvreport.publishing.captions import Caption
from kvreport.publishing.judging import NOT_RECORDED
from kvreport.running.planning import Chapter
from kvreport.site.overlay import Notebook, csv_table

YOUR_RUN = "<!-- part: your run -->"
# Stands in a page where a statement is not borne out; a test looks for it.
MARK = "⚠ not borne out by the published rows"


def say(source: Notebook, executed: Notebook, chapter: Chapter) -> tuple[Notebook, dict[str, Caption]]:
    """Fill in a chapter's prose and take its captions out; return the notebook, and these by figure and table."""
    book = evaluated.published(chapter.name)
    own = evaluated.own(chapter.name, published.measured(executed))
    used: Counter[str] = Counter()
    filled = copy.deepcopy(source)
    for place, cell in enumerate(cell for cell in filled["cells"] if cell["cell_type"] == "markdown"):
        text = captions.BLOCK.sub("", "".join(cell["source"]))
        text = captions.filled(text, book["numbers"])
        used.update(match["id"] for match in statements.HOLDS.finditer(text))
        text = statements.HOLDS.sub(lambda match: _mark(match["id"], book, own, chapter.name), text)
        text = text.replace(YOUR_RUN, _comparison(book, own, chapter.name))
        cell["source"] = text if place else _opening(text, book)
    _refuse_strangers(used, book)
    return filled, captions.written(source, book["numbers"])


def _refuse_strangers(used: Counter[str], book: Mapping[str, Any]) -> None:
    if twice := sorted(name for name, count in used.items() if count > 1):
        raise UserError(f"statement `{twice[0]}` stands twice: give the second sentence an id of its own")
    if silent := sorted(set(book["statements"]) - set(used)):
        raise UserError(f"statement `{silent[0]}` has a check and no sentence: end one with {{holds}}`{silent[0]}`")


def _mark(name: str, book: Mapping[str, Any], own: Mapping[str, Any] | None, chapter: str) -> str:
    if name not in book["statements"]:
        raise UserError(f"the sentence `{name}` has no check: add it to the chapter's STATEMENTS")
    found = book["statements"][name]
    shown = f" []{{#{anchor(name)}}}[¶](#{anchor(name)}){{.kvbook-statement}}"
    if not statements.is_borne_out(found):
        shown += f" **({MARK}: {found['told'] or 'no rows'})**"
    if own is not None and own["statements"][name]["comparison"] == "differs":
        shown += f" ([differs on the machine that built this page](#{table_of(chapter)}))"
    return shown


def table_of(chapter: str) -> str:
    """Name the table that sets a reader's run beside a chapter's statements."""
    return f"tab-your-run-{chapter.replace('_', '-')}"


def anchor(name: str) -> str:
    """Name a statement's place on its page."""
    return f"statement-{name}"


def _comparison(book: Mapping[str, Any], own: Mapping[str, Any] | None, chapter: str) -> str:
    """Write the table of statements: what is published, what this machine's run says, and whether they agree."""
    rows = [["statement", "checked", "published", "your run", "outcome"]]
    for name, found in book["statements"].items():
        here = own["statements"][name] if own else {"told": "", "comparison": "not run"}
        rule = "; ".join(filter(None, [f"{found['rule']} ({found['scope']})", found["elsewhere"]]))
        there = _there(found, book["labels"])
        rows.append([f"[{name}](#{anchor(name)})", rule, there, here["told"], here["comparison"]])
    counts = Counter(row[-1] for row in rows[1:])
    caption = (
        "Statements of this chapter, published and on this machine. Values are shown, not judged; "
        "a statement about one model or processor is not comparable with others."
    )
    return f"{_tally(counts, 'This run')}\n\n{csv_table(table_of(chapter), caption, rows)}"


def _there(found: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Write what the published rows say of a statement, on each processor where outcomes differ."""
    printed, said = found["processor"], [found["told"]]
    for name, outcome in found["processors"].items():
        if outcome == "not run" and name != printed:
            # A sentence about one processor is not checked on the others, and what other texts and kinds add is a part.
            said += [] if found["on"] or beside_of(name) else [f"{NOT_RECORDED} ({labels[name]})"]
        elif outcome != found["outcome"]:
            said.append(f"{outcome} on the {labels[name]}: {found['said'][name]}")
    if len(said) > 1:
        said[0] = f"{found['outcome']} on the {labels[printed]}: {found['told']}"
    # Texts on which two processors differ are told with the processor.
    known = {name: outcome for name, outcome in found["processors"].items() if outcome != "not run" and texts_of(name)}
    split = {texts_of(name) for name, outcome in known.items() if outcome != found["outcome"]}
    alike = [name for name, outcome in known.items() if outcome == found["outcome"]]
    if also := dict.fromkeys(f"the {labels[name]}" if texts_of(name) in split else texts_of(name) for name in alike):
        said.append(f"{found['outcome']} on {wording.listed(list(also))} too")
    return "; ".join(said)


def made_on(origins: Iterable[Mapping[str, Any]]) -> str:
    """Write in small type which models, texts and processors made numbers."""
    by_processor: dict[str, list[Mapping[str, Any]]] = {}
    for one in origins:
        by_processor.setdefault(one["processor"], []).append(one)
    said = []
    for processor, of in by_processor.items():
        models = dict.fromkeys(name for one in of for name in one["models"])
        texts = list(dict.fromkeys(filter(None, (one["texts"] for one in of))))
        # Trained ones first, each group in its order.
        named, first = sorted(models, key=wording.is_packaged, reverse=True), sum(map(wording.is_packaged, models)) or 1
        if len(named) > 2:
            rest = named[first:]
            are = "stand-ins" if all(name.endswith(wording.STAND_IN) for name in rest) else "other models"
            named = [*named[:first], f"{len(rest)} {are}"]
        on = f" on {wording.listed(texts)}" if texts else ""
        said.append(", ".join(filter(None, [f"{wording.listed(named)}{on}".strip(), processor])))
    return f"[{'; '.join(said)}]{{.kvbook-made-on}}" if said else ""


def _opening(text: str, book: Mapping[str, Any]) -> str:
    """Say below a chapter's opening on what its numbers were made, and on what else it was recorded."""
    origins = book["behind"][evaluated.PROCESSOR]
    printed = {one["processor"] for one in origins}
    # What a library was held to is told where a sentence speaks of it.
    others = [label for label in book["labels"].values() if label not in printed and not processors.LIMIT.search(label)]
    also = f"\n[Also recorded: {wording.listed(others)}.]{{.kvbook-made-on}}" if others else ""
    return f"{text.rstrip()}\n\n{made_on(origins)}{also}\n"


# Why a run says nothing of a statement, neither for it nor against it.
_SILENT = {
    "not comparable": "{} about another model or processor", "not resolved": "{} that its intervals leave open",
    "not run": "{} that it did not run",
}


def _tally(counts: Counter[str], run: str) -> str:
    """Say what a run decides of the statements, and why it says nothing of the others."""
    agree, differ = counts["agrees"], counts["differs"]
    said = f"{run} can decide {agree + differ} of {counts.total()} statements"
    if agree + differ:
        said += f": {agree} agree{'s' * (agree == 1)} with the book, and {differ} differ{'s' * (differ == 1)}"
    silent = [words.format(counts[outcome]) for outcome, words in _SILENT.items() if counts[outcome]]
    return f"{said}. It cannot decide the others: {wording.listed(silent)}." if silent else f"{said}."


def outcomes(chapters: Iterable[Chapter]) -> str:
    """Say how this machine's runs compare with the book's, and of how much they say nothing."""
    counts: Counter[str] = Counter()
    for chapter in chapters:
        if own := evaluated.own(chapter.name, published.measured(json.loads(chapter.executed.read_text("utf-8")))):
            counts.update(one["comparison"] for one in own["statements"].values())
        else:
            counts["not run"] += len(evaluated.published(chapter.name)["statements"])
    return _tally(counts, "The run that built this site")
