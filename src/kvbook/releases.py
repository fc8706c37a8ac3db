"""Environments of other releases of transformers, each beside the running one and sharing its torch.

An environment is a folder for the front of the module path: a release, and whatever it pins that the running one does
not satisfy.  It comes from the package index that pip is set up for, is made once and is kept until it is removed.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvbook.errors import UserError


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
        wanted = [str(checkout) if checkout else f"transformers=={release}"]
        while wanted:
            _install(wanted, beside)
            wanted = _unmet(beside)
        beside.rename(made)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return made


def run(made: Path, arguments: list[str], quiet: bool = False) -> int:
    """Run a command of kvbook in an environment; return its exit status, or refuse a release that is not imported."""
    if not (imported := made / ".imported").exists():
        asked = [sys.executable, "-c", "import kvbook.atlas.running"]
        tried = subprocess.run(asked, env=variables(made), capture_output=True, text=True)
        if tried.returncode:
            raise UserError(f"{made.name} cannot be imported here: {tried.stderr.strip().splitlines()[-1]}")
        # Seconds that only the first command in an environment need spend.
        imported.touch()
    to = subprocess.DEVNULL if quiet else None
    command = [sys.executable, "-m", "kvbook", *arguments]
    return subprocess.run(command, env=variables(made), stdout=to, stderr=to).returncode


def variables(made: Path) -> dict[str, str]:
    """Return the environment variables under which Python finds a release first, and then what this process finds."""
    searched = [str(made), *(path for path in sys.path if path and Path(path).is_dir())]
    return os.environ | {"PYTHONPATH": os.pathsep.join(searched)}


def _commit(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    told = subprocess.run(asked, capture_output=True, text=True)
    commit = told.stdout.strip()
    if told.returncode or commit.endswith("-dirty"):
        raise UserError(f"{checkout} has no commit of its own, or changes beside it: commit them first")
    return commit.replace("/", "-")


def _install(wanted: list[str], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile",
           "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--no-deps", "--target", str(folder), *wanted], capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UserError(f"cannot install {' '.join(wanted)}: {said[-1] if said else 'pip gave no reason'}")


def _unmet(folder: Path) -> list[str]:
    """List what the packages of a folder require and neither it nor the running environment has."""
    there = {canonicalize_name(each.name): each for each in metadata.distributions(path=[str(folder)])}
    unmet = []
    for package in there.values():
        for line in package.requires or ():
            required = Requirement(line)
            if required.marker and not required.marker.evaluate({"extra": ""}):
                continue
            running = metadata.distributions(name=required.name)
            found = there.get(canonicalize_name(required.name)) or next(iter(running), None)
            if found is None or not required.specifier.contains(found.version, prereleases=True):
                unmet.append(f"{required.name}{required.specifier}")
    return sorted(set(unmet))
