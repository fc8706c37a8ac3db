"""The engines' commands: ``python -m kvreport.engines make [NAME ...]`` and ``... serve NAME``."""

import argparse
import sys
import time

from kvbook.errors import UserError
from kvreport.engines import environments, serving
from kvreport.engines.listed import ENGINES, FP32


def main() -> None:
    """Make environments, or serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m kvreport.engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="make environments, of all engines unless some are named")
    made.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENGINES))
    served = commands.add_parser("serve", help="serve the book's trained model on 127.0.0.1 until interrupted")
    served.add_argument("name", metavar="NAME", help=", ".join(ENGINES))
    served.add_argument("--port", type=int, default=8000)
    served.add_argument("--dtype", default=FP32)
    served.add_argument("--mode", default="", help="speculation, or quantized cache, where the engine has it")
    asked = parser.parse_args()
    if asked.command == "make":
        names = [environments.engine_of(name) and name for name in asked.names] or list(ENGINES)
        failed = environments.make_all(names)
        if len(failed) == len(names):
            raise UserError("no environment could be made: see the lines above")
        return
    with serving.serving(asked.name, asked.dtype, asked.mode, asked.port) as server:
        print(f"kvbook: {server.address}, {server.model}; stop with Ctrl-C", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"kvbook: {error}")
    except KeyboardInterrupt:
        pass
