"""Which path is right: the error of the uncached pass, and of others, against the same weights in double precision.

A text of n tokens is run at once, without a cache; its second half is also decoded token by token behind a prefill of
the first.  The fp64 reference has the weights of the dtype under test; dtypes that hold the same weights share it.
Beside the cached path stands another uncached one, with the other implementation of attention, and an injected fault:
the last token told a position too early.

Rows, one a (model, dtype, sample, path, place): see ``data/README.md``.  Places are the hidden states, each pooled over
the decoded positions; the logits, position by position; and a few ids of the vocabulary, for what is common to all
samples.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from kvbook.measuring import caches, fp64_reference, in_fp64
from kvbook.models import corpus, placement
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer, samples
from kvreport.chapters.which_path_is_right import WhichPathSettings
from kvreport.chapters.which_path_is_right.rows import AS_LOADED, CACHED, CHECK, EAGER, OFF_BY_ONE

# Texts on which the reference is tried.
_CHECKED = 2
# Ids of the vocabulary whose log-probabilities are followed, evenly spread over it.
_FOLLOWED = 64


class Scored(NamedTuple):
    """What a path gives for the last rows of a text, in double precision.

    Attributes
    ----------
    hidden : Tensor, shape (layers + 1, rows, width)
        Residual stream, as transformers' ``hidden_states``: the last state is after the final norm too.
    logits : Tensor, shape (rows, vocabulary_size)
        Scores of the next token.
    """

    hidden: torch.Tensor
    logits: torch.Tensor

    def last(self) -> "Scored":
        """Keep the last row."""
        return Scored(self.hidden[:, -1:], self.logits[-1:])


def _scored(outputs: list, n_rows: int) -> Scored:
    hidden = [torch.stack([state[0, -n_rows:] for state in output.hidden_states]) for output in outputs]
    return Scored(torch.cat(hidden, 1).double(), torch.cat([output.logits[0, -n_rows:] for output in outputs]).double())


def at_once(model: PreTrainedModel, ids: torch.Tensor, n_rows: int) -> Scored:
    """Run a text without a cache and keep its last rows."""
    return _scored([model(ids, output_hidden_states=True, use_cache=False)], n_rows)


def token_by_token(model: PreTrainedModel, ids: torch.Tensor, n_rows: int) -> tuple[Scored, Cache]:
    """Prefill a cache with a text but for its last tokens, then feed these one by one, as `generate` does."""
    start = ids.shape[1] - n_rows
    cache = caches.recording(model.config)
    model(ids[:, :start], past_key_values=cache, use_cache=True, logits_to_keep=1)
    steps = ids[:, start:].split(1, 1)
    outputs = [model(one, past_key_values=cache, use_cache=True, output_hidden_states=True) for one in steps]
    return _scored(outputs, 1), cache


def off_by_one(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> Scored | None:
    """Feed the last token once more, one position too early; None for a model that takes no positions."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    cache.crop(-1)
    early = torch.tensor([[ids.shape[1] - 2]], device=ids.device)
    output = model(ids[:, -1:], past_key_values=cache, use_cache=True, position_ids=early, output_hidden_states=True)
    return _scored([output], 1)


