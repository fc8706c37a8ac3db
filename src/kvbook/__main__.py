"""The command line: ``kvbook``, or ``python -m kvbook``; other packages add commands to it by entry point."""

import re
import sys
from collections.abc import Container
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import typer.core
from typer import Option

from kvbook import UserError, __version__, commands, garbage
from kvbook.commands import Device, Weights, flag, given, text

# Entry points of this group are functions that take the app and its group `models`.
COMMANDS = "kvbook.commands"

# A shell's own status for a program that was stopped from the keyboard.
_STOPPED = 130


class _Group(typer.core.TyperGroup):
    """Says in one line that a command was stopped; typer's own status for it, 1, is that of a bug that was found."""

    def invoke(self, ctx: typer.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("kvbook: stopped", file=sys.stderr)
            raise typer.Exit(_STOPPED) from None


# The options that only a server's check takes, and where the help lists them.
_OF_SERVER = {"served", "control", "lengths", "timeout", "answers", "remote"}
_SERVER = {"rich_help_panel": "For the URL of a server, such as http://127.0.0.1:8000/v1"}

Json = flag("--json", "Print JSON; its schema is on the page of this command.")
Report = text("Also write a page for a browser, with the plot, to this .html file.")
JUnit = text("Also write a test case per path to this .xml file.")

app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False)
models_app = typer.Typer(no_args_is_help=True, help="The models: what there is, and how the stand-ins were made.")
app.add_typer(models_app, name="models")


def _print_versions(asked: bool) -> None:
    """Print what a report of a bug needs, and stop."""
    if asked:
        typer.echo(f"kvbook {__version__}, torch {version('torch')}, transformers {version('transformers')}")
        raise typer.Exit


_Versions = flag("--version", "Print versions of kvbook and its libraries.", callback=_print_versions, is_eager=True)


@app.callback(help="Is the KV cache of a model right, and what does it change?")
def options(_version: _Versions = False) -> None:
    """Hold the options of the program as a whole."""


@app.command()
def check(
    context: typer.Context,
    model: given("A folder that save_pretrained wrote, a GGUF file, a hub id, a family's name, or a URL."),
    weights: Weights = "stand-in", device: Device = "cpu",
    dtypes: text("Such as float64,bfloat16; what does not fit is left out.", show_default="two that decide") = None,
    samples: Annotated[int, Option(min=1, help="How many texts.")] = 4,
    tokens: Annotated[int, Option(min=4, help="Tokens of a text, at most.")] = 24,
    corpus: Annotated[str, Option(help="stdlib, english, chat, or a folder of text files.")] = "stdlib",
    seed: Annotated[int, Option(min=0, help="Of the places where texts are cut, and of the bootstrap.")] = 0,
    thorough: flag("--thorough", "All dtypes; also windows, batch, padding, generate().") = False,
    cache_dtype: text("What the cache is meant to keep: float32, float16, bfloat16, fp8, int8, int4 or int2.") = None,
    memory: text("As 8GB: stream weights layer by layer, for models that do not fit.", show_default="all") = None,
    as_json: Json = False,
    plot: text("Also draw drift against roundoff into this .png file.") = None,
    report: Report = None, junit: JUnit = None,
    repro: text("Also write the smallest program of plain transformers that shows a bug to this .py file.") = None,
    prefix: text("Only check the tokenizer boundary after this text.") = None,
    rest: text("What follows the prefix.") = None,
    served: text("One of the server's models, if it has several.", "--model", **_SERVER) = None,
    control: text("Address of the same server without prefix caching.", **_SERVER) = None,
    lengths: Annotated[str, Option(help="Tokens of the prefixes.", **_SERVER)] = "15,16,17,63,64,65,255,256,257",
    timeout: Annotated[float, Option(min=1, max=3600, help="Seconds per request.", **_SERVER)] = 60,
    answers: text("Also write requests and answers to this .jsonl file.", **_SERVER) = None,
    remote: flag("--remote", "Allow another machine, if its owner does.", **_SERVER) = False,
) -> None:
    """Say whether a model's cache is exact, within rounding (exit status 0), or wrong (1); 2 if it could not be told.

    The checkpoint is run as it is, its configuration's use_cache included.
    """
    if model.startswith(("http://", "https://")):
        _refuse_others(context, "server", {*_OF_SERVER, "as_json", "report"})
        _check_server(model, served, control, lengths, timeout, answers, remote, as_json, report)
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", model):
        raise UserError(f"{model} is no model: for a server, write http://{model}")
    from kvbook.diagnosis import CheckSettings, cores

    # Before torch is imported, which takes its time: what is wrong with the question itself.
    if (prefix is None) != (rest is None):
        raise UserError("a tokenizer boundary lies between two texts: name both --prefix and --rest")
    if prefix is not None:
        _refuse_others(context, "tokenizer boundary", {"weights", "prefix", "rest"})
    _refuse_others(context, "model", {each.name for each in context.command.params} - _OF_SERVER)
    asked = CheckSettings.checked(
        model=model, weights=weights, device=device, dtypes=dtypes, n_samples=samples, n_tokens=tokens, corpus=corpus,
        seed=seed, thorough=thorough, cache_dtype=cache_dtype, memory=memory,
    )
    cores.settle()
    if prefix is not None and rest is not None:
        from kvbook.diagnosis import tokenizer_boundary

        lines, status = tokenizer_boundary.check(model, prefix, rest, weights)
        typer.echo("\n".join(lines))
        raise typer.Exit(status)
    from kvbook.diagnosis import reports

    files = reports.checked(plot=plot, report=report, junit=junit, repro=repro)
    from kvbook.diagnosis import check as checks

    found = checks.check(asked)
    typer.echo(found.model_dump_json(indent=1) if as_json else "\n".join(found.lines))
    for line in reports.write(files, found, asked):
        typer.echo(line, err=as_json)
    raise typer.Exit(found.status)


