"""The site in a real browser: every page of this book, with the tests' parameters, as readers meet it."""

import functools
import os
import re
import shutil
from pathlib import Path
from urllib.parse import quote, urlparse

import page_rules
import pytest
import smoke_book
import test_scores
import test_server
import test_snippets
from bs4 import BeautifulSoup
from playwright.sync_api import sync_playwright

from kvbook.paths import CHAPTERS, ROOT
from kvreport.site import pdf

CHAPTER_PAGES = [f"chapters/{path.stem}.html" for path in sorted(CHAPTERS.glob("*.ipynb"))]
OTHER_PAGES = [path.relative_to(ROOT).with_suffix(".html") for path in sorted((ROOT / "pages").rglob("*.md"))]
PAGES = ["index.html", *CHAPTER_PAGES, *map(Path.as_posix, OTHER_PAGES), "search.html", "genindex.html"]


@functools.cache
def soup(file: Path) -> BeautifulSoup:
    return BeautifulSoup(file.read_text("utf-8"), "html.parser")


@pytest.fixture(scope="session")
def site():
    """Return the folder of this book's pages, built with the parameter set `smoke`."""
    return smoke_book.pages(Path(os.environ["KVBOOK_TESTS_SHARED"]))


@pytest.fixture(scope="session")
def address(site):
    with page_rules.serve(site) as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        # Without its sandbox, because in a container Chromium has none to use; it visits only our own pages, and finds
        # no other.
        args = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        with playwright.chromium.launch(executable_path=pdf.find_browser(), args=args) as browser:
            yield browser


@pytest.fixture(scope="session")
def tab(browser):
    """The tab of somebody who reads one page after the other, and whose browser keeps what they share."""
    with browser.new_page(viewport=page_rules.WIDE) as tab:
        tab.set_default_timeout(page_rules.TIMEOUT_MS)
        yield tab


@pytest.fixture
def page(tab):
    """The reader's one tab, empty: a new one would compile again what all pages share."""
    tab.set_viewport_size(page_rules.WIDE)
    tab.emulate_media(color_scheme="null")
    tab.goto("about:blank")
    return tab


@pytest.fixture
def plain(browser):
    """A page of somebody without JavaScript."""
    with browser.new_context(java_script_enabled=False) as context:
        yield context.new_page()


@pytest.fixture(scope="session")
def judged():
    """The styles of text whose colours were judged."""
    return set()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_as_it_must_be(page, judged, address, site, path):
    assert page_rules.faults(page, judged, address, path, site) == []


@pytest.mark.parametrize("path", CHAPTER_PAGES)
def test_a_chapter_shows_figures_tables_and_no_traceback_and_below_folded_how_it_was_run(site, path):
    article = soup(site / path).find("article")
    assert article.select("figure img")
    assert article.select("table.kvbook-table")
    assert not article.select(".traceback, .stderr")
    assert article.select("figure, .tag_parameters")[0].name == "figure"
    folded = [each.summary.get_text(" ", strip=True) for each in article.select("#behind-this-page details.kvbook-run")]
    assert folded[-3:] == ["Your run against the book", "Parameters", "How this was run"]


def rows_shown(page):
    return page.locator("table#tab-atlas tbody tr:visible").count()


def test_the_atlas_is_searched_and_chosen_from_and_is_whole_without_javascript(page, plain, address):
    page.goto(address + "chapters/12_atlas.html")
    bar = page.locator(".kvbook-filter-bar")
    everything = rows_shown(page)
    assert everything > 150
    assert page.locator("table#tab-atlas a[href$='.svg']").count() > 150, "a badge each"
    assert bar.locator("output").inner_text() == f"{everything} of {everything}"
    bar.get_by_label("Search").fill("MoShi")
    assert rows_shown(page) == 1
    bar.get_by_label("Search").fill("")
    bar.get_by_label("verdict").select_option("bug")
    assert 0 < rows_shown(page) < 20
    assert set(page.locator("table#tab-atlas tbody tr:visible td:nth-child(2)").all_inner_texts()) == {"bug"}
    bar.get_by_label("Search").fill("no such architecture")
    assert rows_shown(page) == 0
    plain.goto(address + "chapters/12_atlas.html")
    assert rows_shown(plain) == everything
    assert plain.locator(".kvbook-filter-bar").count() == 0


