"""What the report adds to the command line ``kvbook``: running its experiments and sweeps, citing, its bench."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kvbook import UserError, refusing
from kvbook.commands import Device, text


def register(app: typer.Typer, models: typer.Typer) -> None:
    """Add the report's commands; the library finds this function by its entry point."""
    models.command("train-scratch")(train_scratch)
    for command in (build, run, sweep, evidence, cite, bench, selftest):
        app.command()(command)


def build(
    chapters: Annotated[list[str] | None, Argument(help="Execute these alone, such as 06_layer_drift.")] = None,
    fetch: Annotated[bool, Option(help="Fetch the trained model first, about 100 MB, unless it is here.")] = False,
) -> None:
    """Execute the chapters that are not up to date and render the site into _build/html; what `make book` does.

    With chapters named, execute these alone, into _build/executed, and render nothing.

    The environment's PROFILE names the parameter set, JOBS how many chapters at a time.
    """
    from kvbook import paths
    from kvbook.models import packages
    from kvbook.runs import records
    from kvreport.running import execution, planning
    from kvreport.site import preview
    from kvreport.site.build import build_html, check_name

    if not chapters:
        # Before minutes are spent on what would be rendered.
        check_name()
    with records.writable(paths.BUILD):
        paths.BUILD.mkdir(parents=True, exist_ok=True)
    if fetch:
        try:
            packages.fetch()
        except UserError as error:
            typer.echo(f"kvbook: {error}\nkvbook: going on without the trained model", err=True)
    planned = planning.plan()
    if unknown := set(chapters or ()) - {chapter.stem for chapter in planned}:
        raise UserError(f"no chapter {', '.join(sorted(unknown))}: choose from {', '.join(of.stem for of in planned)}")
    try:
        asked = [chapter for chapter in planned if not chapters or chapter.stem in chapters]
        with preview.of(asked):
            executed = execution.bring_up_to_date(asked)
        if chapters:
            typer.echo(f"{len(executed)} of {len(asked)} had to be executed; copies with outputs: {paths.EXECUTED}")
        else:
            build_html()
    except execution.ChapterFailed as error:
        if chapters:
            raise
        raise UserError(f"{error}; the site was not rendered; _build/html is from an earlier build") from None
    except KeyboardInterrupt:
        raise UserError("interrupted; what was finished is kept, and the next build goes on from there") from None


def train_scratch(
    size: Annotated[str, Option(help="small, or thread, as large as the forum thread's.")] = "small",
    corpus: Annotated[str, Option(help="stdlib, a folder of text files, or one text file.")] = "stdlib",
    device: Device = "cpu",
    destination: text("Folder of the finished checkpoint.") = None,
) -> None:
    """Train the model of the chapter "from scratch"; a killed run goes on from its last checkpoint."""
    from kvbook.models import placement
    from kvreport.chapters.from_scratch.gpt import checkpoints

    if size not in checkpoints.RECIPES:
        raise UserError(f"no size {size!r}: choose one of {', '.join(checkpoints.RECIPES)}")
    placement.device_of(device)
    if destination or corpus == checkpoints.STDLIB:
        folder = Path(destination) if destination else checkpoints.shipped(size)
        folder = checkpoints.train(checkpoints.RECIPES[size], folder, corpus, device)
    elif size == checkpoints.THREAD:
        folder = checkpoints.folder_of(size, corpus, device)
    else:
        raise UserError("the checkpoint that ships is trained on the stdlib: name a --destination for another corpus")
    typer.echo(f"{folder}: {(folder / 'training.json').read_text()}")


def _assignments(values: list[str] | None) -> dict[str, str]:
    pairs = [value.partition("=") for value in values or ()]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UserError(f"{wrong[0]!r} is not a setting: write name=value, such as n_samples=20")
    if twice := [name for name, *_ in pairs if sum(name == other for other, *_ in pairs) > 1]:
        raise UserError(f"{twice[0]} is given twice: write it once; commas join a list")
    return {name: value for name, _, value in pairs}


def run(
    experiment: Annotated[str, Argument(help="Its name; a wrong one lists them all.")],
    settings: Annotated[list[str] | None, Argument(help="name=value, as model=gpt2; a wrong name lists all.")] = None,
) -> None:
    """Run one experiment, without a notebook, and print where its rows lie."""
    from kvreport.running import catalogue

    finished = catalogue.run(experiment, _assignments(settings))
    if finished is None:
        raise UserError(f"{experiment} has nothing to measure with these settings: see its documentation")
    typer.echo(f"{len(finished.rows)} rows in {finished.folder}")


