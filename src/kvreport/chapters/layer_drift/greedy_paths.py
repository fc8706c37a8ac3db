"""Issue 25420's opening post: greedy decoding by every way that the thread names.

Two switches take the posted loop to the right one: what is fed on top of the cache (the whole sequence again, as
posted, or the last token alone), and whether position ids are passed (the thread's explanation) or left to the model.
Beside them stand decoding without a cache, and the library's `generate`.  All choose by one rule, and none stops at an
end token.

The document's prompt comes first; further ones are the beginnings of texts, and are decoded to the first token that
differs from the one that is written without a cache.

Rows, one a (model, dtype, prompt, method, step): see ``data/README.md``.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvbook import progress
from kvbook.measuring import choosing
from kvbook.models import corpus, kept, loading
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer, samples
from kvreport.chapters.layer_drift import LayerDriftSettings
from kvreport.chapters.layer_drift import rows as named

# Of a prompt that is the beginning of a text.
PROMPT_TOKENS = 16


# The loops that feed the whole sequence again on top of the cache, as the opening post did; the others the last token.
FEED_WHOLE = (named.POSTED, named.POSITIONS)
# Those that pass position ids: for each token the place at which it stands in the text.
GIVE_POSITIONS = (named.POSITIONS, named.LAST_POSITIONS)


class Step(NamedTuple):
    """One decoding step.

    Attributes
    ----------
    logits : Tensor of float32, shape (vocabulary_size,)
        What the token was chosen by.  `generate` gives them as float32, which holds every 16-bit number.
    token : int
        The token written.
    cache_length : int
        Positions held by the cache after the step.
    """

    logits: torch.Tensor
    token: int
    cache_length: int

    def row(self) -> Row:
        """Return what is recorded; equal digests are equal bits."""
        return {
            "logits_sha256": hashlib.sha256(self.logits.cpu().numpy().tobytes()).hexdigest()[:16], "token": self.token,
            "margin": choosing.margin(self.logits).item(), "cache_length": self.cache_length,
        }


def _step(logits: torch.Tensor, cache_length: int) -> Step:
    logits = logits.float()
    return Step(logits, choosing.greedy(logits).item(), cache_length)


def decode_uncached(model: PreTrainedModel, ids: torch.Tensor, n_new_tokens: int) -> Iterator[Step]:
    """Decode greedily, running the whole sequence anew at each step."""
    for _, logits, _ in choosing.written(model, ids, n_new_tokens):
        yield _step(logits[0], 0)


def decode_cached(
    model: PreTrainedModel, ids: torch.Tensor, n_new_tokens: int, loop: str, limit: int | None = None
) -> Iterator[Step]:
    """Decode greedily with a cache, by one of the loops of `rows.LOOPS`."""
    cache = None
    for _ in range(n_new_tokens):
        fed = ids if cache is None or loop in FEED_WHOLE else ids[:, -1:]
        held = 0 if cache is None else cache.get_seq_length()
        if limit is not None and held + fed.shape[1] > limit:
            return
        places = torch.arange(ids.shape[1] - fed.shape[1], ids.shape[1], device=ids.device)[None]
        given = places if loop in GIVE_POSITIONS else None
        output = model(fed, past_key_values=cache, use_cache=True, position_ids=given)
        cache = output.past_key_values
        step = _step(output.logits[0, -1], cache.get_seq_length())
        yield step
        ids = torch.hstack([ids, ids.new_tensor([[step.token]])])


def decode_by_generate(model: PreTrainedModel, ids: torch.Tensor, n_new_tokens: int) -> Iterator[Step]:
    """Decode greedily through the library, with its default cache.

    Parameters and yields as for `decode_uncached`.
    """
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new_tokens, return_dict_in_generate=True,
        # What a model's own configuration may add to the largest logit, the loops do not have.
        output_logits=True, do_sample=False, eos_token_id=None, repetition_penalty=1.0,
    )
    held = ids.shape[1]
    for index, logits in enumerate(output.logits):
        yield Step(logits[0].float(), output.sequences[0, held + index].item(), held + index)


def inputs(settings: LayerDriftSettings) -> Inputs:
    """Name both models, and refuse what cannot be run."""
    models = samples.identities(settings, (settings.model, settings.reference_model), settings.n_tokens)
    for model in models:
        tokenizer = kept.tokenizer(model["asked_for"], samples.weights_of(settings, model["asked_for"]))
        longest = max(len(prompt) for prompt in prompts(settings, tokenizer))
        loading.check_length(model, longest + settings.n_new_tokens, "n_new_tokens")
    # The document's prompt alone needs no corpus.
    return {"models": models} | ({"corpus": corpus.describe(settings.corpus)} if settings.n_prompts > 1 else {})


def prompts(settings: LayerDriftSettings, tokenizer) -> list[list[int]]:
    """Return the ids of every prompt, the document's first; it belongs to seed 0, so that seeds share none."""
    first = [tokenizer(settings.prompt)["input_ids"]] if settings.seed == 0 else []
    further = settings.n_prompts - len(first)
    if not further:
        return first
    texts = corpus.samples(settings.corpus, tokenizer, further, PROMPT_TOKENS, settings.seed)
    return [*first, *(sample.ids for sample in texts)]


