"""A ready citation of the book, or of one figure, table or statement with the runs behind it, as BibTeX.

An entry holds only what is known: no address unless the environment or git names one, no DOI unless CITATION.cff has
it.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from kvbook import UserError
from kvreport.publishing import processors
from kvreport.publishing.checkout import Origin
from kvreport.publishing.published import Published, Sentence

# {numref}`fig-x`, {cite:t}`key` and the like: a reference's program cannot follow them.
_ROLE = re.compile(r"\{[\w:]+\}`([^`]*)`")
_MARKUP = re.compile(r"[`*]+")
# A mark before a space that ends no abbreviation: "95 %, e.g. 0.5" and "Fig. 2" go on.
_SENTENCE_END = re.compile(r"(?<!Fig)(?<!Tab)(?<! al)(?<! vs)(?<=[\w'’)\]%”-]{2})[.?!](?=\s|$)")

# TeX's own characters.
_TEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
})

# Why there is no entry of a figure or table.
OWN_RUN = "is of your own run, which is not in the book: cite the book, and keep your rows"

# How many names are offered in place of one that does not exist.
_OFFERED = 3


def of_book(book: Origin) -> str:
    """Write the entry of the whole book.

    Parameters
    ----------
    book
        From :func:`kvreport.publishing.checkout.of`.
    """
    about = {"year": str(book.year), "version": book.version.translate(_TEX)}
    return _entry("kvbook", book, book.title, about, book.site)


def of_published(item: Published, book: Origin) -> str:
    """Write the entry of one figure or table.

    Parameters
    ----------
    item
        From :mod:`kvreport.publishing.published`.
    book
        From :func:`kvreport.publishing.checkout.of`.

    Returns
    -------
    str
        BibTeX. Its key ends in the rows' hash, so that two versions of a figure can stand in one bibliography.

    Raises
    ------
    UserError
        When a reader's own run made it, which nobody else can look up.
    """
    if not item.citable:
        raise UserError(f"{item.name} {OWN_RUN}")
    run = item.run
    made = [f"{item.kind} {item.name}", *processors.measured(item.made_by), f"rows {item.rows_hash}"]
    page = [f"run {item.run_hash} ({run['profile']})", f"commit {run['commit']}"]
    if item.made_by:
        # The machine that built the page, and its versions, made none of these rows.
        made += [*processors.named(item.made_by), f"page built by {', '.join(page)}"]
    else:
        made += [*page, processors.device(run["machine"])]
        made += [f"{name} {run['versions'][name]}" for name in ("torch", "transformers") if name in run["versions"]]
    return _in_a_chapter(item, book, heading(item), run["started"][:4], made)


def of_sentence(item: Sentence, book: Origin) -> str:
    """Write the entry of one statement.

    Parameters
    ----------
    item
        From :func:`kvreport.publishing.published.sentences`.
    book
        From :func:`kvreport.publishing.checkout.of`.

    Returns
    -------
    str
        BibTeX. Its key ends in the hash of the rows that the statement was checked on.
    """
    checked = [f"checked on {runs}" for runs in processors.named(item.made_by)] or ["checked on no recorded run"]
    made = [f"statement {item.name}", f"rows {item.rows_hash}", *checked]
    return _in_a_chapter(item, book, plain(item.text), str(book.year), made)


def _in_a_chapter(item: Published | Sentence, book: Origin, title: str, year: str, made: list[str]) -> str:
    whole = f"{{{book.title.translate(_TEX)}}}, version {book.version.translate(_TEX)}"
    about = {
        "howpublished": f"In the chapter “{plain(item.title).translate(_TEX)}” of {whole}", "year": year,
        "note": "; ".join(made).translate(_TEX),
    }
    return _entry(f"{item.name}-{item.rows_hash[:8]}", book, title, about, book.site and book.site + item.place)


def find(name: str, items: Sequence[Published], statements: Iterable[str] = ()) -> Published:
    """Find a figure or table by its name.

    Parameters
    ----------
    name
        With or without ``fig-`` or ``tab-``.
    items
        Where to look.
    statements
        The names of the statements, of which one may be meant.

    Raises
    ------
    UserError
        When there is none; the message names those that are spelt most alike.
    """
    by_name = {item.name: item for item in items}
    for candidate in (name, f"fig-{name}", f"tab-{name}"):
        if candidate in by_name:
            return by_name[candidate]
    names = [*by_name, *statements]
    # Without fig- and tab-, which are alike in all; figures first.
    bare = {known.partition("-")[2]: known for known in sorted(names, reverse=True)}
    asked = re.sub(r"^(fig|tab)-", "", name.lower())
    near = [bare[match] for match in difflib.get_close_matches(asked, bare, _OFFERED, cutoff=0.5)]
    # A person may remember one word of the name.
    words = set(re.split(r"[^a-z0-9]+", asked)) - {""}
    near += [known for known in names if words & set(known.split("-")) and known not in near]
    offered = f"near it are {', '.join(near[: 2 * _OFFERED])}" if near else f"there are {', '.join(names)}"
    raise UserError(f"no figure, table or statement is called {name!r}: {offered}")


def heading(item: Published) -> str:
    """Name a figure or table by its caption's first sentence; one of a reader's own run says so."""
    said = first_sentence(item.caption)
    return f"Your own run of “{said}”" if item.own else said


def first_sentence(caption: str) -> str:
    """Return the beginning of a caption as plain text, to serve as a title."""
    text = plain(caption)
    end = _SENTENCE_END.search(text)
    return text[: end.start()] if end else text


def plain(text: str) -> str:
    """Take MyST's roles and marks out of a text, and write it on one line."""
    return " ".join(_MARKUP.sub("", _ROLE.sub(r"\1", text)).split())


def _entry(key: str, book: Origin, title: str, about: Mapping[str, str], address: str | None) -> str:
    known = {"doi": book.doi, "url": address or book.repository}
    fields = {"author": " and ".join(book.authors), "title": f"{{{title.translate(_TEX)}}}", **about, **known}
    # misc: the one kind of which no style asks for a publisher or a number of pages.
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@misc{{{key},", *lines, "}"]) + "\n"
