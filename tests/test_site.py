"""The page shows the source's prose with the last run's outputs, and never a run that failed."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import parse_qs

import mini_book
import pytest
import yaml
from bs4 import BeautifulSoup
from mini_book import STEM
from PIL import Image
from refusing import refusal

from kvbook import UserError, fingerprint, paths
from kvreport import publishing
from kvreport.publishing import captions
from kvreport.publishing import checkout as origin
from kvreport.publishing import page as publish
from kvreport.publishing.verdicts import SHOWN
from kvreport.running import planning
from kvreport.site import executed, finishing, inserts, ledger, overlay, pdf, preview, repository
from kvreport.site.build import build_html


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The small book, executed with the parameter set `few` and rendered as `make book` does, which says where."""
    root = mini_book.create(tmp_path_factory.mktemp("site") / "book")
    assert f"The book is in {root / '_build' / 'html' / 'index.html'}" in mini_book.built(root, PROFILE="few")
    return root


@pytest.fixture
def book(root, tmp_path):
    """A copy of the built book, to be changed."""
    return shutil.copytree(root, tmp_path / "book")


def page(root: Path, name: str = f"chapters/{STEM}") -> BeautifulSoup:
    return BeautifulSoup((root / "_build" / "html" / f"{name}.html").read_text("utf-8"), "html.parser")


def article(root: Path, name: str = f"chapters/{STEM}") -> str:
    return " ".join(page(root, name).find("article").get_text().split())


def copy_of(root: Path) -> dict:
    return json.loads((root / "_build" / "executed" / f"{STEM}.ipynb").read_text("utf-8"))


# What the page shows


def test_figures_and_tables_are_numbered_described_and_referred_to(root):
    figure, table = page(root).find("figure", id="fig-squares"), page(root).find_all("table")
    assert " ".join(figure.figcaption.get_text().split()).startswith("Fig. 1.1 Thirds of squares.")
    assert figure.img["alt"] == "A line through points."
    assert [one.get("id") for one in table] == ["tab-squares"], "the notebook's own HTML table is shown too"
    assert " ".join(table[0].caption.get_text().split()).startswith("Table 1.1 The rows behind Fig. 1.1.")
    rows = [[cell.get_text(strip=True) for cell in row.find_all(["th", "td"])] for row in table[0].find_all("tr")]
    assert rows == [["x", "y"], ["0", "0.00"], ["1", "0.33"], ["2", "1.33"]]
    assert "The last square stands in Table 1.1; see Fig. 1.1." in article(root)


def test_a_picture_waits_and_keeps_its_place_where_its_size_is_known(root, tmp_path):
    picture = page(root).find("figure", id="fig-squares").img
    with Image.open(root / "_build" / "html" / "chapters" / picture["src"]) as shown:
        assert [picture["loading"], picture["width"], picture["height"]] == ["lazy", *map(str, shown.size)]
    (tmp_path / "a.svg").write_text("<svg/>")
    html = '<p><img alt="x" src="_images/a.svg"></p>'
    for known in ({"a.svg": tmp_path / "a.svg"}, {}):
        assert finishing.marked(html, known) == html.replace("<img ", '<img loading="lazy" ')


def test_the_arrow_of_what_unfolds_is_drawn_once_and_pointed_to_from_elsewhere(root):
    assert len(page(root).find_all("path", id="arrow")) == len(page(root).find_all("path")) == 1
    assert len(page(root).select("summary svg")) == 1 + len(page(root).find_all("use", href="#arrow")) > 1


def test_every_download_is_the_runs_own_file(root):
    here = root / "_build" / "html" / "chapters"
    links = page(root).find("article").select("a[download]")
    offered = {Path(link["href"]).name: (here / link["href"]).resolve() for link in links}
    made = [*(root / "_build" / "figures" / STEM).iterdir(), *(root / "_build" / "citations" / STEM).iterdir()]
    expected = {file.name: file for file in [*made, root / "_build" / "executed" / f"{STEM}.ipynb"]}
    assert set(offered) == set(expected)
    for name, file in offered.items():
        assert file.read_bytes() == expected[name].read_bytes(), name


