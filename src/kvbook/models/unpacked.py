"""Where checkpoints lie that were made of other files, in ``_build/models``; asked without any large library."""

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbook import UserError, paths

# What a checkpoint says of the file that it was made of; written last.
ORIGIN = "origin.json"


def models_folder() -> Path:
    """Return the folder of what was fetched and unpacked; not in git, and made when it is needed."""
    return paths.BUILD / "models"


def folder_of(stem: str, sha256: str) -> Path:
    """Return the folder of a file's checkpoint, whether it is there or not."""
    return models_folder() / f"{stem}-{sha256[:16]}"


def is_whole(folder: Path) -> bool:
    """Tell whether a checkpoint was unpacked there to its end."""
    return (folder / ORIGIN).is_file()


def origin(folder: Path) -> dict[str, str]:
    """Read what a checkpoint was made of."""
    return json.loads((folder / ORIGIN).read_text("utf-8"))


@contextmanager
def workplace() -> Iterator[Path]:
    """Make a folder among the models that is gone at the end; say in one line what the disk refuses meanwhile."""
    models = models_folder()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models, prefix=".unfinished-") as folder:
            yield Path(folder)
    except OSError as error:
        why, do = f"{models} cannot be written ({error.strerror or error})", "allow it"
        if error.errno == errno.ENOSPC:
            why, do = f"no room left on the disk of {models}", "free some"
        raise UserError(f"{why}: {do}, or name another folder in KVBOOK_BUILD") from error


def check_room(n_bytes: float, folder: Path) -> None:
    """Refuse what will not fit on a folder's disk, before it starts."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        needs = f"{folder} needs {n_bytes / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free"
        raise UserError(f"{needs}: free some, or name another folder in KVBOOK_BUILD")
