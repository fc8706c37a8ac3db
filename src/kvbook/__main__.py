"""The command line: ``python -m kvbook``."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvbook.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Experiments of the book on the KV cache.")
models_app = typer.Typer(no_args_is_help=True, help="The models: what there is, and how the stand-ins were made.")
app.add_typer(models_app, name="models")
records_app = typer.Typer(no_args_is_help=True, help="The recorded runs in data/runs.")
app.add_typer(records_app, name="records")


@models_app.command("list")
def models_list() -> None:
    """Print the families: hub ids, parameters, GiB of weights, and which stand-ins are there."""
    from kvbook.analyses import models_page

    typer.echo(models_page.listing())


@models_app.command("train")
def models_train(
    family: Annotated[str, typer.Option(help="gpt2, llama, qwen2, smollm2, mpt, falcon or roberta.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Other than the recipe's number of steps.")] = None,
    destination: Annotated[str | None, typer.Option(help="Folder of the finished checkpoint.")] = None,
) -> None:
    """Train a family's stand-in on the standard library; a killed run goes on from its last checkpoint."""
    from pathlib import Path

    from kvbook.models import training

    recipe = training.recipe_for(family)
    recipe = recipe if steps is None else replace(recipe, steps=steps)
    folder = training.train(family, recipe, Path(destination) if destination else None)
    typer.echo(f"{folder}: {(folder / 'training.json').read_text()}")


@models_app.command("train-scratch")
def models_train_scratch(
    size: Annotated[str, typer.Option(help="small, or thread, as large as the forum thread's.")] = "small",
    corpus: Annotated[str, typer.Option(help="stdlib, a folder of text files, or one text file.")] = "stdlib",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    destination: Annotated[str | None, typer.Option(help="Folder of the finished checkpoint.")] = None,
) -> None:
    """Train the model of the chapter "from scratch"; a killed run goes on from its last checkpoint."""
    from pathlib import Path

    from kvbook.models import placement
    from kvbook.scratch import checkpoints, training

    if size not in training.RECIPES:
        raise UserError(f"no size {size!r}: choose one of {', '.join(training.RECIPES)}")
    placement.device_of(device)
    if destination:
        folder = training.train(training.RECIPES[size], Path(destination), corpus, device)
    elif corpus == checkpoints.STDLIB:
        folder = training.train(training.RECIPES[size], checkpoints.shipped(size), corpus, device)
    elif size == checkpoints.THREAD:
        folder = checkpoints.folder_of(size, corpus, device)
    else:
        raise UserError("the checkpoint that ships is trained on the stdlib: name a --destination for another corpus")
    typer.echo(f"{folder}: {(folder / 'training.json').read_text()}")


