"""The cached step: whose fault its drift is, and at which lengths of a text there is none.

Keys and values of the prefix come from the full pass, from a prefill, or from decoding token by token; the last token
runs on top of them alone, or together with all other rows, in products of the full pass's shape.  Each text is scored
at the settings' length and at one token more, since a kernel that works in blocks may tell the two apart.

A second experiment cuts texts at every length, and asks at which prefix + last token is bitwise identical to the full
pass.

Rows, one a (model, dtype, sample, length, source of the cache, query), and one a (model, attention, dtype, sample,
length): see ``data/README.md``.
"""

import copy
import itertools

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvbook import lengths
from kvbook.measuring import agreement, caches, full_and_split
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.where_drift_begins import FIELDS, WhereDriftBeginsSettings
from kvreport.chapters.where_drift_begins.rows import ALL_ROWS, FROM_DECODE, FROM_FULL, FROM_PREFILL, ONE_ROW


class GivenCache(DynamicCache):
    """A cache that returns another one's keys and values for the prefix, and the caller's own for the last row.

    Parameters
    ----------
    prefix : Cache
        Of all tokens but the last; left as it is.
    """

    def __init__(self, prefix: Cache) -> None:
        super().__init__()
        self._prefix = prefix

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args, **_kwargs):
        """Return prefix and last row, whatever keys and values the other rows have made."""
        layer = self._prefix.layers[layer_idx]
        pairs = (layer.keys, key_states), (layer.values, value_states)
        # What a window has forgotten, the last row does not see: there any keys will do.
        return tuple(torch.cat([own[..., : -1 - held.shape[-2], :], held, own[..., -1:, :]], -2) for held, own in pairs)


def decoded(model: PreTrainedModel, ids: torch.Tensor, begun: Cache | None = None) -> Cache:
    """Write keys and values token by token, or go on with a cache that was written so for the first tokens."""
    cache = begun or full_and_split.prefill(model, ids[:, :1])
    for position in range(cache.get_seq_length(), ids.shape[1]):
        model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
    return cache


def written(model: PreTrainedModel, ids: torch.Tensor, begun: Cache | None = None) -> dict[str, Cache]:
    """Write the keys and values of all tokens but the last in three ways."""
    prefix = ids[:, :-1]
    full = model(ids, past_key_values=caches.recording(model.config), use_cache=True, logits_to_keep=1).past_key_values
    full.crop(-1)
    prefilled, stepped = full_and_split.prefill(model, prefix), decoded(model, prefix, begun)
    return {FROM_FULL: full, FROM_PREFILL: prefilled, FROM_DECODE: stepped}


def query(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, rows: str) -> full_and_split.LastToken:
    """Run the last token on a cache, alone or among all rows."""
    if rows == ONE_ROW:
        return full_and_split.decode(model, ids[:, -1:], copy.deepcopy(cache))
    return full_and_split.decode(model, ids, GivenCache(cache))


def compare(model: PreTrainedModel, ids: torch.Tensor, begun: Cache | None = None) -> Rows:
    """Score one text's last token in all six ways and compare each with the full pass."""
    reference, held = full_and_split.full_pass(model, ids).logits.cpu(), written(model, ids, begun)
    for source, cache in held.items():
        of_cache = agreement.drift(_flat(held[FROM_FULL]), _flat(cache))
        for rows in (ONE_ROW, ALL_ROWS):
            found = query(model, ids, cache, rows).logits.cpu()
            logits, decision = agreement.drift(reference, found), agreement.decision(reference, found)
            yield {
                "cache": source, "query": rows, "cache_relative_rms": of_cache.relative_rms.item(),
                "cache_differing_share": of_cache.differing_share.item(), "max_abs": logits.max_abs.item(),
                "relative_rms": logits.relative_rms.item(), "differing_share": logits.differing_share.item(),
                "kl_nats": decision.kl_nats, "top1_flip": int(decision.top1_flip),
            }


def _flat(cache: Cache) -> torch.Tensor:
    return torch.cat([states.flatten().cpu() for states in full_and_split.states_of(cache)])


