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
from kvreport.chapters.does_it_matter import classifier as sequence_head
from kvreport.chapters.does_it_matter import variants as one_axis
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings


def run(settings: DoesItMatterSettings) -> records.Run:
    """Score the texts, or read the rows if these inputs have been measured.

    Raises
    ------
    UserError
        For settings that cannot be run; nothing is left behind.
    """
    fields, longest = {"n_samples", "n_tokens", "n_fit"}, settings.n_tokens + max(one_axis.PADS)
    return one_axis.recorded(
        "teacher_forced", __name__, settings, lambda writer: _measure(settings, writer), fields, longest
    )


def _measure(settings: DoesItMatterSettings, writer: records.Writer) -> None:
    # One more than is read: the last position's next token.
    samples = one_axis.texts(settings, settings.n_samples, settings.n_tokens + 1)
    head = None
    for dtype in settings.dtypes:
        subject = one_axis.Subject(settings, dtype)
        tokenizer = subject.baseline.tokenizer
        if head is None:
            fitted_on = sequence_head.fitting_texts(settings, tokenizer)
            head = sequence_head.fit(subject.baseline.model, tokenizer, fitted_on)
        groups = [samples[first : first + one_axis.BATCH] for first in range(0, len(samples), one_axis.BATCH)]
        for number, group in enumerate(progress.track(groups, len(groups), f"does it matter, {dtype}: group")):
            if (unit := f"{dtype}|{number}") in writer.done:
                continue
            about = {"model": subject.baseline.name, "weights": subject.baseline.weights, "dtype": dtype}
            writer.append(unit, [about | row for row in score(subject, group, head)])


def score(subject: one_axis.Subject, samples: list[corpus.Sample], head: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Hold every way against the baseline on some texts; the logits live no longer than the comparison.

    Parameters
    ----------
    subject : Subject
        The model.
    samples : list of Sample
        Texts of one length, of which the last token is only predicted.
    head : Tensor, shape (2, width)
        Of the classification.
    """
    whole = subject.tensor([sample.ids for sample in samples])
    ids, targets = whole[:, :-1], whole[:, 1:]
    half = ids.shape[1] // 2
    with torch.inference_mode():
        baseline = [
            (piece.logits[half:], sequence_head.decisions(piece.hidden[half:], head))
            for piece in one_axis.whole(one_axis.Reader(subject.baseline.model), ids, half)
        ]
        right = [
            torch.from_numpy(sequence_head.labels(subject.baseline.tokenizer, sample.ids)[half:-1]).to(decided.device)
            == decided.bool()
            for sample, (_, decided) in zip(samples, baseline, strict=True)
        ]
        for way in progress.track(one_axis.possible(subject.baseline.model), label="way"):
            for piece in subject.pieces(way, ids, half):
                begin = max(0, half - piece.start)
                first = piece.start + begin - half
                rows = slice(first, first + len(piece.logits) - begin)
                logits, decided = (part[rows] for part in baseline[piece.text])
                compared = predictions.compare(
                    logits, piece.logits[begin:], targets[piece.text, half + rows.start : half + rows.stop]
                )
                flips = decided != sequence_head.decisions(piece.hidden[begin:], head)
                sample = samples[piece.text]
                for index, row in enumerate(compared.rows()):
                    yield {
                        "way": way.name,
                        "sample": sample.index,
                        "source": sample.source,
                        "position": half + rows.start + index,
                        **row,
                        "decision_flip": int(flips[index]),
                        "decision_right": int(right[piece.text][rows.start + index]),
                    }