def test_claims_are_sorted_by_a_click_and_chosen_by_verdict(page, address):
    page.goto(address + "pages/answers.html")
    page.locator("details", has=page.locator("table#tab-ledger-claims")).locator("summary").click()
    table = page.locator("table#tab-ledger-claims")
    verdict = table.get_by_role("button", name="verdict")

    def verdicts() -> list[str]:
        return table.locator("tbody tr:visible td:nth-child(1)").all_inner_texts()

    before = verdicts()
    assert before != sorted(before, key=str.lower), "sorting would show nothing"
    verdict.click()
    assert verdicts() == sorted(before, key=str.lower)
    verdict.click()
    assert verdicts() == sorted(before, key=str.lower, reverse=True)
    page.locator(".kvbook-filter-bar").get_by_label("verdict").select_option(before[0])
    assert set(verdicts()) == {before[0]}


def test_the_memory_of_a_model_follows_dtype_length_and_batch(page, plain, address):
    page.goto(address + "pages/howto/memory.html")
    cells = page.locator("table#tab-memory-needed tbody tr", has_text="CodeLlama-7b").locator("td")
    # By hand: 6,738,546,688 parameters, and 32 layers of keys and values, 4,096 wide, in two bytes each.
    weights, token = 2 * 6_738_546_688 / 2**30, 2 * 2 * 32 * 4096 / 2**30
    assert float(cells.nth(6).inner_text()) == pytest.approx(weights + 4096 * token, abs=0.06)
    assert cells.nth(7).inner_text() == "L4"
    page.get_by_label("tokens").fill("16384")
    page.get_by_label("texts in the batch").fill("4")
    assert float(cells.nth(6).inner_text()) == pytest.approx(weights + 4 * 16384 * token, abs=0.06)
    assert cells.nth(7).inner_text() == "A100 80 GB"
    page.get_by_label("dtype").select_option("fp32")
    assert cells.nth(7).inner_text() == "none of them"
    plain.goto(address + "pages/howto/memory.html")
    assert plain.locator("table#tab-memory-needed tbody tr").first.locator("td").count() == 6


def test_a_wide_table_takes_the_margin_and_where_it_must_scroll_its_edge_shows_it(browser, address):
    with browser.new_page(viewport={"width": 1440, "height": 900}) as page:
        page.goto(address + "pages/howto/memory.html")
        edges = page.locator(".kvbook-edges", has=page.locator("table#tab-memory-needed"))
        frame = edges.locator("> .pst-scrollable-table-container")
        column = page.locator("article h1").evaluate("head => head.getBoundingClientRect().right")
        assert frame.evaluate("frame => frame.scrollWidth - frame.clientWidth") <= 1
        assert column < frame.evaluate("frame => frame.getBoundingClientRect().right") <= 1440
        assert "more-right" not in edges.get_attribute("class")
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function("document.querySelector('.kvbook-edges').classList.contains('more-right')")
        frame.evaluate("frame => frame.scrollTo(frame.scrollWidth, 0)")
        page.wait_for_function("document.querySelector('.kvbook-edges').className.endsWith('more-left')")


def case_shown(page):
    """Read loop and precision of the front page's one case that is shown."""
    (shown,) = page.locator(".kvbook-case:visible").all()
    return shown.get_attribute("data-loop"), shown.get_attribute("data-dtype")


def test_the_front_pages_experiment_is_chosen_from_with_a_keyboard_and_without_javascript(page, plain, address):
    for reader in (page, plain):
        reader.goto(address)
        assert case_shown(reader) == ("right", "bfloat16")
        assert reader.locator(".kvbook-case:visible mark").count() == 2, "the first token that differs, in both texts"
        reader.get_by_role("radio", name="fp32").focus()
        reader.keyboard.press("Space")
        assert case_shown(reader) == ("right", "float32")
        assert reader.locator(".kvbook-case:visible mark").count() == 0
        reader.get_by_role("radio", name="a prompt cut after a space").focus()
        reader.keyboard.press("Space")
        assert case_shown(reader) == ("wrong", "float32")
        assert reader.locator("details.door:visible").count() == 8


@pytest.mark.parametrize(("size", "screens"), [((1440, 900), 1), ((390, 844), 2)])
def test_the_experiment_is_seen_at_first_sight_and_after_one_scroll_on_a_telephone(browser, address, size, screens):
    with browser.new_page(viewport={"width": size[0], "height": size[1]}) as page:
        page.goto(address)
        end = page.locator(".kvbook-first").evaluate("one => one.getBoundingClientRect().bottom")
        assert end <= screens * size[1]


