"""Measures of the chapter on which path is right, then the sentences and the claim that they decide."""

from functools import partial

import numpy as np
import pandas as pd

from kvbook.measuring import estimates
from kvbook.measuring.estimates import Estimate
from kvreport.chapters.which_path_is_right import rows
from kvreport.chapters.which_path_is_right.rows import CACHED, EAGER, SERIES, UNCACHED
from kvreport.publishing.estimators import counted, distinct, geometric_mean, mean, part, share
from kvreport.publishing.measures import Measure, always, claim, either, here, noted, of_model
from kvreport.publishing.rules import Bound, every
from kvreport.publishing.verdicts import Claims


def _over_scatter(column: str, logits: pd.DataFrame) -> Estimate:
    """Mean over the root mean square; of no change at all it is 0."""
    found, size = estimates.mean_resampled(logits, column), rows.root_mean_square(logits[column])
    return found.over(size) if size else found


def _of_likelihood(logits: pd.DataFrame) -> Estimate:
    """What is lost in nats of loss is gained in likelihood."""
    loss = _over_scatter("difference", logits)
    return Estimate(-loss.value, -loss.high, -loss.low, loss.kind, loss.units)


def _common(vocabulary: pd.DataFrame) -> Estimate | None:
    # A file's samples are averaged first: they are not independent of each other.
    means = vocabulary.pivot_table(index="source", columns="token", values="shift")
    squares = vocabulary.assign(square=vocabulary["shift_rms"] ** 2).groupby("source")["square"].mean()
    if len(means) < estimates.FEWEST_UNITS or not (squares > 0).all():
        return None
    return common_share(means.to_numpy(), squares.loc[means.index].to_numpy())


def common_share(means: np.ndarray, mean_squares: np.ndarray) -> Estimate:
    """Estimate how much of a difference all files share: 0 for noise about zero, 1 for the same shift everywhere.

    The squared length of the common mean is estimated without bias, by the products of *different* files' means, which
    noise does not push up; so the estimate can be a little below 0.  The interval is the jackknife's over files.

    Given are each file's mean difference, shape (n_files, n) for n components, and its mean squared difference, over
    everything that was averaged and over the components, shape (n_files,); three files or more.
    """
    products = means @ means.T / means.shape[1]
    n, whole = len(means), _share_of(products, mean_squares)
    others = (np.arange(n) != i for i in range(n))
    left_out = [_share_of(products[np.ix_(some, some)], mean_squares[some]) for some in others]
    pseudo = n * whole - (n - 1) * np.asarray(left_out)
    return estimates.students(whole, pseudo.std(ddof=1), n - 1, np.sqrt(n))


def _share_of(products: np.ndarray, mean_squares: np.ndarray) -> float:
    n = len(products)
    return (products.sum() - np.trace(products)) / (n * (n - 1)) / mean_squares.mean()


def _over_smallest(path: str, reference: pd.DataFrame) -> float:
    """Error of a path of the reference, over the smallest error that it is to measure."""
    errors = reference.set_index("compared with the reference")["logits"]
    return errors[path] / errors[[CACHED, UNCACHED]].min()


# Of every path, for the tables; the sentences speak of the cached one.
RATIOS = Measure(
    "error of the logits against fp64, over the stock uncached pass's", "file", "model and dtype", rows="texts",
    by=SERIES, estimate=geometric_mean("ratio"),
)
SHARES_CLOSER = RATIOS.alike("share of texts in which the cached pass is the closer one", share("closer"))
SHARES_OF_ROWS = SHARES_CLOSER.alike("share of positions at which it is the closer one", mean("closer"), rows="logits")
CORRELATIONS = RATIOS.alike("correlation of the two errors of the logits", mean("correlation"))
DISTANCES = RATIOS.alike("distance of the two paths, over the root mean square of their errors", mean("apart"))
_DIRECTION = "mean change against the stock uncached pass, over its root mean square"
LIKELIHOODS = RATIOS.where(path=(CACHED, EAGER)).alike(f"log likelihood: {_DIRECTION}", _of_likelihood, rows="logits")
ENTROPIES = LIKELIHOODS.alike(f"entropy: {_DIRECTION}", partial(_over_scatter, "sharper"))
SHARES_IN_COMMON = LIKELIHOODS.alike(
    "share of the squared change of log-probabilities that all files share", _common, form="{:.3f}", rows="path_errors"
).where(place="vocabulary")

