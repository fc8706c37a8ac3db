"""The model goes on from a prompt by itself: at which token each way first leaves the baseline's text.

The baseline writes one text at a time without a cache: at each step it reads the whole text anew, as `generate` does
with ``use_cache=False``.  Beside it the same text is written with a cache, alone and in a batch of eight, each only to
its first token that differs: up to there two ways hold the same tokens, and after it they write different texts.

The other ways do not write.  One pass of each over the baseline's text tells what it would have chosen at each step, so
the shape of that pass is part of what they change; `no cache, one pass` shows by how much.

A choice is the largest logit, or the largest of logit + Gumbel noise, which is a sample at temperature 1.  The noise is
the same for all ways, so two ways that sample differently do so because of their logits.  A text ends with the token
that ends it, for all ways.

A second experiment follows both texts past the first token that differs.  With that token in its place the text is
continued with a cache, and the two are compared step by step: how far the predictions are apart when each follows its
own tokens, beside how far they are apart on one text's tokens.

A third asks what a user changes, factor by factor: a batch, padding, the kind of cache, greedy or sampled, the dtype.
Each cell writes a text after the same prompts, and keeps all of it, so any two cells can be compared.  Prompts have two
lengths; a batch without padding holds prompts of one length, and a padded batch both.  A single padded prompt is padded
as it is in a batch.

Rows, one a (model, dtype, choice, way, sample), one a (model, dtype, sample, offset), and one a (model, dtype, choice,
batch, padding, cache, sample): see ``data/README.md``.
"""

from collections.abc import Iterable, Iterator

import pandas as pd
import torch

from kvbook import fingerprint
from kvbook.measuring import choosing, predictions
from kvbook.models import corpus, kept
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer
from kvreport.chapters.does_it_matter import DoesItMatterSettings, variants, writing
from kvreport.chapters.does_it_matter import rows as named
from kvreport.chapters.does_it_matter.rows import BASELINE, CACHED, CHOICES, GREEDY, NO_CACHE, SAMPLED, Cell
from kvreport.chapters.does_it_matter.writing import Chooser, Step, to_the_end, write

ONE_PASS = variants.Variant(named.ONE_PASS, variants.whole)
# The ways that read the baseline's text.
WATCHED = (ONE_PASS, variants.KV_INT8, variants.KV_INT4, variants.WEIGHTS_4)


def watch(baselines: list[list[Step]], written: Iterable[list[Step]]) -> list[Row]:
    """Hold texts that are written together against the baseline's, and stop where each has diverged or ended."""
    found: dict[int, Row] = {}
    for place, steps in enumerate(written):
        for text, (baseline, step) in enumerate(zip(baselines, steps, strict=False)):
            if text not in found and place < len(baseline) and step.token != baseline[place].token:
                found[text] = _divergence(baseline[place], step) | {"steps": place + 1, "parted": 1}
        if all(text in found or place + 1 >= len(baseline) for text, baseline in enumerate(baselines)):
            break
    return [found.get(text, {"steps": len(baseline), "parted": 0}) for text, baseline in enumerate(baselines)]


def _divergence(baseline: Step, step: Step) -> Row:
    return {
        "token": step.token, "instead": baseline.token,
        "margin": choosing.margin(step.scores).item(), "margin_baseline": choosing.margin(baseline.scores).item(),
        "tied": choosing.tied(step.scores, step.token, baseline.token),
        "tied_baseline": choosing.tied(baseline.scores, step.token, baseline.token),
    }


def prompt_length(settings: DoesItMatterSettings) -> int:
    """Return the tokens of a prompt: a quarter of the text, after what all chats begin with."""
    return corpus.opening(settings.corpus, kept.tokenizer(settings.model, settings.weights)) + settings.n_tokens // 4


def n_written(settings: DoesItMatterSettings) -> int:
    """Return how many tokens are written: the rest of the text."""
    return settings.n_tokens - settings.n_tokens // 4


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    length = prompt_length(settings)
    return variants.inputs(settings, length + n_written(settings), settings.n_samples, length)


