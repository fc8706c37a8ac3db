"""What the chapter on which path is right says in words: captions, and the numbers of its prose."""

from collections.abc import Callable

import pandas as pd

from kvbook import agreement, fits
from kvbook.analyses import which_path as tables
from kvbook.analyses import wording
from kvbook.analyses.wording import DTYPES, power_of_ten
from kvbook.experiments import path_errors
from kvbook.records import Run


def captions(run: Run) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them.

    Parameters
    ----------
    run : Run
        The chapter's run.

    Returns
    -------
    dict
        By name: ``name``, ``caption`` and, for a figure, ``alt``.
    """
    asked = run.about["settings"]
    dtypes = ", ".join(DTYPES[dtype] for dtype in asked["dtypes"])
    around = f"{wording.samples(run)}, of which the second half is scored; {wording.machine(run)}"
    seen = numbers(run.rows)
    models = wording.models(run)
    every = f"{models[0].upper()}{models[1:]}; {dtypes}; {around}"
    first = (
        f"{run.about['models'][0]['name']}, {wording.WEIGHTS[run.about['models'][0]['weights']]}; {dtypes}; {around}"
    )
    said = {
        "fig-path-layers": (
            "Relative error against fp64 arithmetic with the same weights, root mean square over positions and texts, by "
            "layer. Filled: fed token by token from a cache. Hollow: without a cache. Black: what the reference itself leaves "
            f"open ({seen['own']} in the logits), and, where it is not zero, what the model gives that is merely loaded in fp64. "
            f"{first}.",
            "Curves of relative error against layer on a logarithmic axis, a colour for each dtype; the cached and the "
            "uncached curve of a dtype run close together, the reference's own difference far below all of them.",
        ),
        "tab-path-reference": (
            "What the reference is worth: relative error of the logits against it, root mean square, of its own token-by-token "
            "path, of the model that is merely loaded in fp64, and of the finest dtype under test. "
            f"{every}; the first two of each model on the number of samples given.",
            "",
        ),
        "fig-path-ratios": (
            "Error of the logits over that of the stock uncached pass, geometric mean over texts with a 95 % interval "
            "(bootstrap over files). Filled: token by token from a cache. Hollow: also without a cache, with the library's "
            f"other implementation of attention. The cached path, by whole intervals: {seen['tally']}. {every}.",
            "A list of models and dtypes with two ratios each and a line at 1: the cached path's, and that of an uncached path "
            "with another implementation of attention.",
        ),
        "tab-path-errors": (
            "Relative error of the logits on each path; its ratio to the stock uncached pass's; share of texts in which the path "
            "is the closer one (Wilson's interval); cosine of the angle between the two errors; and the distance of the two "
            "paths in units of the errors' root mean square. The control tells the last token that it stands one position too "
            f"early; it has one row a text. Intervals are 95 %, over files. {every}.",
            "",
        ),
        "fig-path-shared": (
            "Top: cosine of the angle between the cached and the uncached path's error, by depth. Bottom: distance of the two "
            "paths over the root mean square of their errors; the line at the square root of 2 is where two errors of one "
            f"size would be that have nothing in common. At the logits: {seen['apart']}. {every}.",
            "Two panels against depth: the correlation of the two errors, and drift over error with a line where independent "
            "errors would lie, a colour a dtype and a marker a model.",
        ),
        "fig-path-positions": (
            "Relative error of the logits along the text, in units of each dtype's unit roundoff, root mean square over groups of "
            f"neighbouring positions and over texts. Filled: from a cache. Hollow: without. {first}.",
            "Error against position in the text, a pair of curves for each dtype, cached and uncached close together.",
        ),
        "tab-path-quality": (
            "Cached and uncached path on the text itself: mean negative log likelihood of the next token, their difference with "
            "a 95 % interval (bootstrap over files), mean divergence from the reference's distribution, and rows whose first "
            f"choice is the reference's. {every}.",
            "",
        ),
        "fig-path-shift": (
            "What of the difference from the stock uncached pass has a direction, with 95 % intervals over files: mean change of "
            "the next token's log likelihood (left of 0: predicts worse) and of the distribution's entropy (left: sharper), each "
            "over the root mean square of its single values; and the share of the mean squared change of log-probabilities that "
            "all files have in common. In the band the direction explains less than a tenth of the mean square. Of the cached "
            f"path's likelihoods, the interval lies below 0 in {seen['worse']} and above it in {seen['better']}. "
            f"{every}.",
            "Three panels of estimates with intervals for every model and dtype, each with a line at zero and a shaded band "
            "about it.",
        ),
        "tab-claims-issue-25420-which-path": (
            "Two statements of issue 25420, in our words, and what this run says of them. “In kind” stands where the weights are "
            f"not the document's. {every}.",
            "",
        ),
    }
    return {
        name: {"name": name, "caption": caption} | ({"alt": alt} if alt else {})
        for name, (caption, alt) in said.items()
    }


def _by_dtype(table: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> str:
    return "; ".join(f"{DTYPES[dtype]} {write(rows)}" for dtype, rows in table.groupby("dtype", sort=False))


def _range(values: list[float], form: str = "{:.2f}") -> str:
    return " to ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def _values(estimates: pd.Series) -> list[float]:
    return [estimate.value for estimate in estimates if isinstance(estimate, fits.Estimate)]


def _estimates(column: str, form: str = "{:.2f}") -> Callable[[pd.DataFrame], str]:
    def write(rows: pd.DataFrame) -> str:
        values = _values(rows[column])
        return _range(values, form) if values else "none"

    return write


def _tally(series: pd.DataFrame) -> str:
    """Count the series in which the whole interval of the ratio lies below 1, above it, or neither."""
    below, above = (int(series["ratio"].map(test).sum()) for test in (lambda e: e.high < 1, lambda e: e.low > 1))
    counts = {"closer": below, "farther": above, "neither": len(series) - below - above}
    return " and ".join(f"{word} in {count}" for word, count in counts.items() if count) + f" of {len(series)}"


def numbers(rows: pd.DataFrame) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key.

    Parameters
    ----------
    rows : DataFrame
        Rows of the experiment ``path_errors``.
    """
    series, quality, shift = tables.series_table(rows), tables.quality_table(rows), tables.shift_table(rows)
    series = series[series["ratio"].notna()]
    cached, eager, control = (
        series[series["path"] == path] for path in (path_errors.CACHED, path_errors.EAGER, path_errors.OFF_BY_ONE)
    )
    quality = quality[quality["path"] == path_errors.CACHED]
    shift = shift[shift["path"] == path_errors.CACHED]
    layers = tables.layer_table(tables.measured(rows))
    first = layers[(layers["path"] == path_errors.CACHED) & (layers["layer"] == 1)]
    change = tables.slope_of_ratio(rows)
    reference = tables.reference_table(rows).set_index("compared with the reference")["logits"]
    finest = min(tables.measured(rows)["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)
    worse, better = (quality["difference"].map(test) for test in (lambda e: e.low > 0, lambda e: e.high < 0))
    return {
        "own": power_of_ten(reference.loc[[path_errors.CHECK]].max()),
        "as_loaded": _range_of_powers(reference.loc[[path_errors.AS_LOADED]]),
        "smallest": f"{power_of_ten(reference.loc[[path_errors.CACHED, 'no cache']].min())} in {DTYPES[finest]}",
        "ratios": _by_dtype(cached, _estimates("ratio")),
        "tally": _by_dtype(cached, _tally),
        "eager_ratios": _by_dtype(eager, _estimates("ratio")),
        "control_ratios": _by_dtype(control, _estimates("ratio", "{:,.0f}")) or "not run: no model takes positions",
        "closer_rows": _by_dtype(cached, _estimates("closer_rows", "{:.0%}")),
        "correlation": _by_dtype(cached, _estimates("correlation")),
        "correlation_first": _by_dtype(first, lambda part: _range(list(part["correlation"].dropna()))),
        "apart": _by_dtype(cached, _estimates("apart")),
        "independent": f"{tables.INDEPENDENT:.2f}",
        "change": _by_dtype(change, _estimates("change")),
        "difference": "; ".join(
            f"{DTYPES[dtype]} {power_of_ten(part['difference'].map(lambda e: abs(e.value)).max())}"
            for dtype, part in quality.groupby("dtype", sort=False)
        ),
        "worse": f"{int(worse.sum())} of {len(quality)}",
        "better": f"{int(better.sum())} of {len(quality)}",
        "kl": _by_dtype(
            quality, lambda part: f"{power_of_ten(part['kl'].mean())} and {power_of_ten(part['kl_full'].mean())}"
        ),
        "top1": _by_dtype(
            quality, lambda part: f"{part['top1'].sum():,} and {part['top1_full'].sum():,} of {part['rows'].sum():,}"
        ),
        "likelihood": _by_dtype(shift, _estimates("likelihood", "{:+.2f}")),
        "common": _by_dtype(shift, _estimates("common", "{:+.3f}")),
        "smallest_p": f"{shift['p'].min():.2f} of {len(shift)}" if shift["p"].notna().any() else "not tried",
    }


def _range_of_powers(values: pd.Series) -> str:
    return " to ".join(dict.fromkeys((power_of_ten(values.min()), power_of_ten(values.max()))))
