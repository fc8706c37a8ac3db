"""The model goes on from a prompt by itself: at which token each way first leaves the baseline's text.

The baseline writes one text at a time without a cache: at each step it reads the whole text anew, as `generate` does
with ``use_cache=False``.  Beside it the same text is written with a cache, alone and in a batch of eight, each only to
its first token that differs: up to there two ways hold the same tokens, and after it they write different texts.

Assisted decoding by transformers' own `generate` writes greedily, with the model as its own assistant: so nearly every
draft is taken and every verification reads as many tokens at once as it may.

The other ways do not write.  One pass of each over the baseline's text tells what it would have chosen at each step, so
the shape of that pass is part of what they change; `no cache, one pass` shows by how much.

A choice is the largest logit, or the largest of logit + Gumbel noise, which is a sample at temperature 1.  The noise is
the same for all ways, so two ways that sample differently do so because of their logits.  A text ends with the token
that ends it, for all ways.

Rows, one a (model, dtype, choice, way, sample): see ``data/README.md``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from kvbook.measuring import choosing, predictions
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter import variants
from kvreport.chapters.does_it_matter.rows import ASSISTED, BASELINE, CACHED, CHOICES, GREEDY
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

ONE_PASS = variants.Variant(named.ONE_PASS, variants.whole)
# The ways that read the baseline's text.
WATCHED = (ONE_PASS, variants.KV_INT8, variants.KV_INT4, variants.WEIGHTS_4)


@dataclass(frozen=True)
class Step:
    """One choice.

    Attributes
    ----------
    token : int
        What was chosen.
    scores : Tensor, shape (vocabulary_size,)
        What it is the largest of.
    """

    token: int
    scores: torch.Tensor


@dataclass(frozen=True)
class Chooser:
    """Chooses tokens from logits, greedily or with noise that all ways share.

    Attributes
    ----------
    choice : {"greedy", "sampled"}
        How.
    seed : int
        Of the noise.
    """

    choice: str
    seed: int

    def __call__(self, logits: torch.Tensor, text: int, step: int) -> Step:
        """Choose from one row."""
        if self.choice != GREEDY:
            # 16-bit logits plus the noise have to be told apart in more than 16 bits.
            logits = logits.float() + predictions.gumbel(self.seed, text, step, len(logits)).to(logits.device)
        return Step(choosing.greedy(logits).item(), logits)


def write_uncached(
    model: PreTrainedModel, prompt: torch.Tensor, sample: int, n_new_tokens: int, choose: Chooser
) -> list[Step]:
    """Continue one prompt without a cache, to the token that ends the text."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    ids, steps = prompt, []
    while len(steps) < n_new_tokens and not (steps and steps[-1].token in ends):
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        steps.append(choose(logits, sample, len(steps)))
        ids = torch.hstack([ids, ids.new_tensor([[steps[-1].token]])])
    return steps


def write_cached(
    model: PreTrainedModel, prompts: torch.Tensor, samples: list[int], n_new_tokens: int, choose: Chooser
) -> Iterator[list[Step]]:
    """Continue prompts of one length together with a cache; yield at each step every text's choice."""
    cache, fed = DynamicCache(config=model.config), prompts
    for step in range(n_new_tokens):
        logits = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen = [choose(row, sample, step) for row, sample in zip(logits, samples, strict=True)]
        yield chosen
        fed = prompts.new_tensor([[one.token] for one in chosen])


def write_assisted(model: PreTrainedModel, prompt: torch.Tensor, n_new_tokens: int) -> list[Step]:
    """Continue a prompt by transformers' assisted decoding, greedily, with the model as its own assistant."""
    own = model.generation_config
    asked = GenerationConfig(
        max_new_tokens=n_new_tokens, do_sample=False, bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id, num_assistant_tokens=variants.AT_ONCE - 1,
        num_assistant_tokens_schedule="constant",
        # 0: no draft is cut short because the assistant is unsure.
        assistant_confidence_threshold=0.0,
        return_dict_in_generate=True, output_logits=True,
    )
    # The assistant takes how much to draft from its own configuration.
    drafting = {
        name: getattr(asked, name) for name in asked.to_dict() if name.startswith(("num_assistant", "assistant_"))
    }
    before = {name: getattr(own, name) for name in drafting}
    said = logging.get_verbosity()
    try:
        own.update(**drafting)
        # transformers calls its own `generate` in a way that it warns about.
        logging.set_verbosity_error()
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, generation_config=asked, assistant_model=model)
    finally:
        logging.set_verbosity(said)
        own.update(**before)
    tokens = output.sequences[0, prompt.shape[1] :].tolist()
    return [Step(token, logits[0]) for token, logits in zip(tokens, output.logits, strict=True)]


def watch(baselines: list[list[Step]], written: Iterable[list[Step]]) -> list[dict[str, Any]]:
    """Hold texts that are written together against the baseline's, and stop where each has diverged or ended."""
    found: dict[int, dict[str, Any]] = {}
    for place, steps in enumerate(written):
        for text, (baseline, step) in enumerate(zip(baselines, steps, strict=False)):
            if text not in found and place < len(baseline) and step.token != baseline[place].token:
                found[text] = _divergence(baseline[place], step) | {"steps": place + 1, "parted": 1}
        if all(text in found or place + 1 >= len(baseline) for text, baseline in enumerate(baselines)):
            break
    return [found.get(text, {"steps": len(baseline), "parted": 0}) for text, baseline in enumerate(baselines)]


