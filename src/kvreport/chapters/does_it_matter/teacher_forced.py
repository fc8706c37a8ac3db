"""The same texts, token by token, by every way that is one change away from the baseline: how far the predictions move.

Rows, one a (model, dtype, way, sample, position): see ``data/README.md``.
"""

from collections.abc import Callable, Collection

import torch
from transformers import Cache

from kvbook import progress
from kvbook.measuring import predictions
from kvbook.models import corpus
from kvbook.runs import Experiment, Inputs, Row, Rows, Work, Writer
from kvreport.chapters.does_it_matter import DoesItMatterSettings, classifier, variants


def inputs(settings: DoesItMatterSettings) -> Inputs:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest = settings.n_tokens + max(variants.PADS)
    # One token more than is read: the last position's next one.
    return variants.inputs(settings, longest, settings.n_samples, settings.n_tokens + 1)


def measure(
    settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer,
    ways: tuple[variants.Variant, ...] = variants.VARIANTS, of_cache: Callable[[Cache | None], Row] = lambda _: {},
    without: Collection[str] = (),
) -> None:
    """Score the texts in every way; rows also say what `of_cache` tells of a way's cache, and lack some columns."""
    samples = variants.texts(settings, settings.n_samples, settings.n_tokens + 1)
    first = variants.Subject(settings, settings.dtypes[0]).baseline
    head = classifier.fit(first.model, first.tokenizer, classifier.fitting_texts(settings, first.tokenizer))
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        units = {f"{dtype}|{number}": group for number, group in enumerate(variants.groups(samples))}
        for unit, group in writer.pending(units, f"does it matter, {dtype}: group"):
            rows = (subject.about | row for row in score(subject, group, head, ways, of_cache))
            writer.append(unit, [{name: row[name] for name in row if name not in without} for row in rows])


def score(
    subject: variants.Subject, samples: list[corpus.Sample], head: torch.Tensor, ways: tuple[variants.Variant, ...],
    of_cache: Callable[[Cache | None], Row],
) -> Rows:
    """Hold every way against the baseline on some texts; the logits live no longer than the comparison."""
    whole = subject.tensor([sample.ids for sample in samples])
    ids, targets = whole[:, :-1], whole[:, 1:]
    half = ids.shape[1] // 2
    with torch.inference_mode():
        baseline = list(variants.whole(subject.baseline.model, ids, half))
        decisions = [classifier.decisions(piece.hidden, head) for piece in baseline]
        labels = [classifier.labels(subject.baseline.tokenizer, sample.ids)[:-1] for sample in samples]
        right = [decided.cpu().numpy() == label for decided, label in zip(decisions, labels, strict=True)]
        for way in progress.track(variants.possible(subject.baseline.model, ways), label="way"):
            for piece in subject.pieces(way, ids, half):
                text, first = piece.text, max(half, piece.start)
                logits, hidden = (of[first - piece.start :] for of in (piece.logits, piece.hidden))
                rows = slice(first, first + len(logits))
                compared = predictions.compare(baseline[text].logits[rows], logits, targets[text, rows])
                flips = decisions[text][rows] != classifier.decisions(hidden, head)
                about = {"way": way.name, "sample": samples[text].index, "source": samples[text].source}
                about |= of_cache(piece.cache)
                for position, row, flip in zip(range(first, rows.stop), compared.rows(), flips.tolist(), strict=True):
                    yield about | {"position": position} | row | {
                        "decision_flip": int(flip), "decision_right": int(right[text][position])
                    }


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    half = settings.n_tokens // 2
    n_steps = settings.n_samples * half * (1 + 2 / variants.AT_ONCE)
    # Copies of other dtypes, attention and quantizations stay loaded beside the baseline; as much was seen at the peak.
    return Work(settings.n_tokens, len(variants.VARIANTS) * settings.n_samples, n_steps, settings.dtypes, copies=6)


EXPERIMENT = Experiment(
    "teacher_forced", DoesItMatterSettings, inputs, measure,
    fields=variants.FIELDS | {"n_samples", "n_tokens", "n_fit"}, work=work,
)
