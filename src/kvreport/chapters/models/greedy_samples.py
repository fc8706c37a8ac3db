"""What every model writes: its own first choice after a prompt, token by token, without a cache.

A causal model is read at the last token.  A masked language model has nothing to say there; it gets a mask after the
text, is read at the mask, and its choice takes the mask's place.

Rows, one a (model, step): see ``data/README.md``.
"""

import itertools
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from kvbook import UserError, progress
from kvbook.measuring import choosing
from kvbook.models import loading, packages, placement, sources
from kvbook.runs import Experiment, Inputs, Work, Writer
from kvreport.chapters.models import ModelsSettings


def names(settings: ModelsSettings) -> list[str]:
    """List what the settings' `model` stands for, each once; ``all`` is every family that has such weights."""
    if settings.model == "all":
        return sources.families_with(settings.weights)
    return list(dict.fromkeys(name.strip() for name in settings.model.split(",") if name.strip()))


def weights_of(settings: ModelsSettings, name: str) -> list[str]:
    """List the weights that a model writes with; among ``all`` stand-ins also the trained model's, where it is here."""
    trained = settings.model == "all" and settings.weights == "stand-in" and name in packages.with_package()
    return [settings.weights, *(["package"] if trained and packages.is_here(name) else [])]


def write(
    model: PreTrainedModel, ids: torch.Tensor, n_new_tokens: int, mask: int | None = None
) -> Iterator[tuple[int, float]]:
    """Go on greedily from a prompt, ids of shape (1, prompt_len); yield each token's id and its probability.

    A masked language model is given the id of its mask token.
    """
    for _ in range(n_new_tokens):
        fed = ids if mask is None else torch.hstack([ids, ids.new_tensor([[mask]])])
        logits = model(fed, **({"use_cache": False} if mask is None else {})).logits[0, -1]
        token = choosing.greedy(logits)
        yield token.item(), logits.float().softmax(-1)[token].item()
        ids = torch.hstack([ids, token[None, None]])


def inputs(settings: ModelsSettings) -> Inputs:
    """Name the models, and refuse what cannot be run."""
    placement.dtype_on(settings.dtype, placement.device_of(settings.device))
    if not (asked := names(settings)):
        raise UserError(f"model = {settings.model!r} names no model: use 'all', or names with commas between them")
    models = [
        loading.identify(name, weights, settings.seed) | {"asked_for": name}
        for name in progress.track(asked, label="models: found") for weights in weights_of(settings, name)
    ]
    return {"models": models}


def measure(settings: ModelsSettings, made_of: Inputs, writer: Writer) -> None:
    """Let every model write."""
    units = {f"{model['asked_for']}|{model['weights']}": model for model in made_of["models"]}
    for unit, model in writer.pending(units, "greedy samples: model"):
        name = model["asked_for"]
        weights = "package" if model["weights"] == "package" else settings.weights
        loaded = loading.load(name, weights=weights, dtype=settings.dtype, device=settings.device, seed=settings.seed)
        masked = loading.is_masked(loaded.model.config)
        ids = loaded.tokenizer(settings.prompt, return_tensors="pt")["input_ids"].to(loaded.model.device)
        if masked:
            # The end mark that such a tokenizer adds would say that nothing follows.
            ids = ids[:, :-1]
        loading.check_length(model, ids.shape[1] + settings.n_new_tokens + masked, "n_new_tokens")
        mask = loaded.tokenizer.mask_token_id if masked else None
        with torch.inference_mode():
            tokens, probabilities = zip(*write(loaded.model, ids, settings.n_new_tokens, mask), strict=True)
        # A character may take several tokens, so each one's text is what it adds to the text before it.
        texts = [loaded.tokenizer.decode(tokens[:length]) for length in range(len(tokens) + 1)]
        added = (text[len(before) :] for before, text in itertools.pairwise(texts))
        writer.keep(unit, loaded.about | {"masked": int(masked)}, (
            {"step": step, "token": token, "text": text, "probability": probability}
            for step, (token, text, probability) in enumerate(zip(tokens, added, probabilities, strict=True))
        ))


def work(settings: ModelsSettings) -> Work:
    """Count the passes of each model in each dtype."""
    return Work(max(1, settings.n_new_tokens // 2), settings.n_new_tokens, dtypes=(settings.dtype,))


EXPERIMENT = Experiment("greedy_samples", ModelsSettings, inputs, measure, work=work)
