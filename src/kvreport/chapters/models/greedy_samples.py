"""What every model writes: its own first choice after a prompt, token by token, without a cache.

A causal model is read at the last token.  A masked language model has nothing to say there; it gets a mask behind the text,
is read at the mask, and its choice takes the mask's place.

Rows, one a (model, step): see ``data/README.md``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbook import paths, progress
from kvbook.errors import UserError
from kvbook.models import loading, placement, registry
from kvbook.runs import experiment as frame
from kvbook.runs import records
from kvreport.chapters.models.settings import ModelsSettings


def names(settings: ModelsSettings) -> list[str]:
    """List what the settings' `model` stands for, each once; of the stand-ins, all that ship."""
    if settings.model == "all":
        return [
            name
            for name in registry.families()
            if settings.weights != "stand-in" or (paths.STANDINS / name / "config.json").is_file()
        ]
    return list(dict.fromkeys(name.strip() for name in settings.model.split(",") if name.strip()))


def write(
    model: PreTrainedModel, ids: torch.Tensor, n_new_tokens: int, mask: int | None = None
) -> Iterator[tuple[int, float]]:
    """Go on from a prompt by the first choice.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model, or with `mask` a masked one.
    ids : Tensor of int64, shape (1, prompt_len)
        The prompt.
    n_new_tokens : int
        How many to write.
    mask : int, optional
        Id of the mask token, for a masked language model.

    Yields
    ------
    token : int
        Its id.
    probability : float
        That the model gives it.
    """
    for _ in range(n_new_tokens):
        if mask is None:
            logits = model(ids, use_cache=False).logits[0, -1]
        else:
            logits = model(torch.hstack([ids, ids.new_tensor([[mask]])])).logits[0, -1]
        best = logits.float().softmax(-1).max(-1)
        yield best.indices.item(), best.values.item()
        ids = torch.hstack([ids, best.indices[None, None]])


def run(settings: ModelsSettings) -> records.Run:
    """Let every model write, or read what it wrote if these inputs have been run.

    Raises
    ------
    UserError
        For settings that cannot be run.
    """
    device = placement.device_of(settings.device)
    placement.dtype_on(settings.dtype, device)
    asked = names(settings)
    if not asked:
        raise UserError(f"model = {settings.model!r} names no model: use 'all', or names with commas between them")
    models = [
        loading.identify(name, settings.weights, settings.seed) | {"asked_for": name}
        for name in progress.track(asked, label="models: found")
    ]
    return frame.recorded(
        "greedy_samples",
        __name__,
        settings,
        lambda writer: _measure(settings, models, writer),
        models=models,
    )


def _measure(settings: ModelsSettings, models: list[dict[str, Any]], writer: records.Writer) -> None:
    for model in progress.track(models, label="greedy samples: model"):
        unit = model["asked_for"]
        if unit in writer.done:
            continue
        loaded = loading.load(
            unit, weights=settings.weights, dtype=settings.dtype, device=settings.device, seed=settings.seed
        )
        masked = loading.is_masked(loaded.model.config)
        ids = loaded.tokenizer(settings.prompt, return_tensors="pt")["input_ids"].to(loaded.model.device)
        if masked:
            # The end mark that such a tokenizer adds would say that nothing follows.
            ids = ids[:, :-1]
        loading.check_length(model, ids.shape[1] + settings.n_new_tokens + masked)
        with torch.inference_mode():
            steps = list(
                write(loaded.model, ids, settings.n_new_tokens, loaded.tokenizer.mask_token_id if masked else None)
            )
        tokens = [token for token, _ in steps]
        # A character may take several tokens, so each one's text is what it adds to the text before it.
        texts = [loaded.tokenizer.decode(tokens[:length]) for length in range(len(tokens) + 1)]
        about = {"model": loaded.name, "weights": loaded.weights, "dtype": settings.dtype, "masked": int(masked)}
        writer.append(
            unit,
            [
                about | {"step": step, "token": token, "text": text[len(before) :], "probability": probability}
                for step, ((token, probability), before, text) in enumerate(zip(steps, texts, texts[1:], strict=False))
            ],
        )
