"""The prose of pages that are written by hand: short sentences, few numbers, the field's words, short captions."""

import json
import re
import statistics
import textwrap
from pathlib import Path

import pytest

from kvbook import paths
from kvbook.settings import read_yaml
from kvreport.publishing import captions, found
from kvreport.running import planning

# What readers stumbled over, and what they know instead.
PHRASES = read_yaml(Path(__file__).with_name("phrases.yaml"))
LONGEST, MEDIAN, CAPTION = 35, 15, 40
# Two a sentence; a list of a document's own steps or settings may have more.
NUMBERS = 2
# Slots that hold a name.
NAMES = re.compile(r"model|processor|version|names|prompt", re.IGNORECASE)


def pages() -> list[Path]:
    """List the chapters whose rows check their sentences, the story and the how-to pages."""
    chapters = [chapter.source for chapter in planning.plan() if found.has_measures(chapter.name)]
    return [*chapters, paths.ROOT / "pages/story.md", *sorted((paths.ROOT / "pages" / "howto").glob("*.md"))]


def markdown(page: Path) -> str:
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        text = "\n\n".join(captions.prose(json.loads(text)))
    return text


def sentences(text: str) -> list[str]:
    """Split running text into sentences: no captions, code, tables, directives or headings."""
    text = re.sub(r"^(:{3,}|`{3,})\{?.*?^\1\s*$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|\||\()", line)]
    found: list[str] = []
    for line in lines:
        line = re.sub(r"^\s*([-*]|\d+\.)\s+", "", line)
        line = re.sub(r"\s*\{holds\}`[^`]*`", "", line)
        found += [one for one in re.split(r"(?<=[.?!])\**\s+(?=[A-Z*{`])", line) if re.search(r"\w", one)]
    return found


def words(sentence: str) -> list[str]:
    plain = re.sub(r"\{[\w:]+\}`[^`]*`", "x", sentence)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return [word for word in plain.split() if re.search(r"\w", word)]


def numbers(sentence: str) -> int:
    """Count values: those of runs, and those written out; names such as fp32 or GPT-2 are none."""
    sentence = re.sub(r"\b(4|8|16|32|64)([ -]and (4|8|16))?[ -]bits?\b", "", sentence)
    glued = len([key for key in re.findall(r"\{measured\}`([^`]*)`", sentence) if not NAMES.search(key)])
    plain = re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`|\[[^\]]*\]\([^)]*\)", "", sentence)
    plain = re.sub(r"(\d) ?× ?10", r"\1", plain)
    return glued + len(re.findall(r"(?<![\w.,/⁻-])\d[\d,.]*(?![\w-])", plain))


PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)


@PAGES
def test_sentences_are_short_and_have_few_numbers(page):
    said = sentences(markdown(page))
    counts = [len(words(sentence)) for sentence in said]
    assert {s: n for s, n in zip(said, counts, strict=True) if n > LONGEST} == {}
    assert statistics.median(counts) <= MEDIAN
    assert {s: numbers(s) for s in said if numbers(s) > NUMBERS} == {}


@PAGES
def test_no_phrase_stands_that_readers_stumbled_over(page):
    text = re.sub(r"\{[\w:]+\}`[^`]*`|^:::.*$|^\(.*\)=$", "", markdown(page), flags=re.M)
    found = {match.group(): better for phrase, better in PHRASES.items() if (match := re.search(phrase, text))}
    assert found == {}


@pytest.mark.parametrize("page", [page for page in pages() if page.suffix == ".ipynb"], ids=lambda page: page.stem)
def test_captions_are_short(page):
    # What is said of a model's weights comes on top.
    rounded = re.compile(r" \(\d+ M, \d-bit-rounded weights\)")
    counts = {name: len(words(rounded.sub("", caption.text))) for name, caption in captions.of(page).items()}
    assert {name: count for name, count in counts.items() if count > CAPTION} == {}


def test_control_what_the_rules_forbid_is_found():
    (one,) = sentences(" ".join(["word"] * 40) + ".")
    assert len(words(one)) == 40
    assert numbers("It takes {measured}`a`, 3 and 4.5 of 10 steps.") == 4
    assert numbers("In fp32 GPT-2 took `3` steps, see {numref}`fig-2`.") == 0
    assert len(sentences("One is here. Two is there.\n\n:::{caption} x\nNot a sentence.\n:::\n\n| a | table |\n")) == 2
    assert re.search(next(iter(PHRASES)), "gets other bits")


def long_releases(changelog: str) -> list[str]:
    """Name the releases with more than 20 lines of 120 columns, and those that have no date."""
    _, *releases = re.split(r"^## ", changelog, flags=re.MULTILINE)
    lines = [[part for line in text.splitlines() for part in textwrap.wrap(line, 120)] for text in releases]
    dated = re.compile(r"\d+\.\d+\.\d+, (\d{1,2} [A-Z][a-z]+ \d{4}|not yet released)")
    return [title for title, *others in lines if len(others) > 20 or not dated.fullmatch(title)]


def test_a_release_has_a_date_and_twenty_lines_at_most():
    assert long_releases((paths.ROOT / "CHANGELOG.md").read_text("utf-8")) == []


@pytest.mark.parametrize("release", ["Unreleased\n\n- one", "0.3.0, 1 May 2027\n\n" + "- one\n" * 19 + "- one " * 60])
def test_control_a_long_release_and_one_without_a_date_are_found(release):
    title = release.partition("\n")[0]
    assert long_releases(f"# Changelog\n\n## 0.1.0, 2 May 2026\n\n- one\n\n## {release}\n") == [title]
