"""Engines: their environments are made from the package index, one folder each beside the book's own.

Their servers are started on 127.0.0.1 with the book's trained model, and stopped.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbook import UserError, paths, progress
from kvbook.models import loading, packages
from kvbook.server import client
from kvreport.engines.gguf_file import write_gguf
from kvreport.engines.listed import ENGINES, FP32, Engine

MODEL = "smollm2"
# A busy machine imports an engine for minutes.
_PATIENCE = 900
_PAUSE = 0.5
FOLDER = paths.BUILD / "engines"
_ERROR_LINES = 3


def engine_of(name: str) -> Engine:
    """Look an engine up, or refuse its name."""
    if name not in ENGINES:
        raise UserError(f"there is no engine {name!r}: choose from {', '.join(ENGINES)}")
    return ENGINES[name]


def python_of(name: str) -> Path:
    """Name the Python of an engine's environment, whether it is there or not."""
    return FOLDER / name / "bin" / "python"


def is_here(name: str) -> bool:
    """Tell whether an engine's environment was made whole."""
    return python_of(name).exists()


def make_all(names: Sequence[str]) -> list[str]:
    """Make the environments that are missing, name those that cannot be made, and return their names."""
    failed = []
    for name in names:
        try:
            make(name)
        except UserError as error:
            failed.append(name)
            progress.note(str(error))
    return failed


def make(name: str) -> None:
    """Make an engine's environment unless it is there."""
    engine, final = engine_of(name), FOLDER / name
    if is_here(name):
        print(f"kvbook: {engine.title} is in {final}")
        return
    # A folder that was made whole is kept; the pip of a half-made one is not to be trusted.
    shutil.rmtree(final, ignore_errors=True)
    began = time.monotonic()
    try:
        _run(engine, sys.executable, "-m", "venv", str(final))
        _run(engine, str(python_of(name)), "-m", "pip", "install", "--quiet", *engine.packages)
        if engine.unwanted:
            _run(engine, str(python_of(name)), "-m", "pip", "uninstall", "--quiet", "--yes", *engine.unwanted)
    except BaseException:
        shutil.rmtree(final, ignore_errors=True)
        raise
    if engine.beside:
        (packages,) = (final / "lib").glob("python*/site-packages")
        (packages / "book.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    size = sum(file.stat().st_size for file in final.rglob("*") if file.is_file()) / 1e9
    print(f"kvbook: {engine.title}: made in {time.monotonic() - began:.0f} s, {size:.1f} GB in {final}", flush=True)


def _run(engine: Engine, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split("\n")[-_ERROR_LINES:]).strip()
        raise UserError(f"{engine.title} is left out, for it cannot be installed: {said or 'pip says nothing'}")


def variables_of(engine: Engine) -> dict[str, str]:
    """Return the environment of an engine's process: one thread, no network, and no packages but its own."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(FOLDER), "PYTHONUNBUFFERED": "1"}
    return own | fixed | engine.variables


def weights_for(name: str, dtype: str) -> Path:
    """Return what an engine reads: the folder of transformers, or the same weights in GGUF, written once."""
    folder = packages.folder(MODEL)
    engine = engine_of(name)
    if not engine.gguf:
        return _with_architecture(folder) if engine.beside else folder
    file = FOLDER / "weights" / f"{engine.gguf[dtype]}.gguf"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        model = loading.load(MODEL, weights="package", dtype=engine.gguf[dtype]).model
        write_gguf(model, file.with_suffix(".partial"), folder / "tokenizer.json").replace(file)
    return file


def _with_architecture(folder: Path) -> Path:
    """Link a model's folder, with the class of the model in its configuration, which `transformers serve` reads."""
    named = FOLDER / "weights" / "transformers"
    named.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if not (named / file.name).exists():
            (named / file.name).symlink_to(file)
    content = json.loads((folder / "config.json").read_text("utf-8"))
    (named / "config.json").unlink()
    (named / "config.json").write_text(json.dumps(content | {"architectures": ["LlamaForCausalLM"]}), "utf-8")
    return named


def command_of(name: str, **asked: Any) -> list[str]:
    """Write the command that starts an engine's server; what is asked of it is as for `Engine`."""
    engine = engine_of(name)
    told = asked | {"asked": json.dumps(asked, default=str), "scripts": Path(__file__).parent}
    words = [word.format(**told) for word in engine.command.split()]
    return [str(python_of(name)), *words, *engine.modes.get(asked["mode"], "").split()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@contextlib.contextmanager
def serving(name: str, dtype: str = FP32, mode: str = "", port: int = 0) -> Iterator[client.Client]:
    """Start an engine's server, wait until it lists its model, and stop it at the end."""
    engine = engine_of(name)
    if not is_here(name):
        raise UserError(f"{engine.title} is not here: run `make engines ENGINE={name}`")
    if dtype not in engine.dtypes or mode not in ("", *engine.modes):
        has = f"dtypes {', '.join(engine.dtypes)} and modes {', '.join(engine.modes) or 'none'}"
        raise UserError(f"{engine.title} is not run in {dtype} {mode}: it has {has}".replace("  ", " "))
    model, port = weights_for(name, dtype), port or _free_port()
    command = command_of(name, model=model, port=port, dtype=dtype, mode=mode)
    log = FOLDER / f"{name}.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=variables_of(engine), start_new_session=True,
        )
    try:
        asked = client.of(f"http://127.0.0.1:{port}/v1", timeout=600)
        # One that lists only what it has from a hub is asked for the folder.
        names = _ready(process, asked, engine.title, log) or [str(model)]
        yield client.Client(asked.address, asked.timeout, names[0])
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen, asked: client.Client, title: str, log: Path) -> list[str]:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            said = log.read_text("utf-8", "replace").strip()
            # The first error at a line's beginning, or after a logger's, is the cause; else the last line has to do.
            errors = re.findall(r"^(?:.*\] )?(\w*Error: .+)", said, re.MULTILINE)
            cause = (errors or said.splitlines()[-1:] or ["it says nothing"])[0]
            raise UserError(f"{title} stopped with status {process.returncode}: {cause[:200]}; see {log}")
        with contextlib.suppress(client.Unanswered, client.Refused):
            return asked.models()
        time.sleep(_PAUSE)
    raise UserError(f"{title} does not answer after {_PATIENCE} s: see {log}")