def _divergence(baseline: Step, step: Step) -> dict[str, Any]:
    return {
        "token": step.token, "instead": baseline.token,
        "margin": choosing.margin(step.scores).item(), "margin_baseline": choosing.margin(baseline.scores).item(),
        "tied": choosing.tied(step.scores, step.token, baseline.token),
        "tied_baseline": choosing.tied(baseline.scores, step.token, baseline.token),
    }


def prompt_length(settings: DoesItMatterSettings) -> int:
    """Return the tokens of a prompt: a quarter of the text."""
    return settings.n_tokens // 4


def inputs(settings: DoesItMatterSettings) -> dict[str, Any]:
    """Name the model and the corpus, and refuse what cannot be run."""
    return variants.inputs(settings, settings.n_tokens, settings.n_samples, prompt_length(settings))


def measure(settings: DoesItMatterSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Write and watch, in every dtype."""
    length = prompt_length(settings)
    samples = variants.texts(settings, settings.n_samples, length)
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        only = dtype in settings.greedy_only
        units = {
            f"{dtype}|{choice}|{number}": (choice, group)
            for choice in ((GREEDY,) if only else CHOICES) for number, group in enumerate(variants.groups(samples))
        }
        for unit, (choice, group) in writer.pending(units, f"where texts diverge, {dtype}: group"):
            prompts, indices = subject.tensor([one.ids for one in group]), [one.index for one in group]
            choose = Chooser(choice, settings.seed)
            with torch.inference_mode():
                found = diverge(subject, prompts, indices, settings.n_tokens - length, choose, cached_only=only)
                about = [{"choice": choice, "sample": one.index, "source": one.source} for one in group]
                writer.append(unit, [subject.about | about[text] | row for text, row in found])


def diverge(
    subject: variants.Subject, prompts: torch.Tensor, samples: list[int], n_new_tokens: int, choose: Chooser,
    cached_only: bool = False,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Write every prompt's text without a cache, and hold the other ways against it."""
    model, prompt = subject.baseline.model, prompts.shape[1]
    singles = list(prompts.split(1))
    baselines = [
        write_uncached(model, single, sample, n_new_tokens, choose)
        for single, sample in zip(singles, samples, strict=True)
    ]
    none = dict.fromkeys(("path", "margins", "token", "instead", "margin", "margin_baseline", "tied", "tied_baseline"))
    for text, steps in enumerate(baselines):
        path = " ".join(str(step.token) for step in steps)
        margins = " ".join(f"{choosing.margin(step.scores).item():.6g}" for step in steps)
        yield text, none | {"way": BASELINE, "steps": len(steps), "parted": 0, "path": path, "margins": margins}

    def watched(way: str, baselines: list[list[Step]], written: Iterable[list[Step]]) -> list[dict[str, Any]]:
        return [none | {"way": way} | row for row in watch(baselines, written)]

    # A smaller group is filled up with copies, whose steps nobody looks at.
    filled = [index % len(samples) for index in range(variants.BATCH)]
    together = write_cached(model, prompts[filled], [samples[index] for index in filled], n_new_tokens, choose)
    yield from enumerate(watched(named.TOGETHER, baselines, together))
    for text, (single, sample, steps) in enumerate(zip(singles, samples, baselines, strict=True)):
        alone = write_cached(model, single, [sample], n_new_tokens, choose)
        yield text, watched(CACHED, [steps], alone)[0]
        if cached_only:
            continue
        if choose.choice == GREEDY:
            assisted = write_assisted(model, single, n_new_tokens)
            yield text, watched(ASSISTED, [steps], ([step] for step in assisted))[0]
        # The last token written is only predicted: the row before it is the last one that chose.
        ids = torch.cat([single, single.new_tensor([[step.token for step in steps[:-1]]])], 1)
        for way in variants.possible(model, WATCHED):
            # One token less of prompt, so that the row which chooses the first token is on the cache as well.
            read = _read(subject.pieces(way, ids, prompt - 1), prompt, sample, choose)
            yield text, watched(way.name, [steps], ([step] for step in read))[0]


def _read(pieces: Iterable[variants.Piece], prompt: int, sample: int, choose: Chooser) -> Iterator[Step]:
    """Choose at every step of a text that is given."""
    for piece in pieces:
        for row, logits in enumerate(piece.logits, piece.start - (prompt - 1)):
            # A piece that holds the prompt too begins, for us, with the row that chose the first token.
            if row >= 0:
                yield choose(logits, sample, row)


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = len(CHOICES) * settings.n_samples
    written = settings.n_tokens - prompt_length(settings)
    # A batch is written at once; assisted decoding is greedy and one text at a time, and drafts what it verifies.
    n_steps = written * (n_texts * (1 + 1 / variants.BATCH) + settings.n_samples)
    # On average, the baseline reads little more than half of the text.
    n_tokens = (settings.n_tokens + prompt_length(settings)) // 2
    return Work(n_tokens, (written + 2 * len(WATCHED)) * n_texts, n_steps, settings.dtypes, copies=3)


EXPERIMENT = Experiment(
    "first_divergence", DoesItMatterSettings, inputs, measure,
    fields=variants.FIELDS | {"n_samples", "n_tokens", "greedy_only"}, revision=2, work=work,
)