def test_a_figures_pdf_and_data_stand_below_it_and_the_run_there_and_on_the_page_on_the_environment(root):
    below = page(root).find("figure", id="fig-squares").find_next("div", class_="kvbook-downloads")
    assert below.find("a", string="permalink")["href"] == "#fig-squares"
    entry = below.find("pre").get_text()
    assert entry == (root / "_build" / "citations" / STEM / "fig-squares.bib").read_text("utf-8")
    assert {".pdf", ".csv"} <= {Path(link["href"]).suffix for link in below.select("a[download]")}
    row = page(root, "pages/environment").find("table", id="tab-runs").find("tbody").find("tr")
    name, profile, *_, inputs = (cell.get_text(strip=True) for cell in row.find_all("td"))
    assert (name, profile, inputs) == (STEM, "few", copy_of(root)["metadata"]["kvbook"]["inputs_sha256"][:16])


def test_how_a_chapter_was_run_and_its_parameters_are_folded_away_but_there(root):
    folded = {each.summary.get_text(" ", strip=True): each for each in page(root).find_all("details")}
    assert "n = 3" in folded["Parameters"].get_text()
    assert "open" not in folded["Parameters"].attrs
    terms = folded["How this was run"].find_all("dt")
    facts = {term.get_text(strip=True): term.find_next("dd").get_text(" ", strip=True) for term in terms}
    assert set(facts) == {"Parameters", "Machine", "Versions", "Commit", "Started", "Took", "Notebook"}
    assert "n = 3" in facts["Parameters"]
    assert "few" in facts["Parameters"]
    assert "torch" in facts["Versions"]
    assert facts["Took"].endswith(" s")


def test_a_book_of_unknown_origin_is_cited_and_names_no_repository_and_no_picture_to_fetch(root):
    front = page(root, "index")
    assert front.find("article").find("pre").get_text().startswith("@misc{kvbook,")
    assert "By The kvbook authors" in front.get_text(" ", strip=True)
    for file in (root / "_build" / "html").rglob("*.html"):
        assert 'og:image"' not in file.read_text("utf-8"), file.name
    assert "github.com" not in str(front)
    assert front.select(".kvbook-feedback") == []


# What a change costs


def test_the_foot_of_a_page_names_the_licence(root):
    assert "under the Apache License 2.0" in page(root).find(class_="extra_footer").get_text()
    assert "\nlicense: Apache-2.0\n" in (paths.ROOT / "CITATION.cff").read_text()


def test_a_plain_build_executes_what_is_stale_and_other_pages_show_its_new_run(book):
    # Once more in this place, so that Sphinx remembers its pages: it forgets those of another folder.
    mini_book.built(book, mini_book.plain_build, PROFILE="few")
    assert " few " in article(book, "pages/environment")
    assert f"chapter 1 of 1: {STEM} (its inputs have changed)" in mini_book.built(book, mini_book.plain_build)
    assert "the last square is 3.00" in article(book)
    # Sphinx alone would not read this page again: nothing in its own source has changed.
    assert " default " in article(book, "pages/environment")