# What people ask, the links that they follow from the front page, and what the answer says.
QUESTIONS = {
    "I reused a prompt's cache in bf16 and the answer changed":
        (["I reused a prompt"], "Rounding, if the ids are right and the text does not change in fp32"),
    "my static cache is slow on a T4": (["It is slow"], "the speed comes from compiled steps"),
    "the cache of my own nanoGPT gets worse past its block_size":
        (["I wrote my own loop", "Continue past"], "begin a new cache with the last tokens"),
    "vLLM with prefix caching: the same request has another answer":
        (["vLLM, SGLang", "The same request"], "a wrong cache can move answers much further"),
    "RL: trainer and rollout have other log-probabilities":
        (["an RL trainer", "My trainer"], "whether the logprobs differ by rounding or by a fault"),
    "Mamba, fed in chunks, has other logits": (["Mamba, Jamba"], "a second chunk begins with an empty state"),
    # One that every build draws from recorded rows: those of an own run have no entry of the book's.
    "how do I cite a figure, say Fig. 12.1?": (["All figures", "Fig. 12.1"], "@misc{"),
}


def shared(question: str, link: str) -> bool:
    """Tell whether a link has a word of the question, or one that begins so."""
    ours, theirs = (re.findall(r"\w{3,}", text.lower()) for text in (question, link))
    return any(one.startswith(other) or other.startswith(one) for one in ours for other in theirs)


def landed(page, question, links):
    """Follow links from what is seen, each with a word of the question; give where the last one leads."""
    place = page.locator("article")
    for words in links:
        link = place.locator("summary, a:visible", has_text=words).first
        assert link.count() == 1, f"no link {words}"
        assert shared(question, link.inner_text()), f"{link.inner_text()} has no word of the question"
        folded = link.evaluate("link => link.tagName") == "SUMMARY"
        link.click()
        if folded:
            place = page.locator("details[open]", has=page.locator("summary", has_text=words))
        else:
            page.wait_for_load_state()
            figure = urlparse(page.url).fragment
            below = f"#{figure} >> xpath=following::*[contains(@class, 'kvbook-downloads')]"
            place = page.locator(below if figure else "article").first
    return place


def remedies() -> set[str]:
    """List what tests run as it is pasted: snippets, how-to programs, and the commands of the how-to pages."""
    snippets = [code for _, _, code in test_snippets.SNIPPETS]
    programs = [file.read_text("utf-8") for file in sorted((ROOT / "examples").rglob("*.py"))]
    return {code.strip() for code in (*snippets, *programs, test_server.COMMAND, test_scores.COMMAND)}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_within_two_clicks_and_200_words_and_its_remedy_runs(page, address, question):
    links, answer = QUESTIONS[question]
    assert len(links) <= 2
    page.goto(address)
    place = landed(page, question, links)
    words = " ".join((place.text_content() if "@misc" in answer else place.inner_text()).split()[:200])
    assert answer.lower() in words.lower()
    if "@misc" not in answer:
        # A tool is installed before it is called.
        remedy = place.locator("div.highlight pre").filter(has_not_text="pip install").first
        assert remedy.text_content().strip() in remedies()
        assert place.locator("button.copybtn").count() > 0


def test_control_where_the_link_is_gone_a_question_is_not_answered(page, address):
    for question, (links, _) in QUESTIONS.items():
        page.goto(address)
        link = page.locator("article summary, article a", has_text=links[0])
        link.evaluate_all("links => links.forEach(link => link.remove())")
        with pytest.raises(AssertionError, match="no link"):
            landed(page, question, links)
    assert not shared("why is the sky blue", "It is slow")


def found_by_search(page, address, words):
    """Return the addresses that the site's own search offers, in its order; empty when it says that there are none."""
    page.goto(f"{address}search.html?q={quote(words)}")
    page.locator("#search-results > p.search-summary, #search-results > .search-summary").wait_for()
    page.wait_for_function("!document.querySelector('#search-results > h2').innerText.includes('Searching')")
    return page.eval_on_selector_all("#search-results ul.search a", "links => links.map(link => link.href)")


