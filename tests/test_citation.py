"""A citation names what was seen, who made it and which run, and invents nothing."""

import json
from dataclasses import replace

import mini_book
import pytest
from mini_book import STEM
from pybtex.database import parse_string
from refusing import refusal

from kvbook import paths
from kvreport.publishing import citation, evaluated, processors, published
from kvreport.publishing.checkout import Origin
from kvreport.running import execution, planning
from kvreport.site import overlay

TITLE, AUTHORS = "A book: 50 % on caches & more", ("{The authors}", "Doe, Jane")
BOOK = Origin(TITLE, "0.1.0", AUTHORS, ("The authors", "Jane Doe"), 2026)

RUNS = """\
from pathlib import Path
from kvbook.runs import evidence
from kvbook.runs.records import Run


def recorded(seed, device):
    machine = {"device_name": device, "processor": device, "threads": 1, "device": "cpu"}
    about = {"experiment": "squares", "hash": f"{seed}" * 16, "settings": {"seed": seed}, "recorded": {}}
    run = Run(about | {"machine": machine | {"torch": "9.8", "transformers": "7.6"}}, Path())
    run.__dict__["rows"] = rows.assign(repeat=rows["x"])
    return run

runs = [evidence.joined([recorded(seed, "Maker One") for seed in (1, 2)]), recorded(3, "Maker Two")]
"""


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The small book's chapter with recorded runs behind its figure and its table, executed once and cited."""
    root = mini_book.create(tmp_path_factory.mktemp("cite") / "book")
    code = {name: mini_book.CODE[name].rstrip(")\n") for name in ("figure", "table")}
    figure, table = f"{RUNS}{code['figure']}, runs=runs)\n", f"{code['table']}, runs=runs[:1])\n"
    mini_book.write(root, figure=figure, table=table)
    (chapter,) = planning.plan("few", mini_book.folders(root))
    execution.bring_up_to_date([chapter])
    overlay.write_citations([chapter], BOOK)
    return chapter


@pytest.fixture(scope="module")
def items(chapter):
    return published.of(chapter.executed, chapter.source)


@pytest.fixture
def figure(items):
    """The figure as if no recorded run had made it."""
    return replace(citation.find("fig-squares", items), made_by=())


def parsed(entry):
    (found,) = parse_string(entry, "bibtex").entries.values()
    return found


# Which run, which rows


def test_an_entry_names_the_figure_its_rows_and_its_run(chapter, figure):
    run = json.loads(chapter.executed.read_text("utf-8"))["metadata"]["kvbook"]
    entry = parsed(citation.of_published(figure, BOOK))
    rows = run["files"]["fig-squares.csv"]
    assert entry.key == f"fig-squares-{rows[:8]}"
    for known in ("figure fig-squares", f"rows {rows[:16]}", f"run {run['inputs_sha256'][:16]} (few)"):
        assert known in entry.fields["note"].replace("\\", "")
    assert f"torch {run['versions']['torch']}" in entry.fields["note"]
    assert entry.fields["year"] == run["started"][:4]
    assert entry.fields["title"] == "{Thirds of squares}"
    assert "Squares" in entry.fields["howpublished"]


# Which machine


def made(*hashes, device="Maker One, 1 thread", torch="9.8", recorded=True, **more):
    machine = {"device_name": device, "torch": torch, "transformers": "7.6"}
    return {"runs": list(hashes), "machine": machine, "recorded": recorded, "models": []} | more


def note(item):
    of = citation.of_sentence if isinstance(item, published.Sentence) else citation.of_published
    return parsed(of(item, BOOK)).fields["note"].replace("\\", "")


