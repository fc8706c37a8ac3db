"""Runs on disk: rows as they are made, provenance beside them, nothing half-written under the final name.

A run lies in ``_build/runs/<experiment>/<hash>/`` as ``rows.csv`` and ``run.json``.  The hash is of what made it (settings,
measuring source, models, text, machine), so the same run is found again instead of done again, and two different ones
never share a folder.  While it runs, the folder is called ``<hash>.partial``: a killed run goes on after its last whole
unit.
"""

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from kvbook import fingerprint, paths
from kvbook.errors import UserError

# Sixteen hexadecimal digits: short enough for a folder, long enough never to meet another by chance.
_HASH_LENGTH = 16


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    rows : DataFrame
        Tidy rows, one a measurement.
    about : dict
        Content of ``run.json``: ``experiment``, ``hash``, ``settings``, ``models``, ``corpus``, ``machine``, ``commit``,
        ``started``, ``finished``, ``rows``, ``rows_sha256``.
    folder : Path
        Where both lie.
    """

    rows: pd.DataFrame
    about: dict[str, Any]
    folder: Path

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
        length = 0
        if self._journal.is_file():
            for line in self._journal.read_text("utf-8").splitlines():
                try:
                    note = json.loads(line)
                except ValueError:
                    break  # a half-written last note
                self.done.add(note["unit"])
                length, self._columns = note["length"], note["columns"]
        if self._rows.is_file():
            if self._rows.stat().st_size < length:
                # The notes say more than the rows hold: the folder was tampered with or the disk lost data.
                self._journal.unlink()
                self.done, self._columns, length = set(), None, 0
            os.truncate(self._rows, length)
        else:
            self.done, self._columns = set(), None
            self._journal.unlink(missing_ok=True)

    def append(self, unit: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the rows of one finished unit.

        Parameters
        ----------
        unit : str
            Its name, unique within the run.
        rows : iterable of mapping
            All with the same keys as the first row of the run.
        """
        rows = list(rows)
        with self._rows.open("a", newline="", encoding="utf-8") as file:
            if self._columns is None:
                self._columns = list(rows[0])
                csv.writer(file).writerow(self._columns)
            writer = csv.DictWriter(file, self._columns)
            writer.writerows(rows)
            file.flush()
            length = file.tell()
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"unit": unit, "length": length, "columns": self._columns}) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def load(folder: Path) -> Run:
    """Read a finished run.

    Raises
    ------
    UserError
        When a file is missing or does not parse, or the rows are not those that the run wrote.
    """
    try:
        about = json.loads((folder / "run.json").read_text("utf-8"))
        if about["rows_sha256"] != fingerprint.of_file(folder / "rows.csv"):
            raise UserError(f"{folder}: rows.csv was changed after the run: delete the folder and run again")
        rows = pd.read_csv(folder / "rows.csv", keep_default_na=False, na_values=[""])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: not a readable run ({error}): delete the folder and run again") from error
    return Run(rows, about, folder)


def run(
    experiment: str,
    made_of: Mapping[str, Any],
    measure: Callable[[Writer], None],
    note: Mapping[str, Any] | None = None,
) -> Run:
    """Give the run that these inputs make: read it if it is there, else make it or finish it.

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
    name = fingerprint.of_values({"experiment": experiment, **made_of})[:_HASH_LENGTH]
    final = paths.RUNS / experiment / name
    if final.is_dir():
        return load(final)
    partial = final.with_name(name + ".partial")
    try:
        writer = Writer(partial)
    except OSError as error:
        raise UserError(f"cannot write results to {partial.parent}: {error.strerror}; free or allow it") from error
    started_file = partial / "started"
    if not started_file.is_file():
        started_file.write_text(_now())
    measure(writer)
    rows = partial / "rows.csv"
    with rows.open("rb") as file:
        count = sum(1 for _ in csv.reader(line.decode() for line in file)) - 1
    about = {
        "experiment": experiment,
        "hash": name,
        **made_of,
        **(note or {}),
        "started": started_file.read_text(),
        "finished": _now(),
        "rows": count,
        "rows_sha256": fingerprint.of_file(rows),
    }
    (partial / "run.json").write_text(json.dumps(about, indent=2, default=str) + "\n", encoding="utf-8")
    started_file.unlink()
    (partial / "journal.jsonl").unlink()
    try:
        partial.replace(final)
    except OSError:
        # Somebody else finished the same run first; theirs has the same inputs.
        if not final.is_dir():
            raise
        shutil.rmtree(partial)
    return load(final)