@pytest.mark.parametrize(("words", "leads_to"), [
    ("static cache", "chapters/10_static_cache.html"), ("StaticCache", "pages/howto/static_cache.html"),
    ("DynamicCache", "pages/howto/reuse_a_prompt.html"), ("cache_position", "pages/howto/reuse_a_prompt.html"),
    ("deepcopy", "pages/howto/reuse_a_prompt.html"), ("block_size", "pages/howto/past_the_window.html"),
    ("nanoGPT", "pages/howto/past_the_window.html"), ("vLLM", "pages/howto/bit_reproducible.html"),
    ("determinism", "pages/howto/bit_reproducible.html"), ("FlashAttention", "chapters/05_where_drift_begins.html"),
])
def test_the_words_that_people_search_for_lead_to_a_page(page, address, words, leads_to):
    assert any(leads_to in link for link in found_by_search(page, address, words))


def test_control_search_for_what_is_nowhere_finds_nothing(page, address):
    assert found_by_search(page, address, "zyzzyva") == []


def test_a_link_to_the_last_figure_leads_to_it_though_the_pictures_above_have_not_loaded(browser, address):
    # Of a reader who comes for the first time: whatever was loaded before is there at once.
    with browser.new_page(viewport=page_rules.WIDE) as page:
        page.goto(address + CHAPTER_PAGES[0])
        name = page.locator("article figure:has(img)").last.get_attribute("id")
        page.goto(f"{address}{CHAPTER_PAGES[0]}?again#{name}", wait_until="networkidle")
        top = page.evaluate("name => document.getElementById(name).getBoundingClientRect().top", name)
        assert -50 <= top <= page_rules.WIDE["height"] / 2


def test_the_gallery_leads_to_all_figures_of_all_chapters(page, address, site):
    shown = sum(len(soup(site / path).select("article figure img")) for path in CHAPTER_PAGES)
    page.goto(address + "pages/figures.html")
    # That one of them leads there is seen where somebody asks how to cite it.
    assert page.locator(".kvbook-tile a[href*='#fig-'] > img").count() == shown > 0


# What each harm adds to a page, and what is to be found then.
HARM = {
    "picture without words": '<img src="{own}" alt="">',
    "picture does not load": '<img src="../_images/nothing.png" alt="a lost picture">',
    "failed request": '<img src="../_images/nothing.png" alt="a lost picture">',
    "foreign request": '<script src="https://example.org/x.js"></script>',
    "script error": "<script>undefinedFunction()</script>",
    "console error": "<script>console.error('no')</script>",
    "dead link: nowhere.html": '<a href="nowhere.html">a link</a>',
    "dead link: ../index.html#nothing": '<a href="../index.html#nothing">a link</a>',
    "scrolls sideways at 390 px": '<div style="width: 900px">wide</div>',
    "no number in caption": "<figure><figcaption>A caption</figcaption></figure>",
    "caption cut at 390 px": '<div><table><caption style="min-width: 800px">Table 1</caption></table></div>',
    "light theme, color-contrast": '<p style="color: #ddd; background: #fff">hard to read</p>',
    "dark theme, color-contrast": '<p style="color: #333; background: #000">hard to read</p>',
    "light theme, link-in-text-block":
        '<p>words by <a href="../index.html" style="color: #111; text-decoration: none">a link</a> like them</p>',
    "link-name": '<a href="../index.html"></a>',
    "too long: ": '<div style="height: 10200px"></div>',
    "too heavy: its HTML": "<!--" + "x" * page_rules.MOST_HTML_BYTES + "-->",
    "too heavy: in all": "<!--" + "x" * page_rules.MOST_BYTES + "-->",
}


def test_control_each_fault_of_a_page_that_has_all_is_found_and_named(page, judged, tmp_path, site):
    folder = shutil.copytree(site, tmp_path / "html")
    file = folder / CHAPTER_PAGES[0]
    html, own = file.read_text("utf-8"), soup(file).select_one("article figure img")["src"]
    file.write_text(html.replace("</article>", "".join(HARM.values()).replace("{own}", own) + "</article>", 1), "utf-8")
    with page_rules.serve(folder) as address:
        found = page_rules.faults(page, judged, address, CHAPTER_PAGES[0], folder)
    assert [fault for fault in HARM if not any(line.startswith(fault) for line in found)] == [], found


def test_no_page_names_a_folder_of_this_machine(site, tmp_path):
    def naming(folder):
        folders = (str(ROOT), str(site.parent), "Path('")
        pages = ((file.name, file.read_text("utf-8")) for file in folder.rglob("*.html"))
        return [name for name, text in pages if any(each in text for each in folders)]

    assert naming(site) == []
    (tmp_path / "control.html").write_text(f"chapters: Path = PosixPath('{ROOT}/chapters')")
    assert naming(tmp_path) == ["control.html"]
