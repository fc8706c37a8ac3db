"""What a page of the site must be in a real browser, as functions that list what it is not."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from axe_playwright_python.base import AXE_SCRIPT
from bs4 import BeautifulSoup
from playwright.sync_api import Page

WIDE = {"width": 1280, "height": 900}
# The narrowest telephones still sold, the most common width, and a tablet's.
NARROW = (320, 390, 820)
# Of a telephone of the most common width, how many screens a chapter may take with its folds closed.
SCREEN, MOST_SCREENS = {"width": 390, "height": 844}, 12

WCAG = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
# Those of its rules that colours decide: in a second theme nothing else can come out otherwise.
OF_COLOURS = ("color-contrast", "link-in-text-block")
# Judging colours takes much of a page's time, so of texts that are written alike, on grounds that are alike, one is
# judged, on the first page that has one. What only another element's lying over or under one of them makes hard to
# read is not seen.
TEXTS_OF_NEW_STYLES = Path(__file__).with_name("texts_of_new_styles.js").read_text("utf-8")

# What a first visit may load: about 0.8 MB are the theme's style sheets, icons and scripts, fetched once for the whole
# site.
MOST_BYTES = 1_600_000
# Its text alone, with all that is folded away: the data dictionary and the atlas are the longest.
MOST_HTML_BYTES = 150_000

# What no test should wait for any longer.
TIMEOUT_MS = 20_000


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing: a test's output is for faults."""

    def end_headers(self) -> None:
        """Let the browser keep what all pages share: fonts and scripts are then loaded once."""
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, at the address that this yields."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


@contextmanager
def _listening(page: Page, **heard: Callable[[Any], object]) -> Iterator[None]:
    with ExitStack() as stack:
        for event, listener in heard.items():
            page.on(event, listener)
            stack.callback(page.remove_listener, event, listener)
        yield


def faults(page: Page, judged: set[str], address: str, path: str, folder: Path) -> list[str]:
    """List what is wrong with a page, in one visit.

    Parameters
    ----------
    page
        A tab of a browser of Playwright that reaches no other machine. In one that shows one page after the other, what
        they share is loaded and compiled once. A page that it has shown before weighs more: pictures that wait for a
        reader are there at once.
    judged
        The styles of text whose colours were judged on pages before; those of this page are added.
    address
        Where the site is served.
    path
        The page within it.
    folder
        The site's files, to weigh them and to follow links without visiting them.

    Returns
    -------
    list of str
        One line a fault; empty when the page is as it must be.
    """
    found: list[str] = []
    loaded: dict[str, int] = {}
    under_way = set()

    def asked(request) -> None:
        under_way.add(request)
        if request.url.startswith("http") and not request.url.startswith(address):
            found.append(f"foreign request: {request.url}")

    def answered(response) -> None:
        if response.status >= 400:
            found.append(f"failed request: {response.status} {response.url}")
        elif response.status == 200 and response.url.startswith(address):
            # Of the file, not of the answer: a page that comes after others has most of it from the browser's memory.
            loaded[response.url] = (folder / unquote(urlparse(response.url).path).lstrip("/")).stat().st_size

    def ended(request) -> None:
        under_way.discard(request)

    def said(message) -> None:
        if message.type in ("error", "warning"):
            found.append(f"console {message.type}: {message.text}")

    with _listening(
        page, request=asked, response=answered, requestfinished=ended, requestfailed=ended,
        pageerror=lambda error: found.append(f"script error: {error}"), console=said,
    ):
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="dark")
        page.goto(address + path)
        _settle(page, under_way)
        # Before pictures that wait for a reader are made to load.
        found += _weight(loaded, address + path)
        found += [*_pictures(page), *_captions(page)]
        page.evaluate(AXE_SCRIPT)
        # All rules at once in the second theme: axe takes half of its time to read a page.
        for theme, rules in (("dark", {"type": "rule", "values": OF_COLOURS}), ("light", WCAG)):
            page.emulate_media(color_scheme=theme)
            _draw(page)
            if page.evaluate("document.documentElement.dataset.theme") != theme:
                found.append(f"the {theme} theme is not shown to who asks for it")
            if _marked(page, judged) or rules is WCAG:
                found += _violations(page, rules, theme)
        for width in NARROW:
            found += _overflow(page, width)
            if width == SCREEN["width"] and path.startswith("chapters/"):
                found += _length(page)
        _settle(page, under_way)
    return [*found, *_links(folder, path)]


def _draw(page: Page) -> None:
    """Wait for two frames: what scripts change at the first is laid out at the second.

    Not for longer than five seconds: a browser without a screen was seen to draw none for minutes. What is asked of the
    page next lays it out by itself.
    """
    page.evaluate(
        "Promise.race([new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))),"
        " new Promise(done => setTimeout(done, 5000))])"
    )