def measure(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Write and watch, in every dtype."""
    samples = variants.texts(settings, settings.n_samples, prompt_length(settings))
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
            found = diverge(subject, prompts, indices, n_written(settings), choose, cached_only=only)
            about = [{"choice": choice, "sample": one.index, "source": one.source} for one in group]
            writer.keep(unit, subject.about, (about[text] | row for text, row in found))


def diverge(
    subject: variants.Subject, prompts: torch.Tensor, samples: list[int], n_new_tokens: int, choose: Chooser,
    cached_only: bool = False,
) -> Iterator[tuple[int, Row]]:
    """Write every prompt's text without a cache, and hold the other ways against it."""
    model, prompt = subject.baseline.model, prompts.shape[1]
    baselines = [
        to_the_end(model, write(model, [one], [sample], n_new_tokens, choose, NO_CACHE))[0]
        for one, sample in zip(prompts, samples, strict=True)
    ]
    none = dict.fromkeys(("path", "margins", "token", "instead", "margin", "margin_baseline", "tied", "tied_baseline"))
    for text, steps in enumerate(baselines):
        path = " ".join(str(step.token) for step in steps)
        margins = " ".join(f"{choosing.margin(step.scores).item():.6g}" for step in steps)
        yield text, none | {"way": BASELINE, "steps": len(steps), "parted": 0, "path": path, "margins": margins}

    def watched(way: str, baselines: list[list[Step]], written: Iterable[list[Step]]) -> list[Row]:
        return [none | {"way": way} | row for row in watch(baselines, written)]

    # A smaller group is filled up with copies, whose steps nobody looks at.
    filled = [index % len(samples) for index in range(variants.BATCH)]
    together = write(model, prompts[filled], [samples[index] for index in filled], n_new_tokens, choose)
    yield from enumerate(watched(named.TOGETHER, baselines, together))
    for text, (single, sample, steps) in enumerate(zip(prompts.split(1), samples, baselines, strict=True)):
        yield text, watched(CACHED, [steps], write(model, single, [sample], n_new_tokens, choose))[0]
        if cached_only:
            continue
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
    written = n_written(settings)
    # A batch is written at once.
    n_steps = written * n_texts * (1 + 1 / variants.BATCH)
    # On average, the baseline reads little more than half of the text.
    n_tokens = prompt_length(settings) + written // 2
    return Work(n_tokens, (written + 2 * len(WATCHED)) * n_texts, n_steps, settings.dtypes, copies=3)


EXPERIMENT = Experiment(
    "first_divergence", DoesItMatterSettings, inputs, measure,
    fields=variants.FIELDS | {"n_samples", "n_tokens", "greedy_only"}, revision=2, work=work,
)


# Steps before and after the divergence that are looked at.
BEFORE, BEHIND = 8, 24


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Choose the greedy texts that diverged, each with the uncached text."""
    greedy = rows[rows["choice"] == GREEDY]
    keys = ["dtype", "sample"]
    cached = greedy[(greedy["way"] == CACHED) & (greedy["parted"] == 1)]
    uncached = greedy.loc[greedy["way"] == BASELINE, [*keys, "path"]]
    return cached[[*keys, "source", "steps", "token"]].merge(uncached, on=keys)


def inputs_after(settings: DoesItMatterSettings) -> Inputs | None:
    """Name the pairs of texts beside model and corpus; None where no path has left the baseline's."""
    parted = pairs(EXPERIMENT.run(settings).rows)
    if parted.empty:
        return None
    return inputs(settings) | {"pairs": fingerprint.of_values(parted.to_dict("records"))}


def measure_after(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Compare the continuations of every pair."""
    parted = pairs(EXPERIMENT.run(settings).rows)
    samples = variants.texts(settings, settings.n_samples, prompt_length(settings))
    choose = Chooser(GREEDY, settings.seed)
    for dtype, some in parted.groupby("dtype", sort=False):
        subject = variants.Subject(settings, dtype)
        units = {f"{dtype}|{pair.sample}": pair for pair in some.itertuples()}
        for unit, pair in writer.pending(units, f"after the divergence, {dtype}: pair"):
            about = subject.about | {"sample": pair.sample, "source": pair.source}
            path = [int(token) for token in str(pair.path).split()]
            prompt = subject.tensor([samples[pair.sample].ids])
            writer.keep(unit, about, follow(subject, prompt, path, int(pair.steps), int(pair.token), choose))


def follow(
    subject: variants.Subject, prompt: torch.Tensor, path: list[int], steps: int, token: int, choose: Chooser,
) -> Rows:
    """Compare a path with the one that takes another token at a step."""
    model, length = subject.baseline.model, prompt.shape[1]
    last = min(len(path), steps + BEHIND)
    one = torch.cat([prompt, prompt.new_tensor([path[:last]])], 1)
    begun = torch.cat([one[:, : length + steps - 1], one.new_tensor([[token]])], 1)
    written = [step.token for (step,) in write(model, begun, [0], last - steps, choose)]
    other = torch.cat([begun, begun.new_tensor([written])], 1)
    # Row `length - 1 + step` chose the token of that step.
    rows = slice(length - 1 + max(0, steps - 1 - BEFORE), length - 1 + last)
    full, free = (next(variants.whole(model, ids[:, :-1], length)).logits[rows] for ids in (one, other))
    # Two tokens first: transformers' MPT makes no mask for a single one on an empty cache, and fails.
    forced = torch.cat([piece.logits for piece in subject.pieces(variants.CHUNKS, one[:, :-1], 2)])
    forced = forced[rows.start - 2 : rows.stop - 2]
    targets = one[0, rows.start + 1 : rows.stop + 1]
    drift, apart = (predictions.compare(full, logits, targets).kl.tolist() for logits in (forced, free))
    equal = (targets == other[0, rows.start + 1 : rows.stop + 1]).tolist()
    for index, (kl_forced, kl_free, same) in enumerate(zip(drift, apart, equal, strict=True)):
        offset = rows.start + index - (length - 1) - (steps - 1)
        yield {
            "offset": offset, "kl_forced": kl_forced,
            # Up to the divergence both have the same tokens, and the paths differ by the cache alone.
            "kl_free": kl_forced if offset <= 0 else kl_free, "token_equal": int(same),
        }


def work_after(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # At most: as if every greedy path parted.
    return Work(settings.n_tokens, 3 * settings.n_samples, 2 * BEHIND * settings.n_samples, settings.dtypes)


AFTER = Experiment(
    "after_divergence", DoesItMatterSettings, inputs_after, measure_after, fields=EXPERIMENT.fields, revision=2,
    work=work_after,
)


# Tokens by which every other group of prompts is longer.
LONGER = 5


def sizes(settings: DoesItMatterSettings) -> tuple[int, int]:
    """Return the tokens of the longer prompts, whose shorter ones can still be cut in two, and those written."""
    return max(4, settings.n_tokens // 16) + LONGER, settings.n_tokens // 8


def inputs_of_usage(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest, n_new = sizes(settings)
    return variants.inputs(settings, longest + 1 + n_new, settings.n_usage, longest)


def measure_usage(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
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


def together(cell: Cell, samples: list[corpus.Sample]) -> list[list[corpus.Sample]]:
    """Put prompts into groups that are written together: of one length, or with padding of both lengths."""
    if cell.batch == named.SINGLE:
        return [[one] for one in samples]
    groups = variants.groups(samples)
    return groups if cell.padding == named.UNPADDED else [samples[first :: len(groups)] for first in range(len(groups))]


def texts_of(
    subject: variants.Subject, cell: Cell, samples: list[corpus.Sample], n_new: int, width: int, seed: int
) -> Rows:
    """Write the texts of a cell."""
    model, choose = subject.baseline.model, Chooser(cell.choice, seed)
    long = {one.index for group in variants.groups(samples)[1::2] for one in group}
    for group in together(cell, samples):
        # A smaller batch is filled up with copies, at whose texts nobody looks.
        some = group if cell.batch == named.SINGLE else [group[row % len(group)] for row in range(named.BATCH)]
        prompts = [subject.tensor(one.ids[: None if one.index in long else -LONGER]) for one in some]
        if cell.cache == named.LOOKUP:
            written = writing.write_by_lookup(model, prompts[0], n_new)
        else:
            indices = [one.index for one in some]
            written = write(model, prompts, indices, n_new, choose, cell.cache, cell.padding, width)
        # Texts first: the last group's copies are beyond the group's end.
        for one, prompt, steps in zip(group, prompts, to_the_end(model, written), strict=False):
            # A sampled token does not depend on which logit is the largest.
            gaps = " ".join(f"{_gap(step.scores):.4g}" for step in steps) if cell.choice == GREEDY else None
            yield {
                "sample": one.index, "source": one.source, "prompt_tokens": len(prompt),
                "path": " ".join(str(step.token) for step in steps), "gaps": gaps,
            }


def _gap(logits: torch.Tensor) -> float:
    """Return the distance of the two largest logits, in ulps of the largest."""
    return (choosing.margin(logits) / predictions.spacing(logits.max())).item()


def work_of_usage(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    longest, n_new = sizes(settings)
    # One cell, without a cache, takes a pass for each token.
    cached = len(list(named.planned())) - 1
    passes, steps = settings.n_usage * (cached + n_new), settings.n_usage * cached * n_new
    return Work(longest + n_new // 2, passes, steps, settings.dtypes)


USAGE = Experiment(
    "usage_factorial", DoesItMatterSettings, inputs_of_usage, measure_usage,
    fields=variants.FIELDS | {"n_usage", "n_tokens", "greedy_only"}, work=work_of_usage,
)