def _assignments(values: list[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, content = value.partition("=")
        if not equals:
            raise UserError(f"{value!r} is not a setting: write name=value, such as n_samples=20")
        pairs[name] = content
    return pairs


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Its name; a wrong one lists them all.")],
    settings: Annotated[list[str] | None, typer.Argument(help="name=value, such as model=gpt2 n_samples=20.")] = None,
) -> None:
    """Run one experiment, without a notebook, and print where its rows lie."""
    from kvbook.experiments import catalogue

    finished = catalogue.run(experiment, _assignments(settings or []))
    if finished is None:
        raise UserError(f"{experiment} has nothing to measure with these settings: see its documentation")
    typer.echo(f"{len(finished.rows)} rows in {finished.folder}")


@app.command()
def record(
    run: Annotated[str, typer.Argument(help="Folder of a finished run, or the first digits of its hash.")],
) -> None:
    """Move a finished run into data/runs, which is in git; one that was edited or tells of its owner is refused."""
    from kvbook import recording

    typer.echo(f"recorded in {recording.record(recording.find(run))}")


@app.command()
def sweep(
    file: Annotated[str, typer.Argument(help="YAML with experiment, model, dtype, length, device and settings.")],
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler that is there.")] = None,
    slurm: Annotated[str | None, typer.Option(help="YAML with the options of jobs on Slurm.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes on this machine; one a GPU or core.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each; a run's hash depends on it.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each, for models that one does not hold.")] = 1,
    dry_run: Annotated[
        bool, typer.Option(help="List the cells, and the job script with --slurm; run nothing.")
    ] = False,
) -> None:
    """Run an experiment over models, dtypes, lengths and devices; started again, it goes on where it was."""
    from pathlib import Path

    from kvbook import cluster, sweeps

    cells = sweeps.read(Path(file))
    if scheduler and slurm:
        raise UserError("a sweep runs in one place: name --scheduler or --slurm, not both")
    if dry_run:
        script = [cluster.slurm_script(Path(slurm), any(cell.on_gpu for cell in cells))] if slurm else []
        typer.echo("\n".join([f"{len(cells)} cells:", *(f"  {cell.label}" for cell in cells), *script]))
        return
    outcome = cluster.sweep(
        cells, scheduler=scheduler, slurm=Path(slurm) if slurm else None, workers=workers, threads=threads, gpus=gpus
    )
    typer.echo(outcome.text())
    raise typer.Exit(1 if outcome.failures else 0)


@records_app.command("verify")
def records_verify() -> None:
    """Check that every recorded run is whole, in its place, and as it was made; exit status 1 when one is not."""
    from kvbook import recording

    count, faults = recording.verify()
    typer.echo("\n".join([*faults, f"{count} recorded runs, {len(faults)} faults"]))
    raise typer.Exit(1 if faults else 0)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A folder that save_pretrained wrote, a hub id, or a family's name.")],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtypes: Annotated[
        str, typer.Option(help="The finest decides most; those that do not fit are left out.")
    ] = "float64,float32,float16,bfloat16",
    samples: Annotated[int, typer.Option(min=1, help="How many texts.")] = 4,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of a text, at most.")] = 32,
    corpus: Annotated[str, typer.Option(help="stdlib, or a folder of text files.")] = "stdlib",
    seed: Annotated[int, typer.Option(min=0, help="Of the places where texts are cut, and of the bootstrap.")] = 0,
    prefix: Annotated[str | None, typer.Option(help="Only look for a tokenizer seam behind this text.")] = None,
    rest: Annotated[str | None, typer.Option(help="What follows the prefix.")] = None,
) -> None:
    """Say whether a model's cache is exact, within rounding (exit status 0), or wrong (1); 2 if it could not be told.

    The checkpoint is run as it is, its configuration's use_cache included.
    """
    from kvbook.settings import CheckSettings

    # Before torch is imported, which takes its time: what is wrong with the question itself.
    if (prefix is None) != (rest is None):
        raise UserError("a seam lies between two texts: name both --prefix and --rest")
    asked = CheckSettings.checked(
        model=model, device=device, dtypes=dtypes, n_samples=samples, n_tokens=tokens, corpus=corpus, seed=seed
    )
    from kvbook.diagnosis import check as checks

    found = checks.check(asked) if prefix is None or rest is None else checks.seam(model, prefix, rest)
    typer.echo("\n".join(found.lines))
    raise typer.Exit(found.status)


@app.command()
def cite(
    name: Annotated[str | None, typer.Argument(help="Of a figure or table, such as fig-layer-drift.")] = None,
) -> None:
    """Print the BibTeX entry of a figure or table of the executed book; without a name, of the book."""
    from kvbook import citation, origin, paths, published

    book = origin.of(paths.ROOT)
    entry = (
        citation.of_book(book)
        if name is None
        else citation.of_published(citation.find(name, published.everything()), book)
    )
    typer.echo(entry, nl=False)


@app.command()
def bench(
    settings: Annotated[
        list[str] | None, typer.Argument(help="name=value, such as n_repeats=3 n_new_tokens=32.")
    ] = None,
    book: Annotated[
        bool, typer.Option(help="Also build the book from nothing, again, and one chapter: minutes.")
    ] = False,
) -> None:
    """Measure this book's own speed as ratios, side by side in one run; print them, and keep them as a run."""
    import time

    from kvbook import bench as benchmarks
    from kvbook.analyses.bench import table

    # A new seed is a new run: what was measured at another hour is another bench.
    values = {"seed": int(time.time()), "book": book} | _assignments(settings or [])
    done = benchmarks.run(benchmarks.BenchSettings.checked(**values))
    typer.echo(table(done.rows).to_string(index=False))
    typer.echo(f"on {done.about['machine']['device_name']}; rows in {done.folder}")


def main() -> None:
    """Run the command line; what a user can mend is one line on standard error and exit status 2."""
    try:
        app()
    except UserError as error:
        print(f"kvbook: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
