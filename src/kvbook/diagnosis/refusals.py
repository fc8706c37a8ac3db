"""What `kvbook check` refuses to judge: encoders, models without a cache, broken weights, full passes that change."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig, PreTrainedModel

from kvbook import UserError, refusing
from kvbook.diagnosis import wrong_pass
from kvbook.models import corpus, decoders, hub, loading


class OfTheModelError(UserError):
    """What no other dtype would mend."""


def reason(error: UserError) -> str:
    """Shorten a refusal to why a dtype was left out."""
    return str(error).split(": leave ")[0].split(": this check ")[0]


def in_one_line(name: str) -> AbstractContextManager[None]:
    """Say in one line what a model's own code raises when it is called."""
    def words(error: Exception) -> str:
        none = isinstance(error, AttributeError) and error.name == "past_key_values"
        reason = "its class returns none" if none else f"{type(error).__name__}: {hub.first_line(error)}"
        return f"{name} cannot be run with past_key_values ({reason}): this check is for models that take them"

    return refusing(words)


def refuse_encoder(name: str, config: PretrainedConfig) -> None:
    """Refuse a masked model, and an encoder of something else than text with its decoder."""
    if decoders.has_encoder(config):
        return
    if getattr(config, "is_encoder_decoder", False):
        none = "this check has none to give it; check a loop that decodes with it (kvbook.check_step)"
        raise UserError(f"{name} is an encoder-decoder whose source is no text: {none}")
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False
    if encoder or loading.is_masked(config):
        why = "each token sees those after it too, so no cache of earlier ones can give what the full pass gives"
        remedy = "set is_decoder=true in its configuration to make it causal"
        raise UserError(f"{name} is a masked model: {why}, and its classes return none; {remedy}")


def refuse_vocabulary(name: str, config: PretrainedConfig, texts: Iterable[corpus.Sample]) -> None:
    """Refuse a tokenizer that gives ids of which the model has no embedding."""
    largest, size = max(max(text.ids) for text in texts), config.get_text_config().vocab_size
    if largest >= size:
        says = f"its tokenizer gives id {largest:,}, and its vocabulary has {size:,} tokens"
        raise UserError(f"{name}: {says}: save the tokenizer of this model there")


def refuse_not_finite(name: str, dtype: str, weights: Iterable[tuple[str, torch.Tensor]], rows: Iterable[dict]) -> None:
    """Name the weights that are NaN, where the full pass is."""
    # Weights of a wider dtype may be out of the range of fp16.
    if dtype == "float16" or all(row["drift"] == row["drift"] for row in rows):
        return
    if wrong := [path for path, weight in weights if not weight.isfinite().all()]:
        where = f"({wrong[0]}, {len(wrong)} in all)"
        raise OfTheModelError(f"{name}: the weights hold NaN or infinity {where}: fetch or save them again")


def refuse_reference(
    name: str, model: PreTrainedModel, rows: list[dict[str, Any]], texts: list[corpus.Sample], streamed: bool = False
) -> None:
    """Acquit the cache where nothing could agree with the full pass of the text that drifts most."""
    worst = max(rows, key=lambda row: row["drift"] if row["drift"] == row["drift"] else -1.0)["sample"]
    text = next(text for text in texts if text.index == worst)
    fault = wrong_pass.reference_fault(model, torch.tensor([text.ids], device=model.device), every_length=not streamed)
    if fault == wrong_pass.NOT_REPEATABLE:
        raise OfTheModelError(f"{name} {fault}: switch off what is random in it, such as dropout")
    if fault == wrong_pass.NOT_CAUSAL:
        raise OfTheModelError(f"{name} is not causal: the full pass {fault}, so that no cache can agree with it")
