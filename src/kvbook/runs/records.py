"""Runs on disk: rows as they are made, provenance beside them, nothing half-written under the final name.

A run lies in ``_build/runs/<experiment>/<hash>/`` as ``rows.csv`` and ``run.json``.  The hash is of what made it
(settings, measuring source, models, text, machine), so the same run is found again instead of done again, and two
different ones never share a folder.  While it runs, the folder is called ``<hash>.partial``: a killed run goes on after
its last whole unit.  One process at a time works in it; another one that wants the same run waits, and then reads it.
"""

import contextlib
import csv
import errno
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from kvbook import UserError, fingerprint, paths, progress, refusing

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

# A text may be long, and Python's reader of CSV refuses fields of more than 131,072 characters by itself.
csv.field_size_limit(2**31 - 1)

# Sixteen hexadecimal digits: short enough for a folder, long enough never to meet another by chance.
_HASH_LENGTH = 16
# Of these, as many name the folder of a recorded run, beside device and model.
SHORT_HASH = 8


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    about : dict
        Content of ``run.json``: ``experiment``, ``hash``, ``settings``, ``models``, ``corpus``, ``machine``,
        ``commit``, ``started``, ``finished``, ``rows``, ``rows_sha256``.
    folder : Path
        Where ``rows.csv`` and ``run.json`` lie.
    made : bool
        Whether this call made or finished it; otherwise it was found.
    """

    about: dict[str, Any]
    folder: Path
    made: bool = False

    @cached_property
    def rows(self) -> "pd.DataFrame":
        """Tidy rows, one a measurement; read when they are first asked for, so that a long run needs no more memory."""
        import pandas as pd

        rows = pd.read_csv(rows_file(self.folder), keep_default_na=False, na_values=[""])
        # A token may read "nan"; among numbers it is what a model that overflows has computed.
        # Before pandas 3 a column of text has the dtype object.
        for name in rows.select_dtypes(exclude=["number", "bool"]):
            if (overflowed := rows[name] == "nan").any():
                with contextlib.suppress(ValueError):
                    rows[name] = pd.to_numeric(rows[name].mask(overflowed))
        return rows

    @property
    def hash(self) -> str:
        """The run's name."""
        return self.about["hash"]


