"""The thread's model: trained by the thread's recipe, shipped in two sizes, and found by name or in a local folder.

    python -m kvbook models train-scratch --size small

Every sequence of a batch starts at a random place of the text and at a random row of the table of positions.  Which
batch a step sees is a function of the seed and the step alone, so a killed run goes on from its last checkpoint.  Of
another text than the standard library's the thread's size is trained on first use.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional

from kvbook import UserError, fingerprint, paths
from kvbook.models import placement
from kvreport import training
from kvreport.chapters.from_scratch.gpt import text
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape

SMALL, THREAD = "small", "thread"
# What the shipped checkpoints are trained on.
STDLIB = "stdlib"


@dataclass(frozen=True)
class Recipe:
    """Everything that a training run is made of, the corpus aside.

    Attributes
    ----------
    layers, width, heads, block, dropout
        As for `Shape`.
    blocks_in_table : int
        Length of the table of positions, in blocks.
    steps, batch_size : int
        Optimizer steps, and sequences of `block` characters in each.
    rate : float
        Peak learning rate of AdamW.
    falls : bool
        Whether the rate warms up over the first twentieth of the steps and falls linearly to a twentieth of its peak
        after it; the thread's stays what it is.
    weight_decay, clip : float
        Decay of the weights; largest gradient norm.
    seed : int
        Of weights and batches.
    """

    layers: int
    width: int
    heads: int
    block: int
    steps: int
    batch_size: int
    rate: float
    falls: bool
    dropout: float = 0.0
    blocks_in_table: int = 8
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        if not self.falls:
            return self.rate
        return self.rate * min(1.0, (step + 1) / (self.steps / 20)) * (1 - 0.95 * step / self.steps)


# `small` trains in minutes on one core; one pass over little text needs no dropout, and so small a model a higher rate.
# `thread` is what the thread states: it names neither the optimizer, for which AdamW's defaults stand, nor a clip.
RECIPES = {
    "small": Recipe(layers=4, width=128, heads=4, block=64, steps=2500, batch_size=32, rate=3e-3, falls=True),
    "thread": Recipe(
        layers=6, width=384, heads=4, block=256, steps=1000, batch_size=64, rate=3e-4, falls=False, dropout=0.2
    ),
}


def batch(stream: np.ndarray, recipe: Recipe, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the batch of a step: characters, those that follow, and positions."""
    draws = torch.Generator().manual_seed(training.step_seed(recipe, step))
    ids = training.cut(stream, recipe.batch_size, recipe.block, draws, further=1)
    n_offsets = recipe.block * (recipe.blocks_in_table - 1) + 1
    offsets = torch.randint(0, n_offsets, (recipe.batch_size, 1), generator=draws)
    return ids[:, :-1], ids[:, 1:], offsets + torch.arange(recipe.block)


def held_out_nats(model: ScratchGPT, vocabulary: text.Vocabulary, corpus_name: str, every: int = 1) -> float:
    """Mean negative log likelihood a character of the held-out part, in windows of one block from position 0.

    Of all windows, or of every second, third and so on.
    """
    block = model.shape.block
    stream = torch.from_numpy(vocabulary.encode_all(text.documents(corpus_name, "held-out")))
    windows = stream.unfold(0, block + 1, block)[::every]
    positions = torch.arange(block, device=model.device)
    ids = (some.to(model.device) for some in windows.split(64))
    return training.mean_nats(model, ((model(some[:, :-1], positions), some[:, 1:]) for some in ids))


def train(recipe: Recipe, destination: Path, corpus_name: str = "stdlib", device: str = "cpu") -> Path:
    """Train a model, or go on with a run that was interrupted."""
    documents = text.documents(corpus_name, "train")
    vocabulary = text.Vocabulary.of(document.text for document in documents)
    stream = vocabulary.encode_all(documents)
    shape = Shape(
        len(vocabulary.characters), recipe.layers, recipe.width, recipe.heads, recipe.block,
        recipe.block * recipe.blocks_in_table, recipe.dropout,
    )
    about = {"recipe": asdict(recipe), "train": text.describe(corpus_name, "train")}
    torch.manual_seed(recipe.seed)
    model = ScratchGPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)

    def loss_of(step: int) -> torch.Tensor:
        # A step's dropout, like its batch, must not depend on where a killed run went on.
        torch.manual_seed(training.step_seed(recipe, step))
        ids, targets, positions = (each.to(device) for each in batch(stream, recipe, step))
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            return functional.cross_entropy(model(ids, positions).flatten(0, 1).float(), targets.flatten())

    name = f"scratch-{fingerprint.of_values(about)[:8]}"
    log = training.run(name, model, [optimizer], recipe, lambda step: [recipe.rate_at(step)], loss_of)
    # What will ship is scored, in fp32 arithmetic.
    shipped = model.to(torch.bfloat16).float()
    about |= {
        "trained_characters": recipe.steps * recipe.batch_size * recipe.block,
        "held_out": text.describe(corpus_name, "held-out"),
        "held_out_nats_per_character": round(held_out_nats(shipped, vocabulary, corpus_name), 4),
    }

    def save(folder: Path) -> None:
        weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in shipped.named_parameters()}
        save_file(weights, folder / "model.safetensors")
        config = {"shape": asdict(shape), "characters": vocabulary.characters}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    return training.publish(destination, shipped, log, about, save)


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
        recipe = RECIPES[THREAD]
        made_of = fingerprint.of_values([recipe, text.describe(corpus, "train")])[:8]
        folder = paths.BUILD / "models" / f"scratch-{THREAD}-{made_of}"
        if not folder.is_dir():
            placement.device_of(device)
            folder.parent.mkdir(parents=True, exist_ok=True)
            train(recipe, folder, corpus, device)
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