def _rows(loaded: loading.Loaded, ids: torch.Tensor, length: int, limit: int | None, whole: bool) -> Rows:
    """Decode by every method; unless a prompt is decoded whole, to the first token that differs."""
    uncached = list(decode_uncached(loaded.model, ids, length))
    for method in named.METHODS:
        steps, diverged = uncached, False
        if method == named.GENERATE:
            steps = decode_by_generate(loaded.model, ids, length)
        elif method != named.UNCACHED:
            steps = decode_cached(loaded.model, ids, length, method, limit)
        for index, (step, alone) in enumerate(zip(steps, uncached, strict=False)):
            ties = dict.fromkeys(named.TIES)
            if not diverged and step.token != alone.token:
                tied = (choosing.tied(one.logits, step.token, alone.token) for one in (step, alone))
                ties, diverged = dict(zip(named.TIES, tied, strict=True)), True
            yield {"method": method, "step": index, "text": loaded.tokenizer.decode([step.token])} | step.row() | ties
            if diverged and not whole:
                # After it the two decode different texts, and a loop that feeds all again takes long.
                break


def measure(settings: LayerDriftSettings, made_of: Inputs, writer: Writer) -> None:
    """Decode by every method, for both models and every dtype."""
    todo = [(model, dtype) for model in made_of["models"] for dtype in settings.dtypes]
    for model, dtype in progress.track(todo, label="greedy decoding: model and dtype"):
        loaded, limit = samples.load(settings, model["asked_for"], dtype), model["context_length"]
        case, of_all = f"{model['asked_for']}|{dtype}", prompts(settings, loaded.tokenizer)
        units = {f"{case}|{loaded.tokenizer.decode(prompt)}": prompt for prompt in of_all}
        for unit, prompt in writer.pending(units, "prompt"):
            ids = torch.tensor([prompt], device=loaded.model.device)
            about = loaded.about | {"prompt": unit.removeprefix(f"{case}|")}
            # The document's prompt is decoded to its end.
            whole = settings.seed == 0 and prompt == of_all[0]
            writer.keep(unit, about, _rows(loaded, ids, settings.n_new_tokens, limit, whole))


def work(settings: LayerDriftSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # On average half of the text; three of the methods read all of it at every step, the others one token.
    steps = 3 * settings.n_new_tokens * settings.n_prompts
    return Work(max(1, settings.n_new_tokens // 2), steps, steps, settings.dtypes)


EXPERIMENT = Experiment(
    "greedy_paths", LayerDriftSettings, inputs, measure,
    fields=frozenset(LayerDriftSettings.model_fields) - {"n_samples", "n_tokens"},
    revision=named.EXPERIMENTS["greedy_paths"], work=work,
)