class Writer:
    """Appends whole units of rows to a partial run.

    A unit is what is redone when a run is killed: one sample, one variant.  After each unit the journal notes how long
    ``rows.csv`` is, so bytes past the last note (a half-written unit) are cut off when the run goes on.

    Parameters
    ----------
    folder : Path
        The partial run's folder; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._journal = folder / "rows.csv", folder / "journal.jsonl"
        self.done: set[str] = set()
        self._columns: list[str] | None = None
        length = whole = 0
        if self._journal.is_file():
            for line in self._journal.read_bytes().splitlines(keepends=True):
                try:
                    note = json.loads(line)
                    self.done.add(note["unit"])
                    length, self._columns = note["length"], note["columns"]
                except (ValueError, KeyError, TypeError):
                    break  # a half-written last note
                whole += len(line)
            # What follows must not be written after half a note.
            os.truncate(self._journal, whole)
        if not self._rows.is_file() or self._rows.stat().st_size < length:
            # The notes say more than the rows hold: the folder was tampered with or the disk lost data.
            self._journal.unlink(missing_ok=True)
            self.done, self._columns, length = set(), None, 0
        if self._rows.is_file():
            os.truncate(self._rows, length)

    def pending(self, units: Mapping[str, T], label: str) -> Iterator[tuple[str, T]]:
        """Go through units by name, those that are not done, saying how far."""
        for unit, thing in progress.track(units.items(), len(units), label):
            if unit not in self.done:
                yield unit, thing

    def keep(self, unit: str, about: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Measure in inference mode what is to be iterated over, and write it as one unit, `about` in each row."""
        import torch

        with torch.inference_mode():
            self.append(unit, [{**about, **row} for row in rows])

    def append(self, unit: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of one finished unit.

        Parameters
        ----------
        unit : str
            Its name, unique within the run.
        rows : iterable of mapping
            All with the same keys as the first row of the run.

        Raises
        ------
        UserError
            When the disk is full or does not let itself be written; the units before are kept.
        """
        rows = list(rows)
        with writable(self._rows.parent):
            with self._rows.open("a", newline="", encoding="utf-8") as file:
                if self._columns is None and rows:
                    self._columns = list(rows[0])
                    csv.writer(file).writerow(self._columns)
                csv.DictWriter(file, self._columns or ()).writerows(rows)
                file.flush()
                length = file.tell()
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"unit": unit, "length": length, "columns": self._columns}) + "\n")


_REMEDIES = {
    errno.ENOSPC: "free some room",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "mount it for writing, or name another folder in KVBOOK_BUILD",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "allow it, or name another folder in KVBOOK_BUILD"),
}


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raise a UserError that says what keeps a folder from being written, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        todo = f"{_REMEDIES[error.errno]} and run again: what was finished is kept"
        raise UserError(f"cannot write results to {folder}: {error.strerror}; {todo}") from error


@contextlib.contextmanager
def alone(lock: Path, held_by: str) -> Iterator[None]:
    """Hold a lock while this is open, after waiting for whoever holds it; a killed holder holds it no longer.

    Parameters
    ----------
    lock : Path
        A file, made here with its folder.
    held_by : str
        What another holder does, for the line that is said when there is one.
    """
    held = FileLock(lock)
    with writable(lock.parent):
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            held.acquire(blocking=False)
        except Timeout:
            progress.note(f"waiting for another process that {held_by}")
            held.acquire()
    try:
        yield
    finally:
        held.release()


def now() -> str:
    """Write the time of day down as a run does: in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def rows_file(folder: Path) -> Path:
    """Name the file with a run's rows; a recorded run keeps them compressed."""
    packed = folder / "rows.csv.gz"
    return packed if packed.is_file() else folder / "rows.csv"


def open_rows(folder: Path) -> BinaryIO:
    """Open a run's rows as they were written, compressed or not."""
    file = rows_file(folder)
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def rows_digest(folder: Path) -> str:
    """Hash a run's rows as they were written, compressed or not."""
    with open_rows(folder) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(folder: Path) -> Run:
    """Read a finished run.

    Raises
    ------
    UserError
        When a file is missing or does not parse, or the rows are not those that the run wrote.
    """
    kinds = OSError, EOFError, zlib.error, ValueError, KeyError, TypeError
    with refusing(lambda error: f"{folder}: not a readable run ({error}): delete the folder and run again", *kinds):
        about = json.loads((folder / "run.json").read_text("utf-8"))
        if about["rows_sha256"] != rows_digest(folder):
            raise UserError(f"{folder}: rows.csv was changed after the run: delete the folder and run again")
    return Run(about, folder)


def run(
    experiment: str, made_of: Mapping[str, Any], measure: Callable[[Writer], None],
    note: Mapping[str, Any] | None = None,
) -> Run:
    """Read the run that these inputs make, or make it, or finish it.

    Parameters
    ----------
    experiment : str
        Its name, which names the folder.
    made_of : mapping
        Everything that the rows depend on; it is hashed, and written to ``run.json``.
    measure : callable
        Appends every unit that ``writer.done`` does not hold yet.
    note : mapping, optional
        Also written to ``run.json``, but not part of the hash (the commit, for one).

    Raises
    ------
    UserError
        When a finished folder of this name cannot be read, or the results folder cannot be written.
    """
    # As it will be read again: whatever the measurement does to these values, their hash stays theirs.
    made_of = json.loads(json.dumps(made_of, default=str))
    # This machine's own run; a recorded one is evidence and never stands in for it.
    final = paths.RUNS / experiment / hash_of(experiment, made_of)
    if not final.is_dir():
        with alone(final.with_name(f".{final.name}.lock"), f"makes {experiment}/{final.name}"):
            # Whoever was waited for may have made it.
            if not final.is_dir():
                _make(final, {"experiment": experiment, "hash": final.name, **made_of, **(note or {})}, measure)
                return replace(load(final), made=True)
    return load(final)


def hash_of(experiment: str, made_of: Mapping[str, Any]) -> str:
    """Name the run that these inputs make.

    Parameters
    ----------
    experiment, made_of
        As for `run`.
    """
    return fingerprint.of_values({"experiment": experiment, **made_of})[:_HASH_LENGTH]


def _make(final: Path, about: dict[str, Any], measure: Callable[[Writer], None]) -> None:
    partial = final.with_name(final.name + ".partial")
    with writable(partial):
        writer = Writer(partial)
        started_file = partial / "started"
        if not (started_file.is_file() and started_file.read_text()):
            started_file.write_text(now())
    measure(writer)
    rows = partial / "rows.csv"
    with writable(partial):
        with rows.open("r", newline="", encoding="utf-8") as file:
            count = max(0, sum(1 for _ in csv.reader(file)) - 1)
        times = {"started": started_file.read_text(), "finished": now()}
        about = about | times | {"rows": count, "rows_sha256": fingerprint.of_file(rows)}
        (partial / "run.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        started_file.unlink()
        (partial / "journal.jsonl").unlink()
        partial.replace(final)
