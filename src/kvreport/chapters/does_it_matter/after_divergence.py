"""What comes after the first token that differs: the two continuations against each other.

`first_divergence` has written a text without a cache, and knows the token that is written with one instead.  Here that
token takes its place, the text is continued from there with a cache, and the two texts are compared step by step: how
far the predictions are apart when each follows its own tokens, beside how far they are apart on one text's tokens.

Rows, one a (model, dtype, sample, offset): see ``data/README.md``.
"""


import pandas as pd
import torch

from kvbook import fingerprint
from kvbook.measuring import predictions
from kvbook.runs import Experiment, Inputs, Rows, Work, Writer
from kvreport.chapters.does_it_matter import first_divergence, variants, writing
from kvreport.chapters.does_it_matter.settings import DoesItMatterSettings

# Steps before and after the divergence that are looked at.
BEFORE, BEHIND = 8, 24


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Choose the greedy texts that diverged, each with the uncached text."""
    greedy = rows[rows["choice"] == first_divergence.GREEDY]
    keys = ["dtype", "sample"]
    cached = greedy[(greedy["way"] == first_divergence.CACHED) & (greedy["parted"] == 1)]
    uncached = greedy.loc[greedy["way"] == first_divergence.BASELINE, [*keys, "path"]]
    return cached[[*keys, "source", "steps", "token"]].merge(uncached, on=keys)


def inputs(settings: DoesItMatterSettings) -> Inputs | None:
    """Name the pairs of texts beside model and corpus; None where no path has left the baseline's."""
    parted = pairs(first_divergence.EXPERIMENT.run(settings).rows)
    if parted.empty:
        return None
    return first_divergence.inputs(settings) | {"pairs": fingerprint.of_values(parted.to_dict("records"))}


def measure(settings: DoesItMatterSettings, _made_of: Inputs, writer: Writer) -> None:
    """Compare the continuations of every pair."""
    parted = pairs(first_divergence.EXPERIMENT.run(settings).rows)
    samples = variants.texts(settings, settings.n_samples, first_divergence.prompt_length(settings))
    choose = writing.Chooser(first_divergence.GREEDY, settings.seed)
    for dtype, some in parted.groupby("dtype", sort=False):
        subject = variants.Subject(settings, dtype)
        units = {f"{dtype}|{pair.sample}": pair for pair in some.itertuples()}
        for unit, pair in writer.pending(units, f"after the divergence, {dtype}: pair"):
            about = subject.about | {"sample": pair.sample, "source": pair.source}
            path = [int(token) for token in str(pair.path).split()]
            prompt = subject.tensor([samples[pair.sample].ids])
            writer.keep(unit, about, follow(subject, prompt, path, int(pair.steps), int(pair.token), choose))


def follow(
    subject: variants.Subject, prompt: torch.Tensor, path: list[int], steps: int, token: int, choose: writing.Chooser,
) -> Rows:
    """Compare a path with the one that takes another token at a step."""
    model, length = subject.baseline.model, prompt.shape[1]
    last = min(len(path), steps + BEHIND)
    one = torch.cat([prompt, prompt.new_tensor([path[:last]])], 1)
    begun = torch.cat([one[:, : length + steps - 1], one.new_tensor([[token]])], 1)
    written = [step.token for (step,) in writing.write(model, begun, [0], last - steps, choose)]
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


def work(settings: DoesItMatterSettings) -> Work:
    """Count the passes of each model in each dtype."""
    # At most: as if every greedy path parted.
    return Work(settings.n_tokens, 3 * settings.n_samples, 2 * BEHIND * settings.n_samples, settings.dtypes)


EXPERIMENT = Experiment(
    "after_divergence", DoesItMatterSettings, inputs, measure, first_divergence.EXPERIMENT.fields, revision=2, work=work
)