def test_an_entry_names_the_recorded_runs_and_their_machines_not_the_one_that_built_the_page(figure):
    seeds = made("aaaaaaaa11111111", "bbbbbbbb22222222")
    another = made("cccccccc33333333", device="Maker Two, 2 threads")
    older, further = made("dddddddd44444444", torch="1.2"), made("eeeeeeee55555555")
    item = replace(figure, made_by=(seeds, another, older, further))
    run = item.run
    assert note(item).split("; ") == [
        "figure fig-squares",
        f"rows {item.rows_hash}",
        "recorded runs aaaaaaaa, bbbbbbbb, eeeeeeee on Maker One, 1 thread, torch 9.8, transformers 7.6",
        "recorded run cccccccc on Maker Two, 2 threads, torch 9.8, transformers 7.6",
        "recorded run dddddddd on Maker One, 1 thread, torch 1.2, transformers 7.6",
        f"page built by run {item.run_hash} ({run['profile']}), commit {run['commit']}",
    ]
    # Control: what names no runs names the machine that built the page.
    assert processors.device(run["machine"]) in note(figure)


def test_an_entry_names_model_dtypes_and_independent_units_of_each_experiment_once(figure):
    drift = {"experiment": "drift", "models": ["gpt"], "dtypes": ["float32", "bfloat16"], "units": (77, "sources")}
    timed = {"experiment": "speed", "models": [], "dtypes": [], "units": (10, "repeats")}
    item = replace(figure, made_by=(made("a" * 8, **drift), made("b" * 8, device="Maker Two", **drift),
                                    made("c" * 8, **timed)))
    assert note(item).split("; ")[1:4] == [
        "drift: gpt, fp32 bf16, n = 77 sources", "speed: n = 10 repeats", f"rows {item.rows_hash}"
    ]


def test_what_this_machine_ran_has_no_entry_beside_recorded_runs_too(figure):
    for others in ((), (made("bbbbbbbb", device="Maker Two"),)):
        item = replace(figure, made_by=(made("aaaaaaaa", recorded=False), *others))
        assert not item.citable
        assert refusal(citation.of_published, item, BOOK).startswith("fig-squares is of your own run")
    assert figure.citable
    assert replace(figure, made_by=others).citable


def test_no_file_is_left_of_an_entry_whose_rows_are_now_of_an_own_run(chapter, monkeypatch, tmp_path):
    monkeypatch.setattr(overlay, "cited_in", lambda _: tmp_path)
    overlay.write_citations([chapter], BOOK)
    assert (tmp_path / "fig-squares.bib").is_file()
    monkeypatch.setattr(published.processors, "are_recorded", lambda made_by: False)
    overlay.write_citations([chapter], BOOK)
    assert not list(tmp_path.glob("*.bib"))


def test_the_runs_that_a_chapter_names_stand_in_its_files_and_in_what_the_command_prints(chapter):
    versions = "torch 9.8, transformers 7.6"
    one, two = f"11111111, 22222222 on Maker One, {versions}", f"33333333 on Maker Two, {versions}"
    table, figure = (
        parsed((overlay.cited_in(chapter) / f"{name}.bib").read_text("utf-8")).fields["note"]
        for name in ("tab-squares", "fig-squares")
    )
    assert f"; recorded runs {one}; page" in table
    assert "; squares: n = 3 repeats; rows" in table
    assert f"; recorded runs {one}; recorded run {two}; page" in figure
    # The command waits for neither torch nor Sphinx.
    light = "assert not {'torch', 'sphinx'} & set(sys.modules), 'slow'"
    done = mini_book.run(chapter.source.parents[1], "-c", mini_book.COMMANDS, "cite squares", light)
    assert done.returncode == 0, done.stdout
    assert parsed(done.stdout).fields["note"] == figure


def test_a_statement_is_cited_with_the_runs_of_the_processors_that_bear_it_out(tmp_path, monkeypatch):
    one, two, three = made("aaaaaaaa", "bbbbbbbb"), made("cccccccc", device="Maker Two"), made("dddddddd")
    outcomes = {"one": "holds", "two": "holds", "three": "not resolved"}
    statement = {"processors": outcomes, "made_by": {"one": [one], "two": [two], "three": [three]}}
    book = {"numbers": {}, "rows": [], "statements": {"grows": statement}}
    monkeypatch.setattr(evaluated, "published", lambda chapter: book)
    source, cell = tmp_path / "01_x.ipynb", {"cell_type": "markdown", "source": "We add.\nIt grows. {holds}`grows`"}
    source.write_text(json.dumps({"cells": [cell]}))
    (sentence,) = published.sentences([source])
    # A short sentence comes with the one that it leans on.
    assert [sentence.text, *note(sentence).split("; ")[2:]] == [
        "We add. It grows.",
        "checked on recorded runs aaaaaaaa, bbbbbbbb on Maker One, 1 thread, torch 9.8, transformers 7.6",
        "checked on recorded run cccccccc on Maker Two, torch 9.8, transformers 7.6",
    ]
    # Control: where no processor bears it out, none is named.
    outcomes.update(dict.fromkeys(outcomes, "fails"))
    assert note(*published.sentences([source])).endswith("; checked on no recorded run")