def test_a_changed_figure_is_on_its_page_before_its_chapter_runs_and_control_an_equal_one_is_left(book, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", book / "_build")
    monkeypatch.setattr(paths, "HTML", book / "_build/html")
    monkeypatch.setenv(publishing.FOLDER_VARIABLE, str(book / "drawn"))
    monkeypatch.setattr(publish, "show", publish.show)
    shown = [page(book).find(id="fig-squares").img["src"]]
    for marker, read_again in {"o": False, "s": True}.items():
        mini_book.write(book, figure=mini_book.CODE["figure"].replace('"o"', f'"{marker}"'))
        exec(preview.script(planning.Chapter(STEM, "few", {"n": 3}, folders=mini_book.folders(book))), {})
        shown.append(page(book).find(id="fig-squares").img["src"])
        assert (book / "_build/html/chapters" / shown[-1]).resolve().is_file()
        # Whoever takes the edit back finds the old figure after the next build.
        assert (book / f"_build/.doctrees/chapters/{STEM}.doctree").exists() != read_again
    assert shown[0] == shown[1] != shown[2]
    edited, begun = Mock(stem=STEM, runs_kept=lambda: {"one": "a run"}, left_out=[]), Mock(return_value=nullcontext())
    monkeypatch.setattr(preview.subprocess, "Popen", begun)
    # The last time a cell is no Python.
    monkeypatch.setattr(preview, "script", Mock(side_effect=["", SyntaxError]))
    for chapters in ([edited], [], [edited, edited], [Mock(stem=STEM, runs_kept=dict)], [edited]):
        with preview.of(chapters):
            assert begun.call_count == 1
    assert preview.script.call_count == 2


def test_pages_are_read_again_that_show_what_ran_again_and_all_once_other_code_fills_them(tmp_path, monkeypatch):
    texts = {"environment": "<!-- part: runs -->", "cards": "<!-- part: cards -->"}
    texts |= dict.fromkeys(("one", "two", "text"), "words")
    files = {name: tmp_path / f"{name}.md" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    chapters = {name: SimpleNamespace(name=name, executed=tmp_path / f"{name}.ipynb") for name in ("one", "two")}
    env = SimpleNamespace(found_docs=set(texts), doc2path=files.get)
    app = SimpleNamespace(kvbook_origin=None, env=env, kvbook_chapters=chapters)

    def read_again():
        return executed.read_again_what_was_run_again(app, env, set(), set(), set())

    def ran(name, started):
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"metadata": {"kvbook": {"started": started}}}))

    ran("one", 1)
    ran("two", 1)
    assert [read_again(), read_again()] == [sorted(texts), []]
    ran("one", 2)
    assert [read_again(), read_again()] == [["environment", "one"], []]
    monkeypatch.setattr(fingerprint, "of_source", lambda modules: "other code" * ("kvreport.site.inserts" in modules))
    assert [read_again(), read_again()] == [sorted(texts), []]


def test_repository_colab_and_site_are_linked_where_they_are_known(book):
    known = {"GITHUB_REPOSITORY": "somebody/book", "GITHUB_REF_NAME": "main"}
    known["KVBOOK_SITE_URL"] = "https://example.org/b"
    mini_book.built(book, mini_book.plain_build, PROFILE="few", **known)
    chapter = page(book)
    assert chapter.find("a", href="https://github.com/somebody/book") is not None
    colab = "https://colab.research.google.com/github/somebody/book/blob/main"
    assert chapter.find("a", href=f"{colab}/chapters/{STEM}.ipynb") is not None
    here = f"https://example.org/b/chapters/{STEM}.html"
    assert chapter.find("a", string="permalink")["href"] == f"{here}#fig-squares"
    assert f"url = {{{here}#fig-squares}}" in chapter.find("div", class_="kvbook-downloads").get_text()
    told = {name: chapter.find("meta", property=f"og:{name}")["content"] for name in ("url", "site_name")}
    assert told == {"url": here, "site_name": "Cached and uncached: Transformer inference compared"}
    (feedback,) = chapter.select(".kvbook-feedback a")
    address, _, asked = feedback["href"].partition("?")
    assert address == "https://github.com/somebody/book/issues/new"
    (filled_in,) = parse_qs(asked)["body"]
    assert f"Page: chapters/{STEM}.html\nVersion: {origin.of(book).version} (main)\n" in filled_in
    # Both a page with pictures and one without have one that others can fetch, and it is there.
    for shown in (chapter, page(book, "index")):
        (picture,) = (tag["content"] for tag in shown.find_all("meta", property="og:image"))
        assert picture.startswith("https://example.org/b/_images/")
        assert (book / "_build" / "html" / "_images" / Path(picture).name).is_file()
    words = chapter.find("meta", property="og:image:alt")["content"]
    assert words == chapter.find("img", src=lambda source: "_images" in source)["alt"]


def test_a_chapter_is_printed_and_linked_when_asked_for_and_not_linked_otherwise(book):
    # A figure's own PDF is another thing.
    printed = "article a[href^='../pdf/']"
    assert page(book).select(printed) == []
    mini_book.built(book, PROFILE="few", KVBOOK_PDF="1")
    assert [link["href"] for link in page(book).select(printed)] == [f"../pdf/{STEM}.pdf"]
    content = (book / "_build" / "html" / "pdf" / f"{STEM}.pdf").read_bytes()
    assert content.startswith(b"%PDF-")
    assert len(content) > 10_000