def outcome(logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Say what logits mean for the next token."""
    log, true = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    return {
        "nats": -log.gather(1, labels[:, None])[:, 0],
        # Rounding can leave a divergence of equal distributions a hair below zero.
        "kl": (true.exp() * (true - log)).sum(-1).clamp(min=0),
        "top1": (logits.argmax(-1) == reference.argmax(-1)).double(), "entropy": -(log.exp() * log).sum(-1),
    }


_EMPTY = dict.fromkeys(
    ("place", "layer", "position", "token", "error_full", "error", "drift", "correlation", "nats_reference",
     *(f"{name}{of}" for name in ("nats", "kl", "top1", "entropy") for of in ("_full", "")), "shift", "shift_rms")
)


def rows_of(reference: Scored, full: Scored, other: Scored, labels: torch.Tensor, first: int) -> Rows:
    """Hold a path and the uncached one against the reference."""
    for layer, values in enumerate(_errors(reference.hidden, full.hidden, other.hidden, pooled=True)):
        yield _EMPTY | {"place": "hidden", "layer": layer} | values
    judged = {
        f"{name}{of}": values.tolist() for of, scored in (("_full", full), ("", other))
        for name, values in outcome(scored.logits, reference.logits, labels).items()
    }
    judged["nats_reference"] = outcome(reference.logits, reference.logits, labels)["nats"].tolist()
    about = _EMPTY | {"place": "logits", "layer": len(reference.hidden)}
    for row, values in enumerate(_errors(reference.logits, full.logits, other.logits)):
        yield about | {"position": first + row} | values | {name: column[row] for name, column in judged.items()}
    followed = torch.linspace(0, reference.logits.shape[1] - 1, _FOLLOWED, dtype=torch.float64).long().unique()
    by_id = (torch.log_softmax(other.logits, -1) - torch.log_softmax(full.logits, -1))[:, followed]
    mean, rms = by_id.mean(0).tolist(), by_id.square().mean(0).sqrt().tolist()
    for token, shift, shift_rms in zip(followed.tolist(), mean, rms, strict=True):
        yield _EMPTY | {"place": "vocabulary", "token": token, "shift": shift, "shift_rms": shift_rms}


def _errors(reference, full, other, pooled: bool = False) -> Iterator[dict[str, float | None]]:
    columns = fp64_reference.errors(reference, full, other, pooled)
    for of_full, of_other, apart, correlation in zip(*(column.tolist() for column in columns), strict=True):
        known = correlation == correlation
        yield {"error_full": of_full, "error": of_other, "drift": apart, "correlation": correlation if known else None}


def compare(
    model: PreTrainedModel, reference: fp64_reference.Reference, ids: torch.Tensor, n_rows: int, check: bool
) -> Rows:
    """Score a text on every path and yield the rows."""
    ids, labels = ids[:, :-1], ids[0, -n_rows:]
    first = ids.shape[1] - n_rows
    text = tuple(ids[0].tolist())
    with in_fp64.widened(torch.float64):
        true = reference.of(text, lambda copied: at_once(copied, ids, n_rows))
    full = at_once(model, ids, n_rows)
    cached, cache = token_by_token(model, ids, n_rows)
    with ExitStack() as stack:
        stack.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation("eager")
        eager = at_once(model, ids, n_rows)
    for path, scored in ((CACHED, cached), (EAGER, eager)):
        yield from ({"path": path} | row for row in rows_of(true, full, scored, labels, first))
    if (early := off_by_one(model, ids, cache)) is not None:
        rows = rows_of(true.last(), full.last(), early, labels[-1:], ids.shape[1] - 1)
        yield from ({"path": OFF_BY_ONE} | row for row in rows)
    if check:
        with in_fp64.widened(torch.float64):
            own, _ = token_by_token(reference.model, ids, n_rows)
        for path, scored in ((CHECK, own), (AS_LOADED, at_once(reference.model, ids, n_rows))):
            rows = rows_of(true, true, scored, labels, first)
            yield from ({"path": path, "dtype": "float64"} | row for row in rows if row["place"] != "vocabulary")


def inputs(settings: WhichPathSettings) -> Inputs:
    """Name the models and the corpus, and refuse what cannot be run."""
    placement.dtype_on("float64", placement.device_of(settings.device))
    names = dict.fromkeys((settings.model, *settings.families))
    models = samples.identities(settings, names, settings.n_tokens)
    # One token more, so that the last one has a next one too.
    samples.check_corpus(settings, names, settings.n_samples, settings.n_tokens + 1)
    return {"models": models, "corpus": corpus.describe(settings.corpus)}


def measure(settings: WhichPathSettings, made_of: Inputs, writer: Writer) -> None:
    """Run every path of every model on every text."""
    for name in (model["asked_for"] for model in made_of["models"]):
        reference = fp64_reference.Reference(settings.dtypes)
        for dtype in settings.dtypes:
            loaded = samples.load(settings, name, dtype)
            reference.take(loaded.model)
            label = f"which path is right, {loaded.name}, {dtype}"
            for text in samples.pending(
                settings, writer, loaded, f"{name}|{dtype}", label, n_tokens=settings.n_tokens + 1
            ):
                n_tokens = len(text.sample.ids) - 1
                # A folder's text may be shorter than asked for.
                n_rows = min(settings.n_decoded, n_tokens // 2)
                check = dtype == settings.dtypes[0] and text.sample.index < _CHECKED
                rows = compare(loaded.model, reference, text.ids, n_rows, check)
                text.keep(rows, start=text.sample.start, n_tokens=n_tokens)


def work(settings: WhichPathSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = settings.n_samples
    return Work(settings.n_tokens, 3 * n_texts, settings.n_decoded * n_texts, settings.dtypes, in_fp64=2 * n_texts)


EXPERIMENT = Experiment("path_errors", WhichPathSettings, inputs, measure, work=work)