# Nothing invented


def test_the_heading_of_an_own_run_says_so_since_the_caption_is_the_books(figure):
    books, own = (citation.heading(replace(figure, own=own)) for own in (False, True))
    assert own == f"Your own run of “{books}”"
    assert "own run" not in books


def test_an_address_and_a_doi_stand_in_an_entry_only_when_known(figure):
    assert {"url", "doi"}.isdisjoint(parsed(citation.of_published(figure, BOOK)).fields)
    assert {"url", "doi"}.isdisjoint(parsed(citation.of_book(BOOK)).fields)
    known = replace(BOOK, site="https://example.org/b/", doi="10.1/x")
    fields = parsed(citation.of_published(figure, known)).fields
    assert fields["url"] == f"https://example.org/b/chapters/{STEM}.html#fig-squares"
    assert fields["doi"] == "10.1/x"
    repository = replace(BOOK, repository="https://github.com/somebody/book")
    assert parsed(citation.of_published(figure, repository)).fields["url"] == "https://github.com/somebody/book"


def test_people_and_groups_are_authors_as_bibtex_wants_them_and_marks_of_tex_are_letters(figure):
    people = parsed(citation.of_published(figure, BOOK)).persons["author"]
    assert [person.last_names for person in people] == [["{The authors}"], ["Doe"]]
    text = "".join(map(chr, citation._TEX))
    assert parsed(citation.of_book(replace(BOOK, title=text))).fields["title"] == f"{{{text.translate(citation._TEX)}}}"
    assert "50 % & a_b".translate(citation._TEX) == r"50 \% \& a\_b"


# Titles


@pytest.mark.parametrize(("caption", "title"), [
    ("Drift, e.g. 0.5 at 95 % of stock's. stand-ins; 3.", "Drift, e.g. 0.5 at 95 % of stock's"),
    ("The rows behind {numref}`fig-x` and `code`. More.", "The rows behind fig-x and code"),
    ("See Fig. 2 for\nthe rest. More.", "See Fig. 2 for the rest"), ("Does it differ? Hardly.", "Does it differ"),
    ("word " * 80, ("word " * 80).strip()),
])
def test_a_title_is_the_captions_first_sentence_as_plain_text(caption, title):
    assert citation.first_sentence(caption) == title


# The command


@pytest.mark.parametrize(("name", "said"), [
    ("fig-squars", "near it are fig-squares"), ("all-squares", "near it are fig-squares, tab-squares"),
    ("qqq", "there are fig-squares, tab-squares"),
])
def test_for_a_name_that_does_not_exist_near_ones_are_offered(items, name, said):
    assert refusal(citation.find, name, items).startswith(f"no figure, table or statement is called '{name}': {said}")


def test_the_command_prints_the_books_entry_without_a_name_and_refuses_in_one_line(
    chapter, kvbook_here, refused, monkeypatch, tmp_path
):
    assert parsed(kvbook_here("cite").stdout).key == "kvbook"
    monkeypatch.setattr(paths, "EXECUTED", tmp_path)
    assert refused("cite", "qqq").endswith(f"no chapter has been executed in {tmp_path}: run `make book` first\n")
    monkeypatch.setattr(paths, "EXECUTED", chapter.executed.parent)
    monkeypatch.setattr(paths, "CHAPTERS", chapter.source.parent)
    assert "no figure, table or statement is called 'qqq'" in refused("cite", "qqq")
