"""Training that can be killed: one loop for all models that this book trains, its checkpoints and its log.

Which batch a step sees must be a function of the step alone: then a run that was killed goes on from its last
checkpoint with the batches that it would have seen.  A checkpoint is two safetensors files, swapped in atomically;
nothing is pickled.
"""

import csv
import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kvbook import paths, progress

WORK = paths.BUILD / "training"


def run(
    name: str,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    rates: Callable[[int], Sequence[float]],
    loss_of: Callable[[int], torch.Tensor],
    clip: float,
    every: int,
) -> Path:
    """Take the steps that are left, each optimizer's first group at its rate; give the log of all of them."""
    work = WORK / name
    work.mkdir(parents=True, exist_ok=True)
    first = load_checkpoint(work, model, optimizers)
    log = work / "training_log.csv"
    kept = _log_kept(log, first)
    started = time.perf_counter() - (float(kept[-1][3]) if kept else 0.0)
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_nats", "rate", "elapsed_s"])
        writer.writerows(kept)
        for step in progress.track(range(first, steps), steps - first, f"training {name}: step {first} +"):
            model.train()
            asked = rates(step)
            for optimizer, rate in zip(optimizers, asked, strict=True):
                optimizer.param_groups[0]["lr"] = rate
            loss = loss_of(step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            elapsed = time.perf_counter() - started
            writer.writerow([step, f"{loss.item():.5f}", f"{asked[0]:.3e}", f"{elapsed:.1f}"])
            if (step + 1) % every == 0 or step + 1 == steps:
                file.flush()
                save_checkpoint(work, step + 1, model, optimizers)
    return log


def publish(
    destination: Path, model: torch.nn.Module, log: Path, about: Mapping[str, Any], save: Callable[[Path], None]
) -> None:
    """Have a finished model saved, its log and what it was made of beside it, and swap the folder in whole."""
    part = destination.with_name(destination.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save(part)
    shutil.copyfile(log, part / "training_log.csv")
    made = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_s": float(_rows(log)[-1][3]),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }
    (part / "training.json").write_text(json.dumps(made | dict(about), indent=2) + "\n")
    shutil.rmtree(destination, ignore_errors=True)
    part.replace(destination)


def bits_per_byte(nats_per_token: float, n_tokens: int, n_bytes: int) -> float:
    """Turn a mean loss per token into bits per byte of text, the unit that does not depend on the tokenizer."""
    return float(nats_per_token) / np.log(2) * n_tokens / n_bytes


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict]:
    """List the state of every parameter, in an order that a restart repeats."""
    return [o.state[p] for o in optimizers for group in o.param_groups for p in group["params"]]


def save_checkpoint(
    folder: Path, step: int, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Write weights and moments after `step` steps as two safetensors files, swap them in whole, drop older ones."""
    fresh = folder / f"step-{step}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, fresh / "weights.safetensors")
    moments = {
        f"{index}.{key}": value.contiguous()
        for index, state in enumerate(_states(optimizers))
        for key, value in state.items()
    }
    save_file(moments, fresh / "moments.safetensors")
    fresh.replace(folder / f"step-{step}")
    for old in folder.glob("step-*"):
        if old.name != f"step-{step}":
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Read the newest checkpoint into model and optimizers; give the number of steps done, 0 when there is none."""
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    if not steps:
        return 0
    weights = load_file(folder / f"step-{max(steps)}" / "weights.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    states = _states(optimizers)
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for name, value in load_file(folder / f"step-{max(steps)}" / "moments.safetensors").items():
        index, _, key = name.partition(".")
        # Moments lie where their parameter does; the count of steps stays on the host, where AdamW keeps it.
        states[int(index)][key] = value if key == "step" else value.to(parameters[int(index)].device)
    return max(steps)


def _rows(log: Path) -> list[list[str]]:
    with log.open(newline="") as file:
        return list(csv.reader(file))[1:]


def _log_kept(log: Path, step: int) -> list[list[str]]:
    """Read the log's rows before `step`; what a killed run wrote past its checkpoint will be done again."""
    if step == 0 or not log.is_file():
        return []
    return [row for row in _rows(log) if int(row[0]) < step]