def test_without_a_browser_the_build_stops_with_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("KVBOOK_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = refusal(pdf.print_page, tmp_path / "page.html", tmp_path / "pdf" / "page.pdf")
    assert said == "no Chromium to print PDFs with: install it, or name one in KVBOOK_CHROMIUM"


def test_a_browser_that_prints_nothing_is_not_believed(tmp_path, monkeypatch):
    # It ends with success and makes no file.
    monkeypatch.setenv("KVBOOK_CHROMIUM", "/bin/true")
    assert "did not print" in refusal(pdf.print_page, tmp_path / "page.html", tmp_path / "pdf" / "page.pdf")


# What is refused


def test_a_chapter_that_fails_stops_a_plain_build_too_with_one_line(tmp_path):
    root = mini_book.create(tmp_path)
    mini_book.write(root, last='raise ValueError("no such drift")\n')
    built = mini_book.plain_build(root)
    assert built.returncode != 0
    said = f"chapter {STEM} failed: ValueError: no such drift; what ran is in _build/executed/{STEM}.partial.ipynb"
    (line,) = (line for line in built.stdout.splitlines() if "no such drift" in line)
    assert line.startswith(f"kvbook: {said}")
    assert "Traceback" not in built.stdout
    assert not list((root / "_build" / "html").glob("**/*.html"))


def test_a_reference_to_nothing_fails(book):
    mini_book.write(book, prose=mini_book.PROSE + "\nSee {numref}`fig-nowhere`.\n")
    built = mini_book.make_book(book, PROFILE="few")
    assert built.returncode != 0
    assert "fig-nowhere" in built.stdout


SOURCE = mini_book.notebook()


def joined(root: Path, executed: dict) -> dict:
    chapter = planning.Chapter(STEM, "few", {}, folders=mini_book.folders(root))
    return overlay.overlay(SOURCE, executed, chapter, captions.written(SOURCE, {}))


def test_what_a_readers_own_run_made_has_files_and_no_citation(root):
    executed = copy_of(root)
    figure = cell(executed, "figure")["outputs"][0]["metadata"]["image/png"]
    made = {"experiment": "squares", "runs": ["aaaaaaaa"], "machine": None, "models": [], "seeds": [0]}
    made["settings"] = {"corpus": "english"}
    for recorded in (True, False):
        figure["made_by"] = [made | {"recorded": recorded}]
        offered = "".join(cell(joined(root, executed), "downloads-fig-squares")["source"])
        words = ("BibTeX", "@misc", ":::::{dropdown} How this was run, and how to cite it", "your own run")
        assert [word in offered for word in words] == [recorded] * 3 + [not recorded]
        assert all(words in offered for words in ("fig-squares.csv", "; English prose; "))


def test_a_caption_names_the_processors_behind_its_rows_unless_it_speaks_of_them_itself():
    epyc, xeon = ({"device": "cpu", "processor": name} for name in ("AMD EPYC", "Intel(R) Xeon(R)"))
    for machines, caption, said in (
        ([None], "Rows.", ""), ([epyc, epyc], "Rows.", " Processor: AMD EPYC (Zen 4)."),
        ([xeon, epyc], "Rows.", " Processors: Intel Xeon and AMD EPYC (Zen 4)."), ([xeon], "On an Intel Xeon.", ""),
    ):
        assert overlay._where({"made_by": [{"machine": machine} for machine in machines]}, caption) == said


def cell(notebook: dict, cell_id: str) -> dict:
    return next(cell for cell in notebook["cells"] if cell.get("id") == cell_id)


REFUSED = {
    "a run that failed": (lambda copied: copied["metadata"]["papermill"].update(exception=True), "failed"),
    "an error in a cell": (lambda copied: cell(copied, "last")["outputs"].append({"output_type": "error"}), "failed"),
    "other code": (lambda copied: cell(copied, "run").update(source="x = 1"), "'run'"),
    "two figures": (
        lambda copied: cell(copied, "figure").update(outputs=2 * cell(copied, "figure")["outputs"]),
        "publishes 2 figures",
    ),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_a_copy_that_is_no_good_run_of_its_source_is_refused(root, change, said):
    executed = copy_of(root)
    joined(root, executed)
    assert (SOURCE, executed) == (mini_book.notebook(), copy_of(root)), "joining changes a notebook"
    change(executed)
    assert said in refusal(joined, root, executed)


def box(root, **recorded) -> str:
    executed = copy_of(root)
    executed["metadata"]["kvbook"] |= recorded
    return cell(joined(root, executed), "how-it-was-run")["source"]


@pytest.mark.parametrize(("device", "share"), [("cpu", 1), ("cpu", 2), ("cpu", None), ("cuda", 1)])
def test_the_box_says_with_how_many_threads_the_rest_was_run(root, device, share):
    machine = {"device": device, "device_name": "Some CPU, 2 threads", "threads": 2, "system": "Linux"}
    text = box(root, shared_threads=share, machine=machine)
    rest = " (1 for experiments that measure no time)" * ((device, share) == ("cpu", 1))
    assert f"Some CPU, 2 threads{rest}, Linux" in text


def test_the_box_names_model_and_weights_where_the_chapter_has_them(root):
    assert "Model and weights" not in box(root), "the small book's chapter has none"
    assert "Model and weights\n: `llama`, `stand-in`\n" in box(root, model="llama", weights="stand-in")
    # A folder brings its own, whatever the chapter's parameter says of families.
    assert "Model and weights\n: `models/mine`\n" in box(root, model="models/mine", weights="stand-in")


def test_a_table_cell_that_looks_like_a_list_stays_text(root):
    executed = copy_of(root)
    (output,) = cell(executed, "table")["outputs"]
    output["metadata"]["text/html"]["kvbook_table"]["csv"] = 'a,b\n-,1.\n-3.5,"x, y"\n'
    table = cell(joined(root, executed), "shown-tab-squares")
    assert table["source"].splitlines()[-4:-1] == ["a,b", "\\-,1\\.", '-3.5,"x, y"']


# Where the book comes from


@pytest.mark.parametrize(("remote", "address"), [
    ("https://github.com/somebody/book.git", "https://github.com/somebody/book"),
    ("https://github.com/somebody/book", "https://github.com/somebody/book"),
    ("git@github.com:somebody/book.git", "https://github.com/somebody/book"),
    ("ssh://git@github.com/somebody/book.git", "https://github.com/somebody/book"),
    ("https://name:secret@github.com/somebody/book.git", "https://github.com/somebody/book"),
    ("https://gitlab.com/group/part/book.git", "https://gitlab.com/group/part/book"),
    ("https://example.org/somebody/book.git", None), ("/srv/git/book.git", None), ("", None),
])
def test_a_remote_becomes_an_address_without_credentials_or_none(remote, address):
    assert origin.web_address(remote) == address


def test_a_clone_knows_its_origin_and_a_folder_without_git_does_not(tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert origin.find_repository(tmp_path) is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert origin.find_repository(tmp_path) is None
    subprocess.run(["git", "remote", "add", "origin", "git@github.com:somebody/book.git"], cwd=tmp_path, check=True)
    assert origin.find_repository(tmp_path) == "https://github.com/somebody/book"


def test_an_issue_on_gitlab_is_asked_for_in_its_own_words():
    book = replace(origin.of(paths.ROOT), repository="https://gitlab.com/group/book", branch="main")
    address, _, asked = repository.issue_address(book, "index").partition("?")
    assert address == "https://gitlab.com/group/book/-/issues/new"
    assert parse_qs(asked)["issue[title]"] == ["On page index.html"]


# This repository's own book


def test_what_changed_is_the_release_notes_after_the_first_with_links_that_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/book")
    written = inserts.fill("<!-- part: changes -->", [], tmp_path / "pages")
    changes = (paths.ROOT / "CHANGELOG.md").read_text()
    assert written.count("\n## ") + 1 == len(re.findall(r"^## ", changes, re.MULTILINE)) - 1
    shutil.copy(paths.ROOT / "CITATION.cff", tmp_path)
    notes = "# Changelog\n\n## 0.2.0, x\n\n- [a](pages/answers.md) [n](changelog/0.2.0.md)\n\n## 0.1.0, y\n\n- old\n"
    (tmp_path / "CHANGELOG.md").write_text(notes)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    told = inserts.fill("<!-- part: changes -->", [], tmp_path / "pages")
    assert told.startswith("## 0.2.0, x\n\n- [a](answers.md) [n](https://github.com/somebody/book/blob/main/changelog/")
    assert "old" not in told
    monkeypatch.setattr(origin, "find_repository", lambda _: None)
    assert "n (`changelog/0.2.0.md`)" in inserts.fill("<!-- part: changes -->", [], tmp_path / "pages")


def test_the_contents_take_up_every_chapter_once_and_in_the_order_of_their_names():
    contents = yaml.safe_load((paths.ROOT / "_toc.yml").read_text())
    globs = [entry["glob"] for part in contents["parts"] for entry in part["chapters"] if "glob" in entry]
    names = [f"chapters/{path.stem}" for path in sorted((paths.ROOT / "chapters").glob("*.ipynb"))]
    assert [name for glob in globs for name in names if fnmatch.fnmatch(name, glob)] == names
    # The next chapter, too, whatever it is called.
    assert sum(fnmatch.fnmatch("chapters/13_a_new_one", glob) for glob in globs) == 1


def test_the_ledger_says_what_the_chapters_published_and_counts_it_by_verdict():
    about = dict.fromkeys(SHOWN, "x") | {"document": "some-thread", "table": "tab-claims-some-thread"}
    text = ledger.markdown([about | {"verdict": "refuted", "claim": "Water, it is said, is wet.", "n": "3 seas"}])
    assert "verdict,[some-thread](#tab-claims-some-thread)\nrefuted,1" in text
    assert 'refuted,[some-thread](#tab-claims-some-thread),3 seas,"Water, it is said, is wet."' in text
    assert ":class: kvbook-table kvbook-filter" in text
    # Another real model is counted between the documents' own and a stand-in.
    words = ["reproduced in kind", "reproduced on another real model", "reproduced"]
    text = ledger.markdown(about | {"verdict": word} for word in words)
    assert re.findall(r"^(reproduced[^,]*),1$", text, re.MULTILINE) == words[::-1]


def test_a_page_that_asks_for_an_unknown_part_is_refused(tmp_path):
    nothing = [], tmp_path
    assert inserts.fill("a\n\n<!-- a remark -->\n", *nothing) == "a\n\n<!-- a remark -->\n"
    assert "No chapter" in inserts.fill("<!-- part: ledger -->", *nothing)
    assert "| `check --thorough`, `atlas` |" in inserts.fill("<!-- part: paths -->", *nothing)
    assert "'nosuch'; there are: ledger" in refusal(inserts.fill, "<!-- part: nosuch -->", *nothing)


def test_after_a_render_that_was_killed_or_failed_all_pages_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path)
    monkeypatch.setattr(fingerprint, "PACKAGES", {"kvbook": tmp_path})
    # What a render changes for its whole process.
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setitem(sys.modules, "sphinxext.opengraph._social_cards", None)
    pages = tmp_path / ".doctrees" / "environment.pickle"
    pages.parent.mkdir()
    pages.touch()
    found, edited = [], iter(("notes.md", "rows.py"))

    def render(*_arguments, **_options):
        found.append(pages.exists())
        pages.touch()
        if len(found) == 1:
            raise KeyboardInterrupt
        if len(found) > 3:
            (tmp_path / next(edited)).touch()
            raise RuntimeError

    monkeypatch.setattr("jupyter_book.cli.main.main", render)
    with pytest.raises(KeyboardInterrupt):
        build_html()
    build_html()
    build_html()
    # One that fails after an edit says so.
    for said in ("errors above$", "above; rows.py was edited meanwhile"):
        with pytest.raises(UserError, match=said):
            build_html()
    assert found == [True, False, True, True, False]
