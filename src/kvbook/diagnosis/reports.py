"""What a check found, for other programs and for a browser: HTML, JUnit XML, and annotations of GitHub Actions."""

import html
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from kvbook.diagnosis import plot
from kvbook.diagnosis.outcome import COULD_NOT, Outcome
from kvbook.diagnosis.settings import CheckSettings
from kvbook.errors import UserError

_PAGE = Path(__file__).with_name("report.html").read_text("utf-8")


@dataclass(frozen=True)
class Files:
    """The files that a check is asked to write."""

    plot: Path | None = None
    report: Path | None = None
    junit: Path | None = None
    repro: Path | None = None

    @classmethod
    def checked(cls, **asked: str | None) -> "Files":
        """Refuse, before anything is measured, what cannot be written or drawn."""
        found = {option: named(option, name) for option, name in asked.items() if name}
        for option in ("plot", "report"):
            if asked.get(option):
                plot.check_library(f"--{option}")
        return cls(**found)

    def write(self, found: Outcome, asked: CheckSettings | None = None) -> list[str]:
        """Write them all; return what else is to be said."""
        if self.plot:
            plot.draw(found, self.plot)
        if self.report:
            write_html(found, self.report)
        if self.junit:
            write_junit(found, self.junit)
        said = [annotation(found)] if asked and os.environ.get("GITHUB_ACTIONS") == "true" else []
        if self.repro and asked:
            said.append(self._reproduced(found, asked))
        return said

    def _reproduced(self, found: Outcome, asked: CheckSettings) -> str:
        if found.verdict != "bug":
            return f"repro     {self.repro} is not written: there is no bug to show"
        from kvbook.diagnosis import repro

        return f"repro     {self.repro} prints: {repro.write(asked, found.path, self.repro)}"


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
    counts = {"tests": len(found.paths), "failures": 0, "errors": 0, "skipped": 0}
    kinds = {"bug": ("failure", "failures"), "undecided": ("error", "errors"), "not supported": ("skipped", "skipped")}
    for each in found.paths:
        case = ElementTree.SubElement(suite, "testcase", classname=found.model, name=each.path)
        if each.verdict in kinds:
            tag, counted = kinds[each.verdict]
            counts[counted] += 1
            ElementTree.SubElement(case, tag, message=each.detail).text = "\n".join(found.lines)
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    ElementTree.ElementTree(suite).write(to, encoding="utf-8", xml_declaration=True)


def annotation(found: Outcome) -> str:
    """Say it in one line that GitHub Actions shows beside a change."""
    level = {1: "error", COULD_NOT: "warning"}.get(found.status, "notice")
    text = f"{found.verdict}: {found.why}; {found.remedy}".replace("%", "%25").replace("\n", "%0A")
    title = f"kvbook check {found.model}".replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    return f"::{level} title={title}::{text}"
