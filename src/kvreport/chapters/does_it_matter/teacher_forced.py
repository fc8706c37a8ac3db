"""The same texts, token by token, by every way that is one change away from the baseline: how far the predictions move.

Rows, one a (model, dtype, way, sample, position): see ``data/README.md``.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kvbook import progress
from kvbook.measuring import predictions
from kvbook.models import corpus
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvbook.runs.work import Work
from kvreport.chapters.does_it_matter import classifier, variants
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings


def inputs(settings: DoesItMatterSettings) -> dict[str, Any]:
    """Name the model and the corpus, and refuse what cannot be run."""
    longest = settings.n_tokens + max(variants.PADS)
    # One token more than is read: the last position's next one.
    return variants.inputs(settings, longest, settings.n_samples, settings.n_tokens + 1)


def measure(settings: DoesItMatterSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Score the texts in every way."""
    samples = variants.texts(settings, settings.n_samples, settings.n_tokens + 1)
    head = None
    for dtype in settings.dtypes:
        subject = variants.Subject(settings, dtype)
        tokenizer = subject.baseline.tokenizer
        if head is None:
            fitted_on = classifier.fitting_texts(settings, tokenizer)
            head = classifier.fit(subject.baseline.model, tokenizer, fitted_on)
        groups = [samples[first : first + variants.BATCH] for first in range(0, len(samples), variants.BATCH)]
        for number, group in enumerate(progress.track(groups, len(groups), f"does it matter, {dtype}: group")):
            if (unit := f"{dtype}|{number}") in writer.done:
                continue
            about = {"model": subject.baseline.name, "weights": subject.baseline.weights, "dtype": dtype}
            writer.append(unit, [about | row for row in score(subject, group, head)])


def score(subject: variants.Subject, samples: list[corpus.Sample], head: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Hold every way against the baseline on some texts; the logits live no longer than the comparison."""
    whole = subject.tensor([sample.ids for sample in samples])
    ids, targets = whole[:, :-1], whole[:, 1:]
    half = ids.shape[1] // 2
    with torch.inference_mode():
        baseline = [
            (piece.logits[half:], classifier.decisions(piece.hidden[half:], head))
            for piece in variants.whole(variants.Reader(subject.baseline.model), ids, half)
        ]
        right = [
            torch.from_numpy(classifier.labels(subject.baseline.tokenizer, sample.ids)[half:-1]).to(decided.device)
            == decided.bool()
            for sample, (_, decided) in zip(samples, baseline, strict=True)
        ]
        for way in progress.track(variants.possible(subject.baseline.model), label="way"):
            for piece in subject.pieces(way, ids, half):
                begin = max(0, half - piece.start)
                first = piece.start + begin - half
                rows = slice(first, first + len(piece.logits) - begin)
                logits, decided = (part[rows] for part in baseline[piece.text])
                compared = predictions.compare(
                    logits, piece.logits[begin:], targets[piece.text, half + rows.start : half + rows.stop]
                )
                flips = decided != classifier.decisions(piece.hidden[begin:], head)
                sample = samples[piece.text]
                for index, row in enumerate(compared.rows()):
                    yield {
                        "way": way.name, "sample": sample.index, "source": sample.source,
                        "position": half + rows.start + index, **row, "decision_flip": int(flips[index]),
                        "decision_right": int(right[piece.text][rows.start + index]),
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
