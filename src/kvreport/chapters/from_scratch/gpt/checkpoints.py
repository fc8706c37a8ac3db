"""The thread's model by name: shipped in two sizes, trained on another text on first use, or in a local folder."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvbook import UserError, fingerprint, paths
from kvbook.models import placement
from kvreport.chapters.from_scratch.gpt import text, training
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape

SMALL, THREAD = "small", "thread"
# What the shipped checkpoints are trained on.
STDLIB = "stdlib"


class Loaded(NamedTuple):
    """A model with its characters.

    Attributes
    ----------
    model : ScratchGPT
        In evaluation mode.
    vocabulary : text.Vocabulary
        Its characters.
    """

    model: ScratchGPT
    vocabulary: text.Vocabulary


def shipped(size: str) -> Path:
    """Name the folder of a checkpoint that ships."""
    return paths.MODELS / "scratch" / size


def folder_of(name: str, corpus: str, device: str = "cpu") -> Path:
    """Find a checkpoint; ``"thread"`` is trained on first use on another text than the standard library."""
    if name == SMALL or (name == THREAD and corpus == STDLIB):
        return shipped(name)
    if name == THREAD:
        recipe = training.RECIPES[THREAD]
        made_of = fingerprint.of_values([recipe, text.describe(corpus, "train")])[:8]
        folder = paths.BUILD / "models" / f"scratch-{THREAD}-{made_of}"
        if not folder.is_dir():
            placement.device_of(device)
            folder.parent.mkdir(parents=True, exist_ok=True)
            training.train(recipe, folder, corpus, device)
        return folder
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise _refusal(f"model {name!r}", f"is neither {SMALL!r}, {THREAD!r} nor a folder with such a model")
    return folder


def _refusal(what: str | Path, why: str) -> UserError:
    return UserError(f"{what} {why}: `python -m kvbook models train-scratch` makes one")


def _config(folder: Path) -> tuple[Shape, text.Vocabulary]:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        return Shape(**config["shape"]), text.Vocabulary(config["characters"])
    except (OSError, ValueError, KeyError, TypeError):
        raise _refusal(folder, "holds no checkpoint of this chapter's model") from None


def load_vocabulary(name: str, corpus: str) -> text.Vocabulary:
    """Read the characters of a model; parameters and errors as for `folder_of`."""
    return _config(folder_of(name, corpus))[1]


def identify(name: str, weights: str, seed: int, corpus: str, device: str = "cpu") -> dict[str, Any]:
    """Say which model it is, for a run's record."""
    folder = folder_of(name, corpus, device)
    shape, _ = _config(folder)
    ours = name in (SMALL, THREAD)
    # On `meta` nothing is allocated.
    with torch.device("meta"):
        parameters = sum(p.numel() for p in ScratchGPT(shape).parameters())
    about = {
        "name": f"scratch-{name}" if ours else folder.resolve().name,
        "weights": "random" if weights == "random" else "stand-in" if ours else "local",
        "parameters": parameters, "layers": shape.layers, "shape": vars(shape),
    }
    if weights == "random":
        return about | {"seed": seed}
    if not (folder / "model.safetensors").is_file():
        raise _refusal(folder, "has no model.safetensors")
    return about | {"sha256": fingerprint.of_file(folder / "model.safetensors")}


def load(name: str, weights: str, seed: int, corpus: str, dtype: str, device: str) -> Loaded:
    """Load a model."""
    where, folder = placement.device_of(device), folder_of(name, corpus, device)
    shape, vocabulary = _config(folder)
    torch.manual_seed(seed)
    model = ScratchGPT(shape)
    if weights != "random":
        try:
            model.load_state_dict(load_file(folder / "model.safetensors"))
        except (OSError, RuntimeError, SafetensorError):
            raise _refusal(folder, "has a model.safetensors that does not fit its config.json") from None
    return Loaded(model.to(where, placement.dtype_on(dtype, where)).eval().requires_grad_(False), vocabulary)
