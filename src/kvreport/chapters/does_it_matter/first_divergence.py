"""The model goes on from a prompt by itself: at which token each way first leaves the baseline's text.

Up to the first token that differs, two paths hold the same tokens, so one needs not decode twice to see where they part.  A
path is written with a cache, its prompts in a batch; one pass of the baseline over it tells what the baseline would have
chosen at each step, and the first step at which that is another token is where decoding without a cache leaves this path.
Every other way is asked the same along the part that is the baseline's own path.  Where that part ends without a difference
of its own, the way is censored: how long it would have stayed together is not known, only that it did so until there.

Assisted decoding by transformers' own `generate` writes a path of its own, greedily, with the model as its own assistant: so
nearly every draft is taken and every verification reads as many tokens at once as it may.  Up to the first token at which it
leaves the baseline it holds the baseline's tokens, so that it can be compared without a further pass.

A choice is the largest logit, or the largest of logit + Gumbel noise, which is a sample at temperature 1.  The noise is the
same for all ways, so two ways that sample differently do so because of their logits.

Rows, one a (model, dtype, choice, way, sample): see ``data/README.md``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from kvbook import progress
from kvbook.measuring import agreement, predictions
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.does_it_matter import variants
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

GREEDY, SAMPLED = "greedy", "sampled"
CHOICES = (GREEDY, SAMPLED)
# The way that wrote the path.
WRITER = variants.TOKENS.name
# The one that `generate` writes with an assistant.
ASSISTED = "assisted decoding"
# The ways that are watched along it.
WATCHED = (variants.OTHER_DTYPE, variants.KV_INT8, variants.KV_INT4, variants.WEIGHTS_4)


class Chooser:
    """Chooses tokens from logits, greedily or with noise that all ways share.

    Parameters
    ----------
    choice : {"greedy", "sampled"}
        How.
    seed : int
        Of the noise.
    """

    def __init__(self, choice: str, seed: int) -> None:
        self._choice, self._seed = choice, seed

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self._choice == GREEDY

    def __call__(self, logits: torch.Tensor, text: int, step: int) -> torch.Tensor:
        """Choose from consecutive rows."""
        if self.is_greedy:
            return logits.argmax(-1)
        noise = [predictions.gumbel(self._seed, text, step + row, logits.shape[-1]) for row in range(len(logits))]
        # 16-bit logits plus the noise have to be told apart in more than 16 bits.
        return (logits.float() + torch.stack(noise).to(logits.device)).argmax(-1)


def write(
    model: PreTrainedModel, prompts: torch.Tensor, samples: list[int], n_new_tokens: int, choose: Chooser
) -> torch.Tensor:
    """Continue prompts with a cache, a batch at a time."""
    cache = DynamicCache(config=model.config)
    fed, written = prompts, []
    for step in range(n_new_tokens):
        logits = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:]
        fed = torch.stack([choose(row, sample, step) for row, sample in zip(logits, samples, strict=True)])
        written.append(fed)
    return torch.cat(written, 1)


def write_assisted(model: PreTrainedModel, prompt: torch.Tensor, n_new_tokens: int) -> list[int]:
    """Continue a prompt by transformers' assisted decoding, greedily, with the model as its own assistant."""
    own = model.generation_config
    asked = GenerationConfig(
        max_new_tokens=n_new_tokens, do_sample=False, bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id, num_assistant_tokens=variants.AT_ONCE - 1,
        num_assistant_tokens_schedule="constant",
        # 0: no draft is cut short because the assistant is unsure.
        assistant_confidence_threshold=0.0,
    )  # fmt: skip
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
        ids = model.generate(prompt, attention_mask=mask, generation_config=asked, assistant_model=model)
    finally:
        logging.set_verbosity(said)
        own.update(**before)
    return ids[0, prompt.shape[1] :].tolist()


def ended(path: list[int], ends: set[int]) -> int:
    """Give the number of tokens up to the first one that ends a text, that token included; all where none does."""
    return next((index + 1 for index, token in enumerate(path) if token in ends), len(path))


