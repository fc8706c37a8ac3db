"""Between which releases of transformers, and which commits, a fault of an architecture came and went."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbook import releases
from kvbook.atlas import table
from kvbook.atlas.names import PATHS
from kvbook.errors import UserError

# The oldest release on which the atlas runs.
OLDEST = (4, 50)
# Says of a release, or of a commit's checkout, what a path comes to there.
Outcome = Callable[[str], str]


class Span(NamedTuple):
    """A fault's life among points in their order: those before and after it are None where there is none."""

    before: str | None
    first: str
    last: str
    after: str | None

    def lines(self) -> list[str]:
        """Say it."""
        before = f"not in {self.before}" if self.before else "the oldest that tells"
        after = f"not in {self.after}" if self.after else "the newest that tells"
        return [f"{'wrong from':14s} {self.first}, {before}", f"{'wrong until':14s} {self.last}, {after}"]


def check_path(path: str) -> None:
    """Refuse a path that the atlas has not."""
    if path not in PATHS:
        raise UserError(f"the atlas has no path {path!r}: choose one of {', '.join(PATHS)}")


def published() -> list[str]:
    """List the last patch of each minor release that the package index has, oldest first."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "transformers", "--disable-pip-version-check"]
    done = subprocess.run(asked, capture_output=True, text=True)
    found = re.search(r"Available versions: (.+)", done.stdout)
    if found is None:
        raise UserError("the package index lists no releases of transformers: name them with --releases")
    return last_patches(found[1].split(", "))


def last_patches(versions: Sequence[str]) -> list[str]:
    """Keep the last patch of each minor release from the oldest that can be tried."""
    numbers = sorted(tuple(map(int, each.split("."))) for each in versions if re.fullmatch(r"\d+\.\d+\.\d+", each))
    last = {number[:2]: number for number in numbers if number[:2] >= OLDEST}
    return [".".join(map(str, number)) for number in last.values()]


def halving(count: int) -> list[int]:
    """Order places so that the newest and the oldest come first, and then always the middle of what is widest."""
    order, gaps = [count - 1, 0][:count], [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def span(
    points: Sequence[str], outcome: Outcome, has: str | None = None,
    say: Callable[[str, str], None] = lambda _point, _outcome: None,
) -> Span:
    """Find a fault among points, and bisect on both sides of it; `has` is a point that is known to have it.

    `say` is told each point that is tried, and what the path comes to there.
    """
    known: dict[int, bool | None] = {}

    def wrong(at: int) -> bool | None:
        if at not in known:
            say(points[at], found := outcome(points[at]))
            # What does not run there says neither that the fault is there nor that it is not.
            known[at] = {table.BUG: True, table.ROUNDING: False, table.EXACT: False}.get(found)
        return known[at]

    order = [points.index(has)] if has in points else halving(len(points))
    inside = next((at for at in order if wrong(at)), None)
    if inside is None:
        raise UserError(f"not wrong in {', '.join(points[at] for at in sorted(order))}: name a release with --has")
    before, first = _edge(-1, inside, wrong)
    after, last = _edge(len(points), inside, wrong)
    return Span(
        points[before] if before >= 0 else None, points[first], points[last],
        points[after] if after < len(points) else None,
    )


def _edge(outside: int, inside: int, wrong: Callable[[int], bool | None]) -> tuple[int, int]:
    """Bisect between a place that is taken to be sound and one that is wrong; return the nearest of both that tell."""
    while True:
        middle = (inside + outside) / 2
        between = sorted(range(min(inside, outside) + 1, max(inside, outside)), key=lambda at: abs(at - middle))
        told = next((at for at in between if wrong(at) is not None), None)
        if told is None:
            return outside, inside
        if wrong(told):
            inside = told
        else:
            outside = told


def of_release(architecture: str, path: str, folder: Path, keep: bool = False) -> Outcome:
    """Return what tells of a release, or of a checkout, what a path of an architecture comes to there."""

    def outcome(release: str) -> str:
        with tempfile.TemporaryDirectory() as beside:
            rows = Path(beside) / "rows.jsonl"
            try:
                made = releases.environment(release, folder)
                releases.run(made, ["atlas", architecture, "--paths-only", "--rows", str(rows)], quiet=True)
            except UserError as error:
                return str(error)
            if not keep:
                shutil.rmtree(made)
            lines = rows.read_text("utf-8").splitlines() if rows.exists() else []
        row = table.judged(json.loads(lines[0])) if lines else {"reason": "not there"}
        return row.get(path) or row["reason"]

    return outcome


def commits(checkout: Path, before: str, first: str) -> list[str]:
    """List the commits of a checkout from one release's tag to another's, oldest first, with both ends."""
    tags = [f"v{release}" for release in (before, first)]
    asked = ["rev-list", "--reverse", "--first-parent", f"{tags[0]}..{tags[1]}", "--", "src/transformers"]
    return [_git(checkout, "rev-parse", f"{tags[0]}^0"), *_git(checkout, *asked).split()]


def of_commit(checkout: Path, outcome: Outcome) -> Outcome:
    """Return what tells of a commit, by a work tree of its own, what a path comes to there."""

    def told(commit: str) -> str:
        with tempfile.TemporaryDirectory() as beside:
            tree = str(Path(beside) / "transformers")
            _git(checkout, "worktree", "add", "--detach", tree, commit)
            try:
                return outcome(tree)
            finally:
                _git(checkout, "worktree", "remove", "--force", tree)

    return told


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(f"git cannot {arguments[0]} in {checkout}: {said[-1]}")
    return done.stdout.strip()
