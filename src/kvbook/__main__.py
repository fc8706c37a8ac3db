"""The command line: ``python -m kvbook``."""

import sys
from typing import Annotated

import typer

from kvbook.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Experiments of the book on the KV cache.")
models_app = typer.Typer(no_args_is_help=True, help="The stand-in models.")
app.add_typer(models_app, name="models")


@models_app.command("train")
def models_train(
    family: Annotated[str, typer.Option(help="gpt2, llama, qwen2, smollm2, mpt, falcon or roberta.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Other than the recipe's number of steps.")] = None,
    destination: Annotated[str | None, typer.Option(help="Folder of the finished checkpoint.")] = None,
) -> None:
    """Train a family's stand-in on the standard library; a killed run goes on from its last checkpoint."""
    from pathlib import Path

    from kvbook.models import training

    recipe = training.Recipe() if steps is None else training.Recipe(steps=steps)
    folder = training.train(family, recipe, Path(destination) if destination else None)
    typer.echo(f"{folder}: {(folder / 'training.json').read_text()}")


def main() -> None:
    """Run the command line; what a user can mend is one line on standard error and exit status 2."""
    try:
        app()
    except UserError as error:
        print(f"kvbook: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