def watch(baseline: list[int], other: list[int], most: int) -> tuple[int, int]:
    """Tell for how many steps two lists of choices were watched, and whether they differ at the last of them."""
    first = agreement.first_divergence(baseline[:most], other[:most])
    return (most, 0) if first is None else (first + 1, 1)


def inputs(settings: DoesItMatterSettings) -> dict[str, Any]:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest = settings.n_tokens + max(variants.PADS)
    return variants.inputs(settings, longest, settings.n_samples, settings.n_tokens // 2)


def measure(settings: DoesItMatterSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Write and watch, in every dtype."""
    half = settings.n_tokens // 2
    samples = variants.texts(settings, settings.n_samples, half)
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        groups = [samples[first : first + variants.BATCH] for first in range(0, len(samples), variants.BATCH)]
        work = [(choice, number) for choice in CHOICES for number in range(len(groups))]
        for choice, number in progress.track(work, len(work), f"where paths part, {dtype}: group"):
            if (unit := f"{dtype}|{choice}|{number}") in writer.done:
                continue
            group = groups[number]
            about = {
                "model": subject.baseline.name, "weights": subject.baseline.weights, "dtype": dtype, "choice": choice,
            }  # fmt: skip
            indices = [sample.index for sample in group]
            with torch.inference_mode():
                found = part(
                    subject, subject.tensor([sample.ids for sample in group]), indices, settings.n_tokens - half,
                    Chooser(choice, settings.seed),
                )  # fmt: skip
                rows = [about | {"sample": indices[text], "source": group[text].source} | row for text, row in found]
            writer.append(unit, rows)


def part(
    subject: variants.Subject, prompts: torch.Tensor, samples: list[int], n_new_tokens: int, choose: Chooser
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Write one path a prompt and watch every way along it."""
    model, prompt = subject.baseline.model, prompts.shape[1]
    written = write(model, prompts, samples, n_new_tokens, choose)
    # The last token written is only predicted: the row before it is the last one that chose.
    ids = torch.cat([prompts, written], 1)[:, :-1]
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    paths = written.tolist()

    def chosen(pieces: Iterator[variants.Piece]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in paths]
        for piece in pieces:
            # A piece that holds the prompt too begins, for us, with the row that chose the first token.
            begin = max(0, prompt - 1 - piece.start)
            step = piece.start + begin - (prompt - 1)
            tokens[piece.text] += choose(piece.logits[begin:], samples[piece.text], step).tolist()
        return tokens

    baseline = chosen(variants.whole(variants.Reader(model), ids, prompt))
    shared = {}
    for text, path in enumerate(paths):
        steps, parted = watch(baseline[text], path, ended(path, ends))
        shared[text] = steps
        yield text, {
            "way": WRITER, "steps": steps, "parted": parted, "path": " ".join(map(str, path)),
            "instead": baseline[text][steps - 1] if parted else None,
        }  # fmt: skip
    if choose.is_greedy:
        for text in range(len(paths)):
            path = write_assisted(model, prompts[text : text + 1], n_new_tokens)
            steps, parted = watch(baseline[text], path, shared[text])
            yield text, {"way": ASSISTED, "steps": steps, "parted": parted, "path": None, "instead": None}
    for way in variants.possible(model, WATCHED):
        # One token less of prompt, so that the row which chooses the first token is on the cache as well.
        for text, tokens in enumerate(chosen(subject.pieces(way, ids, prompt - 1))):
            steps, parted = watch(baseline[text], tokens, shared[text])
            yield text, {"way": way.name, "steps": steps, "parted": parted, "path": None, "instead": None}


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    n_texts = len(CHOICES) * settings.n_samples
    written = settings.n_tokens - settings.n_tokens // 2
    # A batch is written at once; assisted decoding is greedy and one text at a time, and drafts what it verifies.
    n_steps = written * (n_texts / variants.BATCH + settings.n_samples)
    return Work(settings.n_tokens, (1 + len(WATCHED)) * n_texts, n_steps, settings.dtypes, copies=3)


EXPERIMENT = Experiment(
    "first_divergence",
    DoesItMatterSettings,
    inputs,
    measure,
    fields=variants.FIELDS | {"n_samples", "n_tokens"},
    work=work,
)
