"""Training by the thread's recipe, in two sizes: a small one, and the thread's own.

    python -m kvbook models train-scratch --size small

Every sequence of a batch starts at a random place of the text and at a random row of the table of positions.  Which
batch a step sees is a function of the seed and the step alone, so a killed run goes on from its last checkpoint.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

from kvbook import fingerprint
from kvreport import training
from kvreport.chapters.from_scratch.gpt import text
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape


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
