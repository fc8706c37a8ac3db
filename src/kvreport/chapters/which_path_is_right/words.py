"""What the chapter on which path is right says in words: captions, and the numbers of its prose."""

from collections.abc import Callable

import pandas as pd

from kvbook.measuring import agreement
from kvbook.measuring import estimates as fits
from kvreport.chapters.which_path_is_right import path_errors, tables
from kvreport.chapters.which_path_is_right.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, between, power_of_ten


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    run = results.errors
    asked = run.about["settings"]
    dtypes = ", ".join(DTYPES[dtype] for dtype in asked["dtypes"])
    around = f"{wording.samples(run)}, of which the second half is scored; {wording.machine(run)}"
    seen = numbers(results)
    models = wording.models(run)
    every = f"{models[0].upper()}{models[1:]}; {dtypes}; {around}"
    first = (
        f"{run.about['models'][0]['name']}, {wording.WEIGHTS[run.about['models'][0]['weights']]}; {dtypes}; {around}"
    )
    said = {
        "fig-path-layers": (
            f"{_layers_found(results)} Relative error against fp64 arithmetic with the same weights, root mean square over "
            "positions and texts. Filled: fed token by token from a cache. Hollow: without a cache. Black: what the reference "
            f"itself leaves open ({seen['own']} in the logits), and, where it is not zero, what the model gives that is merely "
            "loaded in fp64. "
            f"{first}.",
            "Curves of relative error against layer on a logarithmic axis, a colour for each dtype, filled with a cache and "
            "hollow without; the reference's own difference in black.",
        ),
        "tab-path-reference": (
            "What the reference is worth: relative error of the logits against it, root mean square, of its own token-by-token "
            "path, of the model that is merely loaded in fp64, and of the finest dtype under test. "
            f"{every}; the first two of each model on the number of samples given.",
            "",
        ),
        "fig-path-ratios": (
            f"{_ratios_found(results)} Error of the logits over the stock uncached pass's, geometric mean over texts with a "
            "95 % interval (bootstrap over files). Filled: token by token from a cache. Hollow: also without a cache, with the "
            f"library's other implementation of attention. {every}.",
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
            f"{_shared_found(results)} Top: cosine of the angle between the two errors, by depth. Bottom: distance of the two "
            "paths over the root mean square of their errors; the line at the square root of 2 is where two errors of one "
            f"size would be that have nothing in common. {every}.",
            "Two panels against depth: the correlation of the two errors, and drift over error with a line where independent "
            "errors would lie, a colour a dtype and a marker a model.",
        ),
        "fig-path-positions": (
            f"{_positions_found(results)} Relative error of the logits in units of each dtype's unit roundoff, root mean "
            "square over groups of neighbouring positions and over texts. Filled: from a cache. Hollow: without. "
            f"{first}.",
            "Error against position in the text, a pair of curves for each dtype, filled with a cache and hollow without.",
        ),
        "tab-path-quality": (
            "Cached and uncached path on the text itself: mean negative log likelihood of the next token, their difference with "
            "a 95 % interval (bootstrap over files), mean divergence from the reference's distribution, and rows whose first "
            f"choice is the reference's. {every}.",
            "",
        ),
        "fig-path-shift": (
            f"{_shift_found(results)} Differences from the stock uncached pass with 95 % intervals over files: mean change of "
            "the next token's log likelihood (left of 0: predicts worse) and of the distribution's entropy (left: sharper), each "
            "over the root mean square of its single values; and the share of the mean squared change of log-probabilities that "
            "all files have in common. In the band the direction explains less than a tenth of the mean square. "
            f"{every}.",
            "Three panels of estimates with intervals for every model and dtype, each with a line at zero and a shaded band "
            "about it.",
        ),
        "tab-claims-issue-25420-which-path": (
            "What issue 25420 claims of precision, in our words and its own, the rule by which it is judged, and what this run "
            f"says of it. {wording.VERDICTS} {every}.",
            "",
        ),
    }
    return wording.published(said)


def _layers_found(results: Results) -> str:
    """Say by what factor the first model's cached error differs from the uncached one, from layer to layer."""
    layers = results.layers
    model = layers["model"].iloc[0]
    ratios = layers[(layers["model"] == model) & (layers["path"] == path_errors.CACHED)].dropna(subset="ratio")
    if ratios.empty:
        return f"{model} shows no error against fp64 at any depth, on either path."
    said = {dtype: between(list(part["ratio"])) for dtype, part in ratios.groupby("dtype", sort=False)}
    return f"Layer by layer, the error of {model} with a cache over that without is {wording.in_dtypes(said)}."


def _ratios_found(results: Results) -> str:
    """Say in how many pairs of model and dtype the cached path is closer to the truth or farther, by whole intervals."""
    series = results.series
    series = series[(series["path"] == path_errors.CACHED) & series["ratio"].notna()]
    closer, farther = (series[series["ratio"].map(test)] for test in (lambda e: e.high < 1, lambda e: e.low > 1))

    def counted(found: pd.DataFrame) -> str:
        dtypes = ", ".join(DTYPES[dtype] for dtype in dict.fromkeys(found["dtype"]))
        return f"{len(found)} ({dtypes})" if dtypes else "none"

    return (
        f"Of {len(series)} pairs of model and dtype, the cached path is closer to fp64 than the uncached one in "
        f"{counted(closer)} and farther in {counted(farther)}, by whole intervals."
    )


