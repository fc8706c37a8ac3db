"""Texts sampled with a cache, and the log-probabilities that a trainer's single pass gives the same tokens.

Rows, one a token: see ``data/README.md``.
"""


import torch

from kvbook.measuring import choosing
from kvbook.models import corpus, loading, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.trainer_and_rollout import rows as named
from kvreport.chapters.trainer_and_rollout import scoring
from kvreport.chapters.trainer_and_rollout.settings import TrainerAndRolloutSettings


def prompts(settings: TrainerAndRolloutSettings) -> list[corpus.Sample]:
    """Cut the prompts, and refuse shorter ones."""
    return samples.prompts(settings, settings.corpus, settings.n_samples, settings.prompt_tokens)


def inputs(settings: TrainerAndRolloutSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    placement.check(settings.device, (settings.dtype, "float32"))
    model = loading.identify(settings.model, settings.weights, settings.seed)
    loading.check_length(model, settings.prompt_tokens + settings.new_tokens, "new_tokens")
    prompts(settings)
    return {"models": [model], "corpus": corpus.describe(settings.corpus)}


def groups(settings: TrainerAndRolloutSettings) -> dict[str, list[corpus.Sample]]:
    """Put the prompts into batches."""
    texts = prompts(settings)
    return {str(first): texts[first : first + named.BATCH] for first in range(0, len(texts), named.BATCH)}


def measure(settings: TrainerAndRolloutSettings, _made_of: Inputs, writer: Writer) -> None:
    """Write the texts and score them."""
    low, full = (samples.load(settings, settings.model, dtype) for dtype in (settings.dtype, "float32"))
    for unit, group in writer.pending(groups(settings), "rollout: batch"):
        # A smaller batch is filled up with copies, which nobody looks at.
        filled = [group[row % len(group)] for row in range(named.BATCH)]
        with torch.inference_mode():
            ids, columns = scoring.write(low.model, named.ROLLOUT, filled, settings.new_tokens, settings.seed)
            ids = ids[: len(group)]
            columns |= scoring.one_pass(low.model, named.TRAINER, ids, settings.prompt_tokens)
            columns |= scoring.one_pass(full.model, named.TRAINER_FP32, ids, settings.prompt_tokens)
        writer.append(unit, rows_of(group, ids[:, settings.prompt_tokens :], columns, choosing.ends_of(low.model)))


def rows_of(group: list[corpus.Sample], new: torch.Tensor, columns: scoring.Columns, ends: set[int]) -> Rows:
    """Lay columns out as rows, up to the token that ends a text; every digit of a float32 is kept."""
    table = {name: values.tolist() for name, values in columns.items()}
    for row, (sample, tokens) in enumerate(zip(group, new.tolist(), strict=True)):
        for position, token in enumerate(tokens):
            yield {"sample": sample.index, "source": sample.source, "position": position, "token": token} | {
                name: f"{values[row][position]:.9g}" for name, values in table.items()
            }
            if token in ends:
                break


def work(settings: TrainerAndRolloutSettings) -> Work:
    """Count the passes of each model."""
    # A step of the batch takes about half as long as eight steps of one text.
    steps = settings.n_samples * settings.new_tokens / 2
    return Work(settings.prompt_tokens + settings.new_tokens, settings.n_samples, steps, (settings.dtype,))


# The settings on which the rows depend: those of policy_gradient are its own.
FIELDS = frozenset(TrainerAndRolloutSettings.model_fields) - {"n_runs", "n_updates"}
EXPERIMENT = Experiment("rollout", TrainerAndRolloutSettings, inputs, measure, fields=FIELDS, work=work)
