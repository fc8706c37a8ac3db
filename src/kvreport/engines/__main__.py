"""The engines' commands: ``python -m kvreport.engines make [NAME ...]`` and ``... serve NAME``."""

import contextlib
import sys
import time
from typing import Annotated

import typer
from typer import Argument, Option

from kvbook import UserError
from kvreport.engines import serving
from kvreport.engines.listed import ENGINES, FP32

app = typer.Typer(add_completion=False, help=__doc__)
_NAME = Argument(metavar="NAME", help=", ".join(ENGINES))


@app.command()
def make(names: Annotated[list[str] | None, _NAME] = None) -> None:
    """Make environments, of all engines unless some are named."""
    names = [serving.engine_of(name) and name for name in names or ENGINES]
    if len(serving.make_all(names)) == len(names):
        raise UserError("no environment could be made: see the lines above")


@app.command()
def serve(
    name: Annotated[str, _NAME], port: int = 8000, dtype: str = FP32,
    mode: Annotated[str, Option(help="speculation, or quantized cache, where the engine has it.")] = "",
) -> None:
    """Serve the book's trained model on 127.0.0.1 until interrupted."""
    with contextlib.suppress(KeyboardInterrupt), serving.serving(name, dtype, mode, port) as server:
        print(f"kvbook: {server.address}, {server.model}; stop with Ctrl-C", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    try:
        app(prog_name="python -m kvreport.engines")
    except UserError as error:
        sys.exit(f"kvbook: {error}")