def _refuse_others(context: typer.Context, what: str, takes: Container[str]) -> None:
    """Refuse options for which this kind of check has no use."""
    given = [each for each in context.command.params if context.get_parameter_source(each.name).name == "COMMANDLINE"]
    if unused := [each.opts[0] for each in given if each.name not in takes and each.name != "model"]:
        out = "them out" if unused[1:] else "it out"
        raise UserError(f"a check of a {what} takes no {' and no '.join(unused)}: leave {out}")


def _check_server(
    address: str, served: str | None, control: str | None, lengths: str, timeout: float, answers: str | None,
    remote: bool, as_json: bool, report: str | None,
) -> NoReturn:
    """Check the prefix cache of a running server."""
    from kvbook.diagnosis import reports
    from kvbook.server import check as checks
    from kvbook.server import client

    asked, kept = checks.lengths_of(lengths), Path(answers) if answers else None
    if kept:
        commands.check_writable(kept.parent)
    servers = [client.of(one, remote, timeout, served or "") for one in (address, control) if one]
    page = report and reports.named("report", report)
    found = checks.check(*servers, lengths=asked, rows=kept)
    if page:
        title = f"kvbook check {found.address}: {found.verdict}"
        below = reports.preformatted(found.shortest.prompts if found.shortest else ())
        reports.write_page(title, found.lines, below, f"kvbook {__version__}", page)
    typer.echo(found.model_dump_json(indent=1) if as_json else "\n".join(found.lines))
    raise typer.Exit(found.status)


@app.command()
def scores(
    rollout: given("The rollout's: .parquet, or JSON lines.", metavar="A"),
    trainer: given("The trainer's, of the same tokens.", metavar="B"),
    control: Annotated[list[str] | None, Option(help="A's tokens in one pass, in A's dtype; may be repeated.")] = None,
    as_json: Json = False,
    plot: text("Also draw both tables into this .png file.") = None,
) -> None:
    """Say whether log-probabilities of trainer and rollout differ by rounding (0) or by a fault (1); 2 if unknown."""
    from kvbook.diagnosis import reports
    from kvbook.scores import outcome, tables

    files = reports.checked(plot=plot)
    if rollout in (control or ()):
        raise UserError(f"{rollout} cannot be its own control: give one pass over its tokens, in another shape")
    a, *others = tables.read(rollout), *(tables.read(path, "trainer") for path in (trainer, *(control or ())))
    joined = tables.join(a, others[0], others[1:])
    found = outcome.of(joined)
    typer.echo(found.model_dump_json(indent=1) if as_json else str(found))
    if files:
        from kvbook.scores.plot import draw

        draw(joined, f"{found.verdict}: {found.why}", files["plot"])
    raise typer.Exit(found.status)


@app.command()
def show(
    saved: given("What `kvbook check --json` printed, in a file."), report: Report = None, junit: JUnit = None
) -> None:
    """Print a check that was saved as JSON, as lines; reports of older versions are read too."""
    from kvbook.diagnosis import outcome, reports

    files = reports.checked(report=report, junit=junit)
    if not Path(saved).is_file():
        raise UserError(f"{saved} is no file: name what `kvbook check --json` printed")
    found = outcome.read(Path(saved).read_text("utf-8"), saved)
    typer.echo("\n".join(found.lines))
    reports.write(files, found)


@app.command()
def demo() -> None:
    """Check a sound model and one with a fault, both made on the spot: no file and no network is needed."""
    from kvbook.diagnosis import cores

    cores.settle()
    from kvbook.diagnosis import check as checks

    for found in checks.demo():
        typer.echo("\n".join([*found.lines, ""]))


commands.register(app, models_app)


def main() -> None:
    """Run the command line; what a user can mend is one line on standard error, and whatever fails is exit status 2."""
    garbage.look_less_often()
    for added in entry_points(group=COMMANDS):
        try:
            added.load()(app, models_app)
        # Another package may fail in any way; the commands of this one work without it.
        except Exception as error:
            print(f"kvbook: left out the commands of {added.value} ({type(error).__name__}: {error})", file=sys.stderr)
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"kvbook: {line}", file=sys.stderr)
    # Python's own status for it, 1, is that of a bug that was found.
    except Exception as error:
        # Such as a disk that is full.
        if isinstance(error, OSError) and error.errno:
            print(f"kvbook: {error}", file=sys.stderr)
        else:
            sys.excepthook(*sys.exc_info())
    sys.exit(2)


if __name__ == "__main__":
    main()
