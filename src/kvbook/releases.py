"""Other releases of transformers: environments of them, and between which of them, or commits, a fault came and went.

An environment is a folder for the front of the module path, beside the running one and sharing its torch: a release,
and whatever it pins that the running one does not satisfy.  It comes from the package index that pip is set up for, is
made once and is kept until it is removed.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbook import UserError
from kvbook.atlas import PATHS, table

# The oldest release on which the atlas runs.
OLDEST = (4, 50)
_PIP = (sys.executable, "-m", "pip")
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


def _said(refusal: str, *command: str, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it prints, or refuse with the last thing that it complains of."""
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        # Behind pip's errors stand its remarks.
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise UserError(f"{refusal}: {said[-1]}")
    return done.stdout.strip()


def environment(release: str, folder: Path) -> Path:
    """Make the environment of a release or of a git checkout, unless the folder holds it; return where it is."""
    checkout = Path(release).resolve() if (Path(release) / "src" / "transformers").is_dir() else None
    if not checkout and not re.fullmatch(r"\d+(\.\w+)+", release):
        raise UserError(f"{release} is neither a release, as 5.5.4 is, nor a git checkout of transformers")
    made = folder.resolve() / f"transformers-{_commit(checkout) if checkout else release}"
    if made.is_dir():
        return made
    beside = made.with_name(f"{made.name}.part{os.getpid()}")
    try:
        _install(str(checkout or f"transformers=={release}"), beside)
        beside.rename(made)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return made


def run(made: Path, arguments: list[str], quiet: bool = False) -> int:
    """Run a command of kvbook in an environment; return its exit status, or refuse a release that is not imported."""
    imported = sys.executable, "-c", "import kvbook.atlas.running"
    _said(f"{made.name} cannot be imported here", *imported, env=variables(made))
    to = subprocess.DEVNULL if quiet else None
    command = [sys.executable, "-m", "kvbook", *arguments]
    return subprocess.run(command, env=variables(made), stdout=to, stderr=to).returncode


def variables(made: Path) -> dict[str, str]:
    """Return the environment variables under which Python finds a release first, and then what this process finds."""
    searched = [str(made), *(path for path in sys.path if path and Path(path).is_dir())]
    return os.environ | {"PYTHONPATH": os.pathsep.join(searched)}


def _commit(checkout: Path) -> str:
    commit = _git(checkout, "describe", "--always", "--dirty", "--abbrev=12")
    if commit.endswith("-dirty"):
        raise UserError(f"{checkout} has changes beside its commit: commit them first")
    return commit.replace("/", "-")


def _install(wanted: str, folder: Path) -> None:
    """Install a release or checkout, and of what it requires that which the running environment does not satisfy."""
    # Into another folder pip would install all of it, torch too: so it is asked first what is wanting here.
    planned = json.loads(_pip(wanted, "--dry-run", "--report", "-"))["install"]
    more = (each["metadata"] for each in planned if not each["requested"])
    _pip(wanted, "--no-deps", "--target", str(folder), *(f"{each['name']}=={each['version']}" for each in more))


def _pip(wanted: str, *arguments: str) -> str:
    quietly = ("--quiet", "--no-input", "--no-compile", "--disable-pip-version-check")
    return _said(f"cannot install {wanted}", *_PIP, "install", *quietly, *arguments, wanted)


def check_path(path: str) -> None:
    """Refuse a path that the atlas has not."""
    if path not in PATHS:
        raise UserError(f"the atlas has no path {path!r}: choose one of {', '.join(PATHS)}")


def published() -> list[str]:
    """List the last patch of each minor release that the package index has, oldest first."""
    asked = "index", "versions", "transformers", "--disable-pip-version-check"
    listed = _said("the package index lists no releases, so name them with --releases", *_PIP, *asked)
    return last_patches(re.search(r"Available versions: (.+)", listed)[1].split(", "))


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
    @functools.cache
    def wrong(at: int) -> bool | None:
        say(points[at], found := outcome(points[at]))
        # What does not run there says neither that the fault is there nor that it is not.
        return {table.BUG: True, table.ROUNDING: False, table.EXACT: False}.get(found)

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
    middle = (inside + outside) / 2
    between = sorted(range(min(inside, outside) + 1, max(inside, outside)), key=lambda at: abs(at - middle))
    told = next((at for at in between if wrong(at) is not None), None)
    if told is None:
        return outside, inside
    return _edge(outside, told, wrong) if wrong(told) else _edge(told, inside, wrong)


def of_release(architecture: str, path: str, folder: Path, keep: bool = False) -> Outcome:
    """Return what tells of a release, or of a checkout, what a path of an architecture comes to there."""

    def outcome(release: str) -> str:
        with tempfile.TemporaryDirectory() as beside:
            rows = Path(beside) / "rows.jsonl"
            try:
                made = environment(release, folder)
                run(made, ["atlas", architecture, "--paths-only", "--rows", str(rows)], quiet=True)
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
    return _said(f"git cannot {arguments[0]} in {checkout}", "git", "-C", str(checkout), *arguments)