RATIO, CLOSER, CORRELATION, APART, LIKELIHOOD, COMMON = (
    one.where(path=CACHED) for one in (RATIOS, SHARES_CLOSER, CORRELATIONS, DISTANCES, LIKELIHOODS, SHARES_IN_COMMON)
)
CONTROL = RATIOS.alike(form="{:.2g}").where(path=rows.OFF_BY_ONE)
COARSER = Measure(
    "error of the uncached pass in bf16, over that in fp32", "file", "model", "{:.2g}", rows="texts",
    by=("model", "dtype"), over=("dtype", "float32"), estimate=geometric_mean("error_full"),
).where(path=CACHED, dtype="bfloat16")
CHANGE = Measure(
    "factor by which that ratio changes from the first scored position to the last", "file", "model and dtype",
    rows="along the text", by=("model", "dtype"), estimate=geometric_mean("change"),
)
DIFFERENCE = RATIO.alike(
    "difference of the mean negative log likelihood, nats per token", mean("difference"), form="{:.5f}", rows="logits"
)
DIVERGENCE = DIFFERENCE.alike("divergence from the fp64 distribution", mean("kl"))
KL_RATIO = RATIO.alike(
    "divergence from the fp64 distribution with a cache, over that without", geometric_mean("kl_ratio")
)
FINENESS = Measure(
    "error of the reference's own second path, over the smallest error measured", form="{:.0e}", rows="reference",
    by=("model",), estimate=counted(partial(_over_smallest, rows.CHECK)),
)
AS_LOADED = FINENESS.alike(
    "error of the model loaded in fp64, over the smallest error measured",
    counted(partial(_over_smallest, rows.AS_LOADED)), form="{:.2f}",
)

# Facts for the prose.
MODEL = noted("path_errors", "models", 0, "name")
N_TOKENS = noted("path_errors", "settings", "n_tokens")
TEXTS = Measure("texts", rows="path_errors", estimate=distinct("sample"), form="{:.0f}")
FILES = TEXTS.alike("files", distinct("source"))
SCORED = TEXTS.alike("scored positions of a text", distinct("position"))
AGREEING = Measure(
    "share of positions with fp64's most probable token", rows="logits", by=SERIES, estimate=part("top1")
).where(path=CACHED)
AGREEING_UNCACHED = AGREEING.alike(estimate=part("top1_full"))

# The code of MKL that any x86 processor can run.
_PORTABLE = "MKL_CBWR=COMPATIBLE"
_NO_CHANGE = Bound(1, "arithmetic", "no change")
_SIXTEEN = ("float16", "bfloat16")
_QUARTER = Bound(1.25, "ours", "within a quarter", "ratio")
_LEAST = rows.LEAST_EXPLAINED
_FIFTH = Bound(0.8, "ours", "a fifth smaller", "ratio")
_ONE_IN_FOUR = Bound(0.25, "ours", "one text in four", "share")
_INDEPENDENT = Bound(rows.INDEPENDENT, "arithmetic", "independent errors of one size")
_TENTH_OF_SQUARE = Bound(_LEAST**0.5, "ours", "less than a tenth of the mean square")

STATEMENTS = {
    "cached-no-worse": of_model(RATIO, "below", _QUARTER, headline=True),
    "as-close-in-16-bits": of_model(RATIO.where(dtype=_SIXTEEN), "inside", _QUARTER, headline=True),
    "closer-in-fp32-here": here(RATIO.where(dtype="float32"), "below", _FIFTH, headline=True),
    "eager-as-much": of_model(RATIOS.where(path=EAGER), "inside", _QUARTER, headline=True),
    "either-may-be-closer": of_model(CLOSER.where(dtype=_SIXTEEN), "above", _ONE_IN_FOUR),
    "dtype-decides": always(COARSER, "above", Bound(1000, "ours", "three orders of magnitude"), headline=True),
    "control-is-seen": always(CONTROL, "above", Bound(5, "ours", "five times", "ratio")),
    "no-growth-along-the-text": always(CHANGE, "below", _QUARTER),
    "errors-share-a-part": always(CORRELATION, "above", Bound(0, "arithmetic", "nothing in common")),
    "drift-is-less-than-of-independent-errors": always(APART, "below", _INDEPENDENT),
    "loss-unchanged": always(DIFFERENCE, "inside", Bound(0.01, "ours", "a hundredth of a nat"), headline=True),
    "divergence-in-fp32": here(KL_RATIO.where(dtype="float32"), "below", _NO_CHANGE),
    "farther-with-portable-code": here(RATIO.where(dtype="float32"), "above", _NO_CHANGE, on=_PORTABLE),
    "divergence-with-portable-code": here(KL_RATIO.where(dtype="float32"), "above", _NO_CHANGE, on=_PORTABLE),
    "no-worse-prediction": always(LIKELIHOOD, "inside", _TENTH_OF_SQUARE),
    "nothing-in-common": always(COMMON, "below", Bound(_LEAST, "ours", "a tenth")),
    "reference-is-finer": always(FINENESS, "below", Bound(1e-6, "ours", "a millionth")),
    "loading-in-fp64-is-not": of_model(AS_LOADED, "above", Bound(0.1, "ours", "a tenth")),
}

_TENTH = Bound(1.1, "ours", "a tenth more error is a loss", "ratio")
_LOSS = RATIO.where(dtype="bfloat16").alike(
    "error of bf16 logits against fp64 with a cache, over that without", series="model"
)
CHECKS = {"caching-loses-precision": claim(*either(_LOSS, "above", _TENTH, every))}
CLAIMS = Claims("issue-25420", CHECKS, chapter="03_which_path_is_right", words="which-path")
