"""A real rollout engine: texts that vLLM samples, scored by a trainer's single pass of transformers.

The engine has an environment of its own, which only `make engines` makes; without it there is nothing to
measure.  Rows, one a token: see ``data/README.md``.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvbook import UserError
from kvbook.measuring import choosing
from kvbook.models import corpus, sources
from kvbook.runs import Experiment, Inputs, Row, Writer, samples
from kvreport.chapters.trainer_and_rollout import rollouts, scoring
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.chapters.trainer_and_rollout.settings import TrainerAndRolloutSettings
from kvreport.engines import environments
from kvreport.engines.listed import ENGINES

ENGINE = "vllm"


def inputs(settings: TrainerAndRolloutSettings) -> Inputs | None:
    """Name the model, the corpus and the engine; None without the engine, or for weights that it cannot read."""
    if settings.weights != "package" or not environments.is_here(ENGINE):
        return None
    return rollouts.inputs(settings) | {"engine": list(ENGINES[ENGINE].packages)}


def measure(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Let the engine write, and score what it wrote."""
    low, full = (samples.load(settings, settings.model, dtype) for dtype in (settings.dtype, "float32"))
    groups = {unit: group for unit, group in rollouts.groups(settings).items() if unit not in writer.done}
    written = dict(zip(groups, generated(settings, list(groups.values())), strict=True))
    for unit, group in writer.pending(groups, "rollout engine: batch"):
        rows: list[Row] = []
        for sample, text in zip(group, written[unit], strict=True):
            ids = torch.tensor([sample.ids + text["tokens"]], device=low.model.device)
            with torch.inference_mode():
                columns = scoring.one_pass(low.model, named.TRAINER, ids, settings.prompt_tokens)
                columns |= scoring.one_pass(full.model, named.TRAINER_FP32, ids, settings.prompt_tokens)
            columns |= {named.ENGINE: torch.tensor([text["sampled"]]), named.ENGINE_READ: torch.tensor([text["read"]])}
            rows += rollouts.rows_of([sample], ids[:, settings.prompt_tokens :], columns, choosing.ends_of(low.model))
        writer.append(unit, rows)


def generated(settings: TrainerAndRolloutSettings, groups: list[list[corpus.Sample]]) -> list[list[dict[str, Any]]]:
    """Continue prompts by the engine: tokens, their log-probabilities when sampled, and when read as a prompt.

    It starts once for all groups, which takes minutes on a busy machine; a group is one batch.
    """
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "found.json"
        asked = {
            "model": str(sources.resolve(settings.model, settings.weights).path), "dtype": settings.dtype,
            "seed": settings.seed, "room": settings.prompt_tokens + settings.new_tokens + 1,
            "new_tokens": settings.new_tokens, "to": str(to),
            "groups": [[{"ids": one.ids, "index": one.index} for one in group] for group in groups],
        }
        command = [str(environments.python_of(ENGINE)), str(Path(__file__).with_name("vllm_rollout.py"))]
        clean = environments.variables_of(ENGINES[ENGINE])
        done = subprocess.run(command, input=json.dumps(asked), text=True, env=clean, capture_output=True)
        if done.returncode:
            raise UserError(f"vLLM stopped: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(to.read_text())


EXPERIMENT = Experiment("engine_rollout", TrainerAndRolloutSettings, inputs, measure, fields=rollouts.FIELDS)
