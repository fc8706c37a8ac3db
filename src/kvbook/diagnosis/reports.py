"""What a check found, for other programs and for a browser: HTML, JUnit XML, and annotations of GitHub Actions."""

import html
import importlib.util
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from kvbook import UserError
from kvbook.diagnosis import CheckSettings, plot
from kvbook.diagnosis.outcome import COULD_NOT, Outcome

_PAGE = Path(__file__).with_name("report.html").read_text("utf-8")


def checked(**asked: str | None) -> dict[str, Path]:
    """Return the files that a check is asked to write, by option; refuse what cannot be written or drawn."""
    found = {option: named(option, name) for option, name in asked.items() if name}
    for option in ("plot", "report"):
        if option in found and importlib.util.find_spec("matplotlib") is None:
            raise UserError(f"--{option} takes matplotlib: pip install matplotlib")
    return found


def write(files: Mapping[str, Path], found: Outcome, asked: CheckSettings | None = None) -> list[str]:
    """Write them all; return what else is to be said."""
    for option, write_one in (("plot", plot.draw), ("report", write_html), ("junit", write_junit)):
        if option in files:
            write_one(found, files[option])
    said = [annotation(found)] if asked and os.environ.get("GITHUB_ACTIONS") == "true" else []
    if asked and "repro" in files:
        said.append(_reproduced(found, asked, files["repro"]))
    return said


def _reproduced(found: Outcome, asked: CheckSettings, to: Path) -> str:
    if found.verdict != "bug":
        return f"repro     {to} is not written: there is no bug to show"
    from kvbook.diagnosis import repro

    return f"repro     {to} prints: {repro.write(asked, found.path, to)}"


_ENDINGS = {"plot": ".png", "report": ".html", "junit": ".xml", "repro": ".py"}


def named(option: str, name: str) -> Path:
    """Return the file that an option names, or refuse it where it cannot be written."""
    ending = _ENDINGS[option]
    if Path(name).suffix.lower() != ending or not Path(name).absolute().parent.is_dir():
        raise UserError(f"--{option} {name}: name a {ending} file in a folder that exists")
    return Path(name)


def write_html(found: Outcome, to: Path) -> None:
    """Write the lines of a check and its plot as one page that needs nothing else."""
    picture = io.StringIO()
    plot.draw(found, picture, "svg")
    drawn = picture.getvalue()
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    write_page(f"kvbook check {found.model}: {found.verdict}", found.lines, drawn[drawn.index("<svg"):], versions, to)


def write_page(title: str, lines: Iterable[str], below: str, versions: str, to: Path) -> None:
    """Write the lines of any check as a page; what stands below them is markup already."""
    rows = [(line[:9].strip(), line[10:]) for line in lines]
    table = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
    page = _PAGE.format(title=html.escape(title), rows=table, picture=below, versions=html.escape(versions))
    to.write_text(page, "utf-8")


def preformatted(texts: Iterable[str]) -> str:
    """Write texts as markup, each as it stands."""
    return "\n".join(f"<pre>{html.escape(one)}</pre>" for one in texts)


def write_junit(found: Outcome, to: Path) -> None:
    """Write one test case for each execution path: a bug is a failure, an undecided one an error."""
    suite = ElementTree.Element("testsuite", name=f"kvbook check {found.model}", time=f"{found.seconds:.1f}")
    tags = {"bug": "failure", "undecided": "error", "not supported": "skipped"}
    lines = "\n".join(found.lines)
    for each in found.paths:
        case = ElementTree.SubElement(suite, "testcase", classname=found.model, name=each.path)
        if tag := tags.get(each.verdict):
            ElementTree.SubElement(case, tag, message=each.detail).text = "" if tag == "skipped" else lines
    counted = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    suite.attrib.update({name: str(len(list(suite.iter(tag)))) for name, tag in counted.items()})
    ElementTree.ElementTree(suite).write(to, encoding="utf-8", xml_declaration=True)


def annotation(found: Outcome) -> str:
    """Say it in one line that GitHub Actions shows beside a change."""
    level = {1: "error", COULD_NOT: "warning"}.get(found.status, "notice")
    text = f"{found.verdict}: {found.why}; {found.remedy}".replace("%", "%25").replace("\n", "%0A")
    title = f"kvbook check {found.model}".replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    return f"::{level} title={title}::{text}"