def closer_path(cached: pd.DataFrame) -> str:
    """Answer which path is closer to the truth, dtype by dtype, by whole intervals: in every model, or neither, and in which."""

    def closer(part: pd.DataFrame) -> str:
        nearer = {
            "the cached one": part["ratio"].map(lambda ratio: ratio.high < 1),
            "the uncached one": part["ratio"].map(lambda ratio: ratio.low > 1),
        }
        for name, clear in nearer.items():
            if clear.all():
                return name
        some = [
            f"{name} for {wording.listed(list(part['model'][clear]))}" for name, clear in nearer.items() if clear.any()
        ]
        return f"not one for all models (by the whole interval {'; '.join(some)})" if some else "neither"

    defined = cached[cached["ratio"].notna()]
    said = {dtype: closer(part) for dtype, part in defined.groupby("dtype", sort=False)}
    return wording.in_dtypes(said) or "not defined, for no error was seen"


def _shared_found(results: Results) -> str:
    """Say how far the two errors point one way, and whether that is to be told from nothing."""
    series = results.series
    series = series[(series["path"] == path_errors.CACHED) & series["correlation"].notna()]
    said = {dtype: _estimates("correlation")(part) for dtype, part in series.groupby("dtype", sort=False)}
    shared = len(series) and series["correlation"].map(lambda estimate: estimate.low > 0).all()
    return (
        f"The cached and the uncached error {'' if shared else 'are not everywhere seen to '}share a part: at the logits their "
        f"correlation is {wording.in_dtypes(said) or 'not defined'}."
    )


def _positions_found(results: Results) -> str:
    """Say whether the first model's cached error grows against the uncached one along the text."""
    change = results.slopes
    model = tables.measured(results.rows)["model"].iloc[0]
    if change.empty or model not in set(change["model"]):
        return f"{model} shows no error of which to say how it changes along the text."
    own = change[change["model"] == model].set_index("dtype")["change"]
    growing = [DTYPES[dtype] for dtype, estimate in own.items() if estimate.low > 1]
    grows = f"grows in {wording.listed(growing)}" if growing else "is not seen to grow"
    factors = wording.in_dtypes({dtype: estimate.text() for dtype, estimate in own.items()})
    return (
        f"Along the text, the error of {model} with a cache over that without {grows}. From the first scored position to the "
        f"last, this ratio changes by a factor of {factors}."
    )


def _shift_found(results: Results) -> str:
    """Say whether the cached path's difference has a direction."""
    shift = results.shift
    shift = shift[shift["path"] == path_errors.CACHED]
    worse, better = (int(shift["likelihood"].map(test).sum()) for test in (lambda e: e.high < 0, lambda e: e.low > 0))
    pairs = f"{len(shift)} pairs of model and dtype"
    if not worse + better:
        return f"In none of {pairs} is the cached path seen to predict worse or better, by the whole interval."
    return f"The cached path predicts worse in {worse} and better in {better} of {pairs}, by the whole interval."


def _by_dtype(table: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> str:
    return "; ".join(f"{DTYPES[dtype]} {write(rows)}" for dtype, rows in table.groupby("dtype", sort=False))


def _values(estimates: pd.Series) -> list[float]:
    return [estimate.value for estimate in estimates if isinstance(estimate, fits.Estimate)]


def _estimates(column: str, form: str = "{:.2f}") -> Callable[[pd.DataFrame], str]:
    def write(rows: pd.DataFrame) -> str:
        values = _values(rows[column])
        return between(values, form) if values else "none"

    return write


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    rows, series, quality, shift = results.rows, results.series, results.quality, results.shift
    series = series[series["ratio"].notna()]
    cached, eager, control = (
        series[series["path"] == path] for path in (path_errors.CACHED, path_errors.EAGER, path_errors.OFF_BY_ONE)
    )
    quality = quality[quality["path"] == path_errors.CACHED]
    shift = shift[shift["path"] == path_errors.CACHED]
    layers = results.layers
    first = layers[(layers["path"] == path_errors.CACHED) & (layers["layer"] == 1)]
    change = results.slopes
    reference = results.reference.set_index("compared with the reference")["logits"]
    finest = min(tables.measured(rows)["dtype"].unique(), key=agreement.UNIT_ROUNDOFF.__getitem__)
    return {
        "own": power_of_ten(reference.loc[[path_errors.CHECK]].max()),
        "as_loaded": _range_of_powers(reference.loc[[path_errors.AS_LOADED]]),
        "smallest": f"{power_of_ten(reference.loc[[path_errors.CACHED, 'no cache']].min())} in {DTYPES[finest]}",
        "right_in_short": closer_path(cached),
        "ratios": _by_dtype(cached, _estimates("ratio")),
        "eager_ratios": _by_dtype(eager, _estimates("ratio")),
        "control_ratios": _by_dtype(control, _estimates("ratio", "{:,.0f}")) or "not run: no model takes positions",
        "closer_rows": _by_dtype(cached, _estimates("closer_rows", "{:.0%}")),
        "correlation_first": _by_dtype(first, lambda part: between(list(part["correlation"].dropna()))),
        "apart": _by_dtype(cached, _estimates("apart")),
        "independent": f"{tables.INDEPENDENT:.2f}",
        "change": _by_dtype(change, _estimates("change")),
        "difference": "; ".join(
            f"{DTYPES[dtype]} {power_of_ten(part['difference'].map(lambda e: abs(e.value)).max())}"
            for dtype, part in quality.groupby("dtype", sort=False)
        ),
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