def inputs(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the settings' first model and the corpus, and refuse what cannot be run."""
    return samples.inputs(settings, [settings.model], settings.n_samples, lengths.plus(settings.n_tokens, 1), cut=True)


def measure(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Measure the factorial on the settings' first model."""
    longer = lengths.plus(settings.n_tokens, 1)
    for loaded, text in samples.each(settings, writer, [settings.model], "whose fault", longer):
        with torch.inference_mode():
            # The longer text's tokens are decoded as the shorter one's are, and one more.
            begun = decoded(loaded.model, text.ids[:, :-2])
        text.keep(
            {"n_tokens": length, "longer": length - text.ids.shape[1] + 1} | row
            for length in (text.ids.shape[1] - 1, text.ids.shape[1])
            for row in compare(loaded.model, text.ids[:, :length], begun)
        )


def work(settings: WhereDriftBeginsSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # Two lengths; three caches and what is read on top of each, alone or among all rows.
    n_texts = 2 * settings.n_samples
    n_tokens = lengths.middle(settings.n_tokens)
    return Work(n_tokens, 6 * n_texts, n_tokens * settings.n_samples, settings.dtypes)


EXPERIMENT = Experiment(
    "cache_factorial", WhereDriftBeginsSettings, inputs, measure,
    fields=FIELDS | {"n_samples", "n_tokens"}, work=work, revision=2,
)


def cache_equal(full: Cache, prefix: Cache) -> bool:
    """Tell whether a prefix's keys and values have the bits of the full pass's."""
    pairs = zip(full_and_split.states_of(full), full_and_split.states_of(prefix), strict=True)
    return all(agreement.bits_equal(whole[..., : part.shape[-2], :], part).all() for whole, part in pairs)


def sweep(model: PreTrainedModel, ids: torch.Tensor) -> Rows:
    """Score the last token of every prefix both ways."""
    before = model(ids[:, :1], past_key_values=caches.recording(model.config), use_cache=True).past_key_values
    for length in range(2, ids.shape[1] + 1):
        full = model(ids[:, :length], past_key_values=caches.recording(model.config), use_cache=True)
        equal = int(cache_equal(full.past_key_values, before))
        # The shorter full pass is the prefill; the step makes it one longer, and the longer full pass takes its place.
        step = model(ids[:, length - 1 : length], past_key_values=before, use_cache=True)
        reference, found = full.logits[0, -1].cpu(), step.logits[0, -1].cpu()
        yield {
            "n_tokens": length, "cache_equal": equal, "logits_equal": int(agreement.bits_equal(reference, found).all()),
            "relative_rms": agreement.drift(reference, found).relative_rms.item(),
        }
        before = full.past_key_values


def inputs_of_sweep(settings: WhereDriftBeginsSettings) -> Inputs:
    """Name the settings' first model and the corpus, and refuse what cannot be run."""
    swept = {"longest": settings.longest, "n_swept": settings.n_swept}
    return swept | samples.inputs(settings, [settings.model], settings.n_swept, settings.longest, cut=True)


def measure_sweep(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Sweep the first text with the settings' first model in both attentions, and further ones in the model's own."""
    for attention, dtype in itertools.product((None, "eager"), settings.dtypes):
        loaded = samples.load(settings, settings.model, dtype, attention)
        implementation = loaded.model.config._attn_implementation
        if attention is None and implementation == "eager":
            continue  # the next case is this one
        n_texts = 1 if attention else settings.n_swept
        case, label = f"{attention}|{dtype}", f"every length, {implementation}, {dtype}"
        for text in samples.pending(settings, writer, loaded, case, label, n_texts, settings.longest):
            text.keep(sweep(loaded.model, text.ids), attention=implementation)


def work_of_sweep(settings: WhereDriftBeginsSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # Stock attention and the eager one; half of the length on average.
    n_passes = (1 + settings.n_swept) * settings.longest
    return Work(settings.longest // 2, n_passes, n_passes, settings.dtypes)


SWEEP = Experiment(
    "length_sweep", WhereDriftBeginsSettings, inputs_of_sweep, measure_sweep, FIELDS, work=work_of_sweep, revision=2
)
