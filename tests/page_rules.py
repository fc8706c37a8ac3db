"""What a page of the site must be in a real browser, as functions that list what it is not."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from playwright.sync_api import Browser, Page

WIDE = {"width": 1280, "height": 900}
# The narrowest telephones still sold, and the most common width.
NARROW = (320, 390)

WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

# What a first visit may load: about 2.4 MB are the theme's icons, fonts and scripts, fetched once for the whole site.
MOST_BYTES = 3_000_000
# Its text alone, with all that is folded away.
MOST_HTML_BYTES = 150_000

# What no test should wait for any longer.
TIMEOUT_MS = 20_000


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing: a test's output is for faults."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def faults(browser: Browser, address: str, path: str, folder: Path) -> list[str]:
    """List what is wrong with a page, in one visit.

    Parameters
    ----------
    browser
        A browser of Playwright.
    address
        Where the site is served.
    path
        The page within it.
    folder
        The site's files, to follow links without visiting them.

    Returns
    -------
    list of str
        One line a fault; empty when the page is as it must be.
    """
    found: list[str] = []
    loaded: dict[str, int] = {}
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()

    def only_ours(route) -> None:
        if route.request.url.startswith(address):
            route.continue_()
        else:
            found.append(f"foreign request: {route.request.url}")
            route.abort()

    def answered(response) -> None:
        if response.status >= 400:
            found.append(f"failed request: {response.status} {response.url}")
        elif response.status == 200:
            loaded[response.url] = len(response.body())

    context.route(lambda url: url.startswith("http"), only_ours)
    page.on("response", answered)
    page.on("pageerror", lambda error: found.append(f"script error: {error}"))
    page.on(
        "console",
        lambda message: (
            found.append(f"console {message.type}: {message.text}") if message.type in ("error", "warning") else None
        ),
    )
    try:
        page.goto(address + path, wait_until="networkidle")
        # Before pictures that wait for a reader are made to load.
        found += _weight(loaded, address + path)
        found += [*_pictures(page), *_captions(page)]
        found += _accessibility(page, "light")
        for width in NARROW:
            found += _overflow(page, width)
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="dark")
        page.reload(wait_until="networkidle")
        if page.evaluate("document.documentElement.dataset.theme") != "dark":
            found.append("the dark theme is not shown to who asks for it")
        found += _accessibility(page, "dark")
    finally:
        context.close()
    return [*found, *_links(folder, path)]


def downloads(folder: Path, path: str) -> list[Path]:
    """List the files that a page offers for download.

    Parameters
    ----------
    folder
        The site's files.
    path
        The page within it.
    """
    soup = BeautifulSoup((folder / path).read_text("utf-8"), "html.parser")
    return [(folder / path).parent / unquote(link["href"]) for link in soup.select("a.download")]


def _pictures(page: Page) -> list[str]:
    page.evaluate(
        "Promise.all([...document.querySelectorAll('article img')].map(i => {"
        " i.loading = 'eager'; return i.decode().catch(() => null) }))"
    )
    pictures = page.evaluate(
        "[...document.querySelectorAll('article img')].map(i => [i.getAttribute('src'), i.naturalWidth, i.alt])"
    )
    found = [f"picture does not load: {source}" for source, width, _ in pictures if width == 0]
    # MyST-NB's own stand-in for a missing text is the picture's file name, a hash.
    return found + [
        f"picture without words: {source}"
        for source, _, words in pictures
        if len(words.split()) < 2 or Path(source).stem in words
    ]


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
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(100)
    needed = page.evaluate("document.documentElement.scrollWidth")
    return [f"scrolls sideways at {width} px: needs {needed} px"] if needed > width else []


def _accessibility(page: Page, theme: str) -> list[str]:
    # preload: axe would fetch the style sheets once more, and some of their imports from where they are not.
    result = Axe().run(page, options={"runOnly": {"type": "tag", "values": WCAG}, "preload": False})
    return [
        f"{theme} theme, {violation['id']}: {node['html'][:120]}"
        for violation in result.response["violations"]
        for node in violation["nodes"]
    ]


def _links(folder: Path, path: str) -> list[str]:
    soup = BeautifulSoup((folder / path).read_text("utf-8"), "html.parser")
    found = []
    for link in soup.find_all("a", href=True):
        target, fragment = urldefrag(urljoin(f"http://site/{path}", link["href"]))
        parts = urlparse(target)
        if parts.netloc != "site" or parts.scheme != "http":
            continue
        file = folder / unquote(parts.path).lstrip("/")
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            found.append(f"dead link: {link['href']}")
        elif fragment and file.suffix == ".html" and unquote(fragment) not in _ids(file, file.stat().st_mtime_ns):
            found.append(f"dead link: {link['href']} names no place on its page")
    return found


@functools.lru_cache(maxsize=64)
def _ids(file: Path, _changed: int) -> frozenset[str]:
    soup = BeautifulSoup(file.read_text("utf-8"), "html.parser")
    return frozenset(tag["id"] for tag in soup.find_all(id=True))