def sweep(
    file: Annotated[str, Argument(help="YAML with experiment, model, dtype, length, device and settings.")],
    scheduler: text("Address of a Dask scheduler that is there.") = None,
    slurm: text("YAML with the options of jobs on Slurm.") = None,
    workers: Annotated[int | None, Option(min=1, help="Processes on this machine; one a GPU or core.")] = None,
    threads: Annotated[int, Option(min=1, help="CPU threads of each; a run's hash depends on it.")] = 1,
    gpus: Annotated[int, Option(min=1, help="GPUs of each, for models that one does not hold.")] = 1,
    dry_run: Annotated[bool, Option(help="List the cells, and the job script with --slurm; run nothing.")] = False,
) -> None:
    """Run an experiment over models, dtypes, lengths and devices; started again, it goes on where it was."""
    from kvreport.running import sweeps

    cells = sweeps.read(Path(file))
    if scheduler and slurm:
        raise UserError("a sweep runs in one place: name --scheduler or --slurm, not both")
    if dry_run:
        typer.echo("\n".join([f"cells: {len(cells)}", *(f"  {cell.label}" for cell in cells)]))
        if not slurm:
            return
    options = Path(slurm) if slurm else None
    with refusing(lambda error: f"a sweep needs Dask ({error}): pip install -e 'src/kvreport[cluster]'", ImportError):
        from kvreport.running import cluster

        if dry_run:
            typer.echo(cluster.slurm_script(options, any(cell.on_gpu for cell in cells)))
            return
        outcome = cluster.sweep(cells, scheduler, options, workers, threads, gpus)
    typer.echo(outcome.text())
    raise typer.Exit(1 if outcome.failures else 0)


def evidence(
    chapters: Annotated[list[str] | None, Argument(help="For these alone, such as layer_drift.")] = None,
    timed: Annotated[bool, Option(help="What measures time, on a machine that does nothing else.")] = False,
) -> None:
    """Make the published evidence that this kind of processor lacks, record it and cite it; hours for all."""
    from kvreport.running import evidence as making

    with refusing("interrupted; what was recorded is kept, and the next call goes on from there", KeyboardInterrupt):
        made = making.make(timed, chapters or ())
    typer.echo(f"{made} runs recorded; commit data/runs and data/evidence.yaml")


def cite(
    name: Annotated[str | None, Argument(help="A figure, table or statement: fig-layer-drift, drift-grows.")] = None,
) -> None:
    """Print the BibTeX entry of a figure, a table or a statement; without a name, of the book."""
    from kvbook import paths
    from kvreport.publishing import checkout, citation, published

    book = checkout.of(paths.ROOT)
    if name is None:
        typer.echo(citation.of_book(book), nl=False)
        return
    # Statements speak of recorded rows: they can be cited before anything was executed, and each of its chapter alone.
    stated = published.stated()
    if name in stated:
        if not (found := [one for one in published.sentences([stated[name]]) if one.name == name]):
            raise UserError(f"statement {name!r} has no check: write one in its chapter's measures.py")
        typer.echo(citation.of_sentence(found[0], book), nl=False)
    else:
        typer.echo(citation.of_published(citation.find(name, published.everything(), stated), book), nl=False)


def bench(
    settings: Annotated[list[str] | None, Argument(help="name=value, such as n_repeats=3 n_new_tokens=32.")] = None,
    book: Annotated[bool, Option(help="Also build the book from nothing, again, and one chapter: minutes.")] = False,
    tests: Annotated[bool, Option(help="Also run all tests, and say which files take the time: half an hour.")] = False,
    growth: Annotated[bool, Option(help="Measure how time and memory grow with size instead: 20 minutes.")] = False,
) -> None:
    """Measure this book's own speed as ratios, side by side in one run; print them, and keep them as a run."""
    # A new seed is a new run: what was measured at another hour is another bench.
    values = {"seed": int(time.time())} | _assignments(settings)
    if growth:
        from kvreport.benchmarks import growth as measuring
        from kvreport.benchmarks import results

        done = measuring.GROWTH.run(measuring.GrowthSettings.checked(**values))
        tables = results.growth_table(done.rows), results.larger(done.rows)
    else:
        from kvreport.benchmarks import ratios, results

        done = ratios.BENCH.run(ratios.BenchSettings.checked(**{"book": book, "tests": tests} | values))
        tables = results.table(done.rows), results.against_targets({"this machine": done})
    typer.echo("\n\n".join(table.to_string(index=False) for table in tables))
    typer.echo(f"on {done.about['machine']['device_name']}; rows in {done.folder}")


def selftest(
    device: Device = "cpu", to: Annotated[str, Option(help="The JSON file to attach to an issue.")] = "selftest.json"
) -> None:
    """Try loading, caches, row-invariant mode and decoding on a device; print and keep the result; 1 if one fails."""
    from kvreport.running import selftest as tests

    # A new seed is a new run: what worked at another hour may not work now.
    done = tests.EXPERIMENT.run(tests.Settings.checked(device=device, seed=int(time.time())))
    typer.echo("\n".join(tests.lines(done.rows)))
    tests.write(done, Path(to).resolve())
    typer.echo(f"on {done.about['machine']['device_name']}; to attach to an issue: {to}; rows in {done.folder}")
    raise typer.Exit(1 if "failed" in set(done.rows["status"]) else 0)