def _settle(page: Page, under_way: set) -> None:
    """Wait until everything has come that the page has asked for."""
    end = time.monotonic() + TIMEOUT_MS / 1000
    while under_way:
        assert time.monotonic() < end, f"still under way: {[request.url for request in under_way]}"
        page.wait_for_timeout(10)


def _pictures(page: Page) -> list[str]:
    pictures = page.evaluate(
        "Promise.all([...document.querySelectorAll('article img')].map(async i => {"
        " i.loading = 'eager'; await i.decode().catch(() => null);"
        " return [i.getAttribute('src'), i.naturalWidth, i.alt] }))"
    )
    found = [f"picture does not load: {source}" for source, width, _ in pictures if width == 0]
    # MyST-NB's own stand-in for a missing text is the picture's file name, a hash.
    wordless = [source for source, _, words in pictures if len(words.split()) < 2 or Path(source).stem in words]
    return found + [f"picture without words: {source}" for source in wordless]


def _captions(page: Page) -> list[str]:
    captions = page.evaluate(
        "[...document.querySelectorAll('article figure, article table.kvbook-table')]"
        ".map(f => (f.querySelector('figcaption, caption') || {textContent: ''}).textContent.trim())"
    )
    return [f"no number in caption: {text[:60]!r}" for text in captions if not text.startswith(("Fig. ", "Table "))]


def _weight(loaded: dict[str, int], address: str) -> list[str]:
    weights = (("its HTML", loaded.get(address, 0), MOST_HTML_BYTES), ("in all", sum(loaded.values()), MOST_BYTES))
    return [f"too heavy: {what}, {size:,} bytes" for what, size, most in weights if size > most]


def _overflow(page: Page, width: int) -> list[str]:
    page.set_viewport_size(SCREEN | {"width": width})
    _draw(page)
    needed = page.evaluate("document.documentElement.scrollWidth")
    found = [f"scrolls sideways at {width} px: needs {needed} px"] if needed > width else []
    # A table may scroll; who reads its caption should not have to. What is folded away has no width.
    wider = "c => c.offsetWidth > c.closest('div').clientWidth + 1"
    cut = page.evaluate(f"[...document.querySelectorAll('caption')].filter({wider}).map(c => c.textContent.trim())")
    return found + [f"caption cut at {width} px: {text[:60]!r}" for text in cut]


def _length(page: Page) -> list[str]:
    screens = page.evaluate("document.documentElement.scrollHeight") / SCREEN["height"]
    return [f"too long: {screens:.1f} screens of a telephone"] if screens > MOST_SCREENS else []


def _marked(page: Page, judged: set[str]) -> bool:
    """Have axe judge the colours of texts of new styles alone, and say whether there are any."""
    # A colour that is still changing to another theme's would be judged halfway.
    page.evaluate("for (const change of document.getAnimations()) try { change.finish() } catch { change.cancel() }")
    new = page.evaluate(TEXTS_OF_NEW_STYLES, list(judged))
    judged.update(new)
    return bool(new)


def _violations(page: Page, rules: dict[str, object], theme: str) -> list[str]:
    # preload: axe would fetch the style sheets once more, and some of their imports from where they are not.
    options = {"runOnly": rules, "preload": False, "reporter": "no-passes", "resultTypes": ["violations"]}
    result = page.evaluate("options => axe.run(document, options)", options)
    found = [(each["id"], node["html"][:120]) for each in result["violations"] for node in each["nodes"]]
    return [f"{theme} theme, {rule}: {html}" if rule in OF_COLOURS else f"{rule}: {html}" for rule, html in found]


def _links(folder: Path, path: str) -> list[str]:
    found = []
    for link in _read(folder / path, (folder / path).stat().st_mtime_ns)[1]:
        target, fragment = urldefrag(urljoin(f"http://site/{path}", link))
        parts = urlparse(target)
        if parts.netloc != "site" or parts.scheme != "http":
            continue
        file = folder / unquote(parts.path).lstrip("/")
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            found.append(f"dead link: {link}")
        elif fragment and file.suffix == ".html" and unquote(fragment) not in _read(file, file.stat().st_mtime_ns)[0]:
            found.append(f"dead link: {link} names no place on its page")
    return found


@functools.lru_cache(maxsize=128)
def _read(file: Path, _changed: int) -> tuple[frozenset[str], list[str]]:
    """List the ids of a page, and where its links lead."""
    soup = BeautifulSoup(file.read_text("utf-8"), "html.parser")
    ids = frozenset(tag["id"] for tag in soup.find_all(id=True))
    return ids, [tag["href"] for tag in soup.find_all("a", href=True)]
