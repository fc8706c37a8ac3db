"""Chapters as PDFs, printed where they are asked for, and offered only then."""

import mini_book
import pytest
from bs4 import BeautifulSoup
from mini_book import STEM

from kvbook.errors import UserError
from kvreport.site import pdf


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    root = mini_book.create(tmp_path_factory.mktemp("pdf") / "book")
    built = mini_book.make_book(root, PROFILE="few")
    assert built.returncode == 0, built.stdout
    return root


def links_to_pdfs(root):
    html = (root / "_build" / "html" / "chapters" / f"{STEM}.html").read_text("utf-8")
    links = [link["href"] for link in BeautifulSoup(html, "html.parser").find("article").find_all("a", href=True)]
    # A figure's own PDF is another thing.
    return [link for link in links if link.startswith("../pdf/")]


def test_a_chapter_is_printed_and_linked_when_asked_for_and_not_linked_otherwise(book):
    assert links_to_pdfs(book) == []
    built = mini_book.make_book(book, PROFILE="few", KVBOOK_PDF="1")
    assert built.returncode == 0, built.stdout
    assert links_to_pdfs(book) == [f"../pdf/{STEM}.pdf"]
    content = (book / "_build" / "html" / "pdf" / f"{STEM}.pdf").read_bytes()
    assert content.startswith(b"%PDF-")
    assert len(content) > 10_000


def test_without_a_browser_the_build_stops_with_one_line_that_says_what_to_do(book, tmp_path):
    code = "from kvreport.site import pdf; pdf.print_page(pdf.Path('x'), pdf.Path('y/x.pdf'))"
    built = mini_book.run(book, "-c", code, PATH=str(tmp_path))
    assert built.returncode != 0
    said = built.stdout.strip().splitlines()[-1]
    assert said.endswith("no Chromium to print PDFs with: install it, or name one in KVBOOK_CHROMIUM")


def test_a_browser_that_prints_nothing_is_not_believed(tmp_path, monkeypatch):
    # It ends with success and makes no file.
    monkeypatch.setenv("KVBOOK_CHROMIUM", "/bin/true")
    with pytest.raises(UserError, match="did not print"):
        pdf.print_page(tmp_path / "page.html", tmp_path / "pdf" / "page.pdf")
