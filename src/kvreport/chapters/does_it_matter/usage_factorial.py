"""What a user changes, factor by factor: a batch, padding, the kind of cache, greedy or sampled, the dtype.

Each cell writes a text after the same prompts, and keeps all of it, so any two cells can be compared.  Prompts have two
lengths; a batch without padding holds prompts of one length, and a padded batch both.  A single padded prompt is padded
as it is in a batch.

Rows, one a (model, dtype, choice, batch, padding, cache, sample): see ``data/README.md``.
"""


import torch

from kvbook.measuring import choosing, predictions
from kvbook.models.corpus import Sample
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.does_it_matter import DoesItMatterSettings, variants
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter.rows import BATCH, GREEDY, SAMPLED, SINGLE, UNPADDED, Cell

# Tokens by which every other group of prompts is longer.
LONGER = 5


def sizes(settings: DoesItMatterSettings) -> tuple[int, int]:
    """Return the tokens of the longer prompts, whose shorter ones can still be cut in two, and those written."""
    return max(4, settings.n_tokens // 16) + LONGER, settings.n_tokens // 8


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest, n_new = sizes(settings)
    return variants.inputs(settings, longest + 1 + n_new, settings.n_usage, longest)


def measure(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Write every prompt's text in every cell, in every dtype."""
    longest, n_new = sizes(settings)
    samples = variants.texts(settings, settings.n_usage, longest)
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        cells = [cell for cell in named.planned() if not (dtype in settings.greedy_only and cell.choice == SAMPLED)]
        if subject.baseline.model.config.model_type == "mpt":
            # It takes no positions, and would count padding behind a prompt.
            cells = [cell for cell in cells if cell.padding != named.RIGHT]
        units = {"|".join((dtype, *cell)): cell for cell in cells}
        for unit, cell in writer.pending(units, f"what a user changes, {dtype}: cell"):
            rows = texts_of(subject, cell, samples, n_new, longest + 1, settings.seed)
            writer.keep(unit, subject.about | cell._asdict(), rows)


def together(cell: Cell, samples: list[Sample]) -> list[list[Sample]]:
    """Put prompts into groups that are written together: of one length, or with padding of both lengths."""
    if cell.batch == SINGLE:
        return [[one] for one in samples]
    groups = variants.groups(samples)
    return groups if cell.padding == UNPADDED else [samples[first :: len(groups)] for first in range(len(groups))]


def texts_of(subject: variants.Subject, cell: Cell, samples: list[Sample], n_new: int, width: int, seed: int) -> Rows:
    """Write the texts of a cell."""
    model, choose = subject.baseline.model, variants.Chooser(cell.choice, seed)
    long = {one.index for group in variants.groups(samples)[1::2] for one in group}
    for group in together(cell, samples):
        # A smaller batch is filled up with copies, at whose texts nobody looks.
        some = group if cell.batch == SINGLE else [group[row % len(group)] for row in range(BATCH)]
        prompts = [subject.tensor(one.ids[: None if one.index in long else -LONGER]) for one in some]
        if cell.cache == named.LOOKUP:
            written = variants.write_by_lookup(model, prompts[0], n_new)
        else:
            indices = [one.index for one in some]
            written = variants.write(model, prompts, indices, n_new, choose, cell.cache, cell.padding, width)
        # Texts first: the last group's copies are beyond the group's end.
        for one, prompt, steps in zip(group, prompts, variants.to_the_end(model, written), strict=False):
            # A sampled token does not depend on which logit is the largest.
            gaps = " ".join(f"{_gap(step.scores):.4g}" for step in steps) if cell.choice == GREEDY else None
            yield {
                "sample": one.index, "source": one.source, "prompt_tokens": len(prompt),
                "path": " ".join(str(step.token) for step in steps), "gaps": gaps,
            }


def _gap(logits: torch.Tensor) -> float:
    """Return the distance of the two largest logits, in ulps of the largest."""
    return (choosing.margin(logits) / predictions.spacing(logits.max())).item()


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    longest, n_new = sizes(settings)
    # One cell, without a cache, takes a pass for each token.
    cached = len(list(named.planned())) - 1
    passes, steps = settings.n_usage * (cached + n_new), settings.n_usage * cached * n_new
    return Work(longest + n_new // 2, passes, steps, settings.dtypes)


EXPERIMENT = Experiment(
    "usage_factorial", DoesItMatterSettings, inputs, measure,
    fields=variants.FIELDS | {"n_usage", "n_tokens", "greedy_only"}, work=work,
)
