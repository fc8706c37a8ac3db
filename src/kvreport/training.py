"""Training that can be killed: one loop for all models that this book trains, its checkpoints and its log.

Which batch a step sees is a function of the seed and the step alone: so a run that was killed goes on from its last
checkpoint with the batches that it would have seen.  A checkpoint is one safetensors file, swapped in atomically;
nothing is pickled.
"""

import csv
import json
import platform
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from kvbook import paths, progress

WORK = paths.BUILD / "training"
# Positions without a target.
IGNORED = -100


class Recipe(Protocol):
    """What every recipe has: the number of steps, the largest gradient norm, and the seed of weights and batches."""

    steps: int
    clip: float
    seed: int


def step_seed(recipe: Recipe, step: int) -> int:
    """Seed of what is drawn at a step."""
    return recipe.seed * 1_000_003 + step


def cut(stream: np.ndarray, count: int, length: int, draws: torch.Generator, further: int = 0) -> torch.Tensor:
    """Cut sequences of a length, and so many tokens further, out of a text at random places."""
    starts = torch.randint(0, len(stream) - length, (count,), generator=draws)
    return torch.from_numpy(np.stack([stream[start : start + length + further] for start in starts.tolist()]))


def mean_nats(model: torch.nn.Module, scored: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Average the negative log likelihood of targets, from pairs of logits and targets that a model makes."""
    total, count = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for logits, targets in scored:
            flat = logits.float().flatten(0, 1), targets.flatten()
            total += functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum").item()
            count += int((targets != IGNORED).sum())
    return total / count


def bits_per_byte(nats_per_token: float, n_tokens: int, n_bytes: int) -> float:
    """Turn a mean loss per token into bits per byte of text, the unit that does not depend on the tokenizer."""
    return float(nats_per_token) / np.log(2) * n_tokens / n_bytes


def run(
    name: str, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe,
    rates: Callable[[int], Sequence[float]], loss_of: Callable[[int], torch.Tensor], every: int = 50,
) -> Path:
    """Take the steps that are left, each optimizer's first group at its rate; return the log of all of them.

    Every so many steps a checkpoint is written.
    """
    log, checkpoint = WORK / name / "training_log.csv", WORK / name / "checkpoint.safetensors"
    log.parent.mkdir(parents=True, exist_ok=True)
    first = _load(checkpoint, model, optimizers) if checkpoint.is_file() else 0
    # What a killed run wrote past its checkpoint will be done again.
    kept = _rows(log)[:first] if first else []
    started = time.perf_counter() - (float(kept[-1][3]) if kept else 0.0)
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("step", "loss_nats", "rate", "elapsed_s"), *kept])
        left = range(first, recipe.steps)
        for step in progress.track(left, len(left), f"training {name}: step {first} +"):
            model.train()
            asked = rates(step)
            for optimizer, rate in zip(optimizers, asked, strict=True):
                optimizer.param_groups[0]["lr"] = rate
            loss = loss_of(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            elapsed = time.perf_counter() - started
            writer.writerow([step, f"{loss.item():.5f}", f"{asked[0]:.3e}", f"{elapsed:.1f}"])
            if (step + 1) % every == 0 or step + 1 == recipe.steps:
                file.flush()
                _save(checkpoint, step + 1, model, optimizers)
    return log


def publish(
    destination: Path, model: torch.nn.Module, log: Path, about: Mapping[str, Any], save: Callable[[Path], None]
) -> Path:
    """Have a finished model saved, its log and what it was made of beside it, and swap the folder in whole."""
    part = destination.with_name(destination.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save(part)
    shutil.copyfile(log, part / "training_log.csv")
    made = {
        "parameters": sum(p.numel() for p in model.parameters()), "trained_s": float(_rows(log)[-1][3]),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }
    (part / "training.json").write_text(json.dumps(made | dict(about), indent=2) + "\n")
    shutil.rmtree(destination, ignore_errors=True)
    return part.replace(destination)


def _save(file: Path, step: int, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Write weights and moments after `step` steps, and swap the file in whole."""
    tensors = {f"weights/{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{number}/{index}/{key}": value.contiguous() for key, value in state.items()}
    part = file.with_suffix(".partial")
    save_file(tensors | {"step": torch.tensor(step)}, part)
    part.replace(file)


def _load(file: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Read a checkpoint into model and optimizers; return the number of steps done."""
    tensors = load_file(file)
    step = int(tensors.pop("step"))
    states = [defaultdict(dict) for _ in optimizers]
    for name in [name for name in tensors if not name.startswith("weights/")]:
        number, index, key = name.split("/")
        states[int(number)][int(index)][key] = tensors.pop(name)
    # A matrix that two layers share is there once.
    model.load_state_dict({name.removeprefix("weights/"): value for name, value in tensors.items()}, strict=False)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return step


def _rows(log: Path) -> list[list[str]]:
    with log.open(newline="") as file:
        return list(csv.reader(file))[1:]
