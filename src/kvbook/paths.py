"""Where everything lies, and how a file gets there whole.

The repository's root is the book. `KVBOOK_ROOT` overrides the search, for a package that was installed without its
checkout.
"""

import os
from pathlib import Path


def _find_root() -> Path:
    if named := os.environ.get("KVBOOK_ROOT"):
        return Path(named).resolve()
    # The package lies in <root>/src/kvbook when installed in place, as requirements.txt does.
    beside = Path(__file__).resolve().parents[2]
    if (beside / "_toc.yml").is_file() or (beside / "chapters").is_dir():
        return beside
    # Installed elsewhere: the nearest folder upwards that looks like the book, else the working directory.
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "_toc.yml").is_file() and (folder / "chapters").is_dir():
            return folder
    return here


ROOT = _find_root()

# Sources, all in git.
CHAPTERS = ROOT / "chapters"
PARAMETERS = ROOT / "parameters"
DATA = ROOT / "data"
# What each document published: numbers and claims, one YAML a document.
DOCUMENTS = DATA / "documents"
# Stand-in checkpoints and the tokenizers that they share.
MODELS = DATA / "models"
STANDINS = MODELS / "standins"
# Recorded runs of this and other machines; immutable.
RECORDED_RUNS = DATA / "runs"
# Which of them each chapter cites.
EVIDENCE = DATA / "evidence.yaml"
# What is known of processors whose runs did not record it.
PROCESSORS = DATA / "processors.yaml"

# Everything that a run makes; ignored by git.
BUILD = Path(os.environ.get("KVBOOK_BUILD", ROOT / "_build")).resolve()
EXECUTED = BUILD / "executed"
RUNS = BUILD / "runs"
FIGURES = BUILD / "figures"
HTML = BUILD / "html"


def keep(file: Path, content: bytes) -> Path:
    """Write a file whole or not at all; one that has this content stays, so that nobody takes it for new."""
    if not file.is_file() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may keep the same at once.
        part = file.with_name(f".{file.name}.{os.getpid()}.partial")
        part.write_bytes(content)
        part.replace(file)
    return file
