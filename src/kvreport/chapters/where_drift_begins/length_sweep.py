"""Texts, cut at every length: at which lengths prefix + last token is bitwise identical to the full pass.

Rows, one a (model, attention, dtype, sample, length): see ``data/README.md``.
"""

import itertools

import torch
from transformers import Cache, PreTrainedModel

from kvbook.measuring import agreement, full_and_split
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.where_drift_begins import FIELDS, WhereDriftBeginsSettings


def cache_equal(full: Cache, prefix: Cache) -> bool:
    """Tell whether a prefix's keys and values have the bits of the full pass's."""
    pairs = zip(full_and_split.states_of(full), full_and_split.states_of(prefix), strict=True)
    return all(agreement.bits_equal(whole[..., : part.shape[-2], :], part).all() for whole, part in pairs)


def compare(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
    """Score the last token of every prefix both ways."""
    before = model(ids[:, :1], use_cache=True).past_key_values
    for length in range(2, ids.shape[1] + 1):
        full = model(ids[:, :length], use_cache=True)
        equal = int(cache_equal(full.past_key_values, before))
        # The shorter full pass is the prefill; the step makes it one longer, and the longer full pass takes its place.
        step = model(ids[:, length - 1 : length], past_key_values=before, use_cache=True)
        reference, found = full.logits[0, -1].cpu(), step.logits[0, -1].cpu()
        yield {
            "n_tokens": length, "cache_equal": equal, "logits_equal": int(agreement.bits_equal(reference, found).all()),
            "relative_rms": agreement.drift(reference, found).relative_rms.item(),
        }
        before = full.past_key_values


def inputs(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the settings' first model and the corpus, and refuse what cannot be run."""
    swept = {"longest": settings.longest, "n_swept": settings.n_swept}
    return swept | samples.inputs(settings, [settings.model], settings.n_swept, settings.longest)


def measure(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Sweep the first text with the settings' first model in both attentions, and further ones in the model's own."""
    for attention, dtype in itertools.product((None, "eager"), settings.dtypes):
        loaded = samples.load(settings, settings.model, dtype, attention)
        implementation = loaded.model.config._attn_implementation
        if attention is None and implementation == "eager":
            continue  # the next case is this one
        n_texts = 1 if attention else settings.n_swept
        case, label = f"{attention}|{dtype}", f"every length, {implementation}, {dtype}"
        for text in samples.pending(settings, writer, loaded, case, label, n_texts, settings.longest):
            text.keep(compare(loaded.model, text.ids), attention=implementation)


def work(settings: WhereDriftBeginsSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # Stock attention and the eager one; half of the length on average.
    n_passes = (1 + settings.n_swept) * settings.longest
    return Work(settings.longest // 2, n_passes, n_passes, settings.dtypes)


EXPERIMENT = Experiment("length_sweep", WhereDriftBeginsSettings, inputs, measure, FIELDS, work=work, revision=2)
