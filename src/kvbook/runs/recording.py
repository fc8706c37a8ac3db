"""Recorded runs: those of any machine that are worth keeping, in git, each in a folder that says what and where.

``data/runs/<experiment>/<device>__<model>__<hash>/`` holds the rows as the run left them, compressed as
``rows.csv.gz``, and ``run.json`` with ``recorded`` added: when it was recorded, and the digest of all the rest.
Nothing there is ever edited: what was edited is refused, for the rows have a digest, the inputs have the run's own
hash, and everything together has another.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, Field, StringConstraints, ValidationError

from kvbook import UserError, fingerprint, paths, refusing
from kvbook.diagnosis import tolerance
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.runs import privacy, records
from kvbook.settings import Strict, faults_of

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
Words = Annotated[str, Field(min_length=1)]

# What a run.json says of the run itself; everything else made the rows, and is in the hash.
_ENVELOPE = {"experiment", "hash", "commit", "started", "finished", "rows", "rows_sha256", "recorded"}
_FILES = ("rows.csv.gz", "run.json")
_LONGEST = 48
# The experiment whose rows say how much a sound cache may drift.
_OF_ROUNDING = "layer_drift"


class Machine(BaseModel, extra="allow"):
    """Where the run was made, as `kvbook.runs.machine.describe` says it."""

    device: Words
    device_name: Words
    processor: Words
    threads: Annotated[int, Field(ge=1)]
    python: Words
    torch: Words
    transformers: Words
    kvbook: Words


class Model(BaseModel, extra="allow"):
    """A model of the run, as `kvbook.models.loading.identify` says it."""

    name: Words
    weights: Words


class Recorded(Strict):
    """What recording adds.

    Attributes
    ----------
    at : datetime
        When it was recorded.
    about_sha256 : str
        Digest of everything else in ``run.json``.
    """

    at: AwareDatetime
    about_sha256: Digest


class About(BaseModel, extra="allow"):
    """``run.json`` of a finished run; what is not named here is a further input of its rows."""

    experiment: Name
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    settings: dict[str, Any]
    source: Digest
    machine: Machine | None = None
    models: list[Model] = []
    corpus: dict[str, Any] | None = None
    commit: Words
    started: AwareDatetime
    finished: AwareDatetime
    rows: Annotated[int, Field(ge=1)]
    rows_sha256: Digest
    recorded: Recorded | None = None


def folder_of(about: About) -> Path:
    """Name the folder of a recorded run."""
    device = _slug([about.machine.device_name]) if about.machine else "any"
    model = _slug(dict.fromkeys(model.name for model in about.models)) or "none"
    return paths.RECORDED_RUNS / about.experiment / f"{device}__{model}__{about.hash[: records.SHORT_HASH]}"


def _slug(names: Iterable[str]) -> str:
    return "+".join(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names)[:_LONGEST].strip("-+")


def _read(folder: Path) -> tuple[dict[str, Any], About]:
    # The last is a kind of the one before.
    with (
        refusing(lambda error: f"{folder} holds no run: {error.strerror} (run.json)", OSError),
        refusing(lambda error: f"{folder}/run.json cannot be read: {error}", ValueError),
        refusing(lambda error: f"{folder}/run.json is not one of a finished run ({faults_of(error)})", ValidationError),
    ):
        content = json.loads((folder / "run.json").read_text("utf-8"))
        return content, About.model_validate(content)


def checked(folder: Path) -> About:
    """Read a run and refuse one that is not whole, not as it was made, or not fit to be published."""
    content, about = _read(folder)
    rows = records.rows_file(folder)
    if not rows.is_file():
        raise UserError(f"{folder} holds no rows.csv")
    unreadable = refusing(lambda error: f"{rows} cannot be read: {error}", OSError, EOFError, zlib.error)
    with unreadable, records.open_rows(folder) as file:
        written = file.read()
    if hashlib.sha256(written).hexdigest() != about.rows_sha256:
        raise UserError(f"{folder}/rows.csv was edited: its digest is not that of the run")
    made_of = {key: value for key, value in content.items() if key not in _ENVELOPE}
    if records.hash_of(about.experiment, made_of) != about.hash:
        raise UserError(f"{folder}/run.json was edited: what it says made the rows has another hash than the run")
    if about.recorded and _digest(content) != about.recorded.about_sha256:
        raise UserError(f"{folder}/run.json was edited after it was recorded")
    text = io.StringIO(written.decode(), newline="")
    # Only in quotation marks can a field hold commas and ends of lines.
    widths = [len(line) for line in csv.reader(text)] if b'"' in written else [line.count(",") + 1 for line in text]
    for row, width in enumerate(widths):
        if width != widths[0]:
            raise UserError(f"{folder}/rows.csv: row {row} has {width} fields, the header has {widths[0]}")
    if len(widths) - 1 != about.rows:
        raise UserError(f"{folder}/rows.csv has {len(widths) - 1} rows, and run.json says {about.rows}")
    _refuse_private(folder, content, text.getvalue())
    return about


def _digest(content: dict[str, Any]) -> str:
    return fingerprint.of_values({key: value for key, value in content.items() if key != "recorded"})


def _refuse_private(folder: Path, content: dict[str, Any], rows: str) -> None:
    said = list(_strings(content))
    # Looked for in each only where there is one in all of them, for mostly there is none.
    some = said if privacy.secrets_in("\n".join(value for _, value in said)) else []
    found = [f"{kind} in {name}" for name, value in some for kind in privacy.secrets_in(value)]
    found += [f"{kind} in {name}" for name, value in said for kind in privacy.owner_in(value)]
    # Texts that a model read or wrote may hold a path; a secret they must not hold either.
    found += [f"{kind} in rows.csv" for kind in privacy.secrets_in(rows)]
    if found:
        remedy = "run again without it (a model or corpus by its name or a relative path)"
        raise UserError(f"{folder} would publish {'; '.join(dict.fromkeys(found))}: {remedy}")


def _strings(value: Any, name: str = "run.json") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield name, str(key)
            yield from _strings(inner, f"{name}: {key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, name)
    elif isinstance(value, str):
        yield name, value


def find(run: str) -> Path:
    """Find a finished run by its folder, or by the beginning of its hash."""
    if Path(run).is_dir():
        return Path(run).resolve()
    files = paths.RUNS.glob(f"*/{run}*/run.json") if re.fullmatch(r"[0-9a-f]{4,16}", run) else ()
    found = sorted(file.parent for file in files if file.parent.suffix != ".partial")
    if not found:
        raise UserError(f"no finished run {run!r}: name a folder in {paths.RUNS}, or the first digits of a run's hash")
    if len(found) > 1:
        names = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in found)
        raise UserError(f"{run} begins the hashes of several runs ({names}): name a folder")
    return found[0]


def recorded() -> list[Path]:
    """List the folders of all recorded runs, and whatever else lies where they lie."""
    return sorted(paths.RECORDED_RUNS.glob("*/*")) if paths.RECORDED_RUNS.is_dir() else []


def record(folder: Path) -> Path:
    """Move a finished run among the recorded ones."""
    if folder.name.endswith(".partial"):
        raise UserError(f"{folder} is not finished: run the experiment again, and it goes on from there")
    about = checked(folder)
    if about.recorded:
        raise UserError(f"{folder} is a recorded run already")
    if about.commit.endswith("+"):
        raise UserError(f"{folder} was made with uncommitted changes and cannot be made again: commit and run again")
    final = folder_of(about)
    for other in recorded():
        if other.name.rpartition("__")[2] == about.hash[: records.SHORT_HASH]:
            raise UserError(f"this run is recorded already: {other}")
    content, _ = _read(folder)
    content["recorded"] = {"at": records.now(), "about_sha256": _digest(content)}
    staged = final.with_name(f".{final.name}.partial")
    with records.writable(final.parent):
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        # Without a date or a name in it: equal rows are equal bytes.
        (staged / "rows.csv.gz").write_bytes(gzip.compress((folder / "rows.csv").read_bytes(), mtime=0))
        (staged / "run.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in _FILES:
            (staged / name).chmod(0o444)
        checked(staged)
        staged.rename(final)
        # Last: until here the run lies where it lay.
        shutil.rmtree(folder)
    return final


def verify() -> tuple[int, list[str]]:
    """Check every recorded run."""
    faults = []
    by_hash: dict[str, Path] = {}
    folders = recorded()
    for folder in folders:
        try:
            about = checked(folder)
        except UserError as error:
            faults.append(str(error))
            continue
        if about.recorded is None:
            faults.append(f"{folder} was not recorded by `python -m kvbook record`: record it")
        if folder != folder_of(about):
            faults.append(f"{folder} should be {folder_of(about)}")
        if extra := sorted(path.name for path in folder.iterdir() if path.name not in _FILES):
            faults.append(f"{folder} holds what does not belong there: {', '.join(extra)}")
        if (twin := by_hash.setdefault(about.hash, folder)) != folder:
            faults.append(f"{folder} is the run of {twin} once more")
    return len(folders), faults


# What recorded rows say of rounding, as the one small file that tests take tolerances from.


def rounding_of(run: records.Run) -> dict[str, Any]:
    """Take the largest relative drift over texts, by dtype and layer, in roundoffs."""
    if run.about["experiment"] != _OF_ROUNDING:
        raise UserError(f"{run.folder.name} is a run of {run.about['experiment']}: name one of {_OF_ROUNDING}")
    hidden = run.rows[run.rows["place"] == "hidden"]
    largest = hidden.groupby(["dtype", "layer"])["relative_rms"].max()
    return {
        "made_by": f"kvbook records reference {run.folder.name}",
        "run": {"experiment": _OF_ROUNDING, "folder": run.folder.name, "hash": run.about["hash"],
                "rows_sha256": run.about["rows_sha256"]},
        "model": run.about["models"][0]["name"], "processor": run.about["machine"]["processor"],
        "torch": run.about["machine"]["torch"],
        "texts": int(hidden.groupby(["model", "dtype"])["sample"].nunique().max()),
        "tokens": int(hidden["n_tokens"].max()),
        "roundoffs": {
            dtype: [float(f"{drift / UNIT_ROUNDOFF[dtype]:.4g}") for drift in largest[dtype].sort_index()]
            for dtype in sorted(hidden["dtype"].unique())
        },
    }


def write_rounding(run: records.Run) -> Path:
    """Write the file that the library ships."""
    tolerance.FILE.write_text(json.dumps(rounding_of(run), indent=1) + "\n", "utf-8")
    return tolerance.FILE
