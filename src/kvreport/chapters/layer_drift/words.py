"""What the chapter on issue 25420 says in words: captions, and the numbers of its prose."""

from collections.abc import Callable

import pandas as pd

from kvbook.measuring import agreement
from kvreport.chapters.layer_drift import greedy_paths, tables
from kvreport.chapters.layer_drift.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, between, of_all, power_of_ten


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    drift, greedy, mitigated = results.drift, results.greedy, results.mitigated
    setting = f"{wording.models(drift)}; {wording.samples(drift)}; {wording.machine(drift)}"
    one_each = f"{wording.models(greedy)}; {wording.machine(greedy)}"
    asked = greedy.about["settings"]
    found = findings(results)
    said = _of_trained(results) | {
        "fig-layer-drift": (
            f"{found['fig-layer-drift']} "
            "Drawn: largest absolute difference of the last token's hidden states between the full pass and prefix + last token. "
            "Filled: this run, mean and 95 % interval (bootstrap over files); a mean of zero is not drawn. "
            "Hollow: published, CodeLlama-7b and GPT-2, 1,000 samples. The last state is after the final norm. "
            f"{setting}.",
            "Curves of drift against layer on a logarithmic axis, a panel for each model, a colour for each dtype, filled for "
            "this run and hollow for the published numbers.",
        ),
        "tab-layer-drift": (f"Mean over samples of the largest absolute difference, by layer. {setting}.", ""),
        "fig-layer-drift-scale-free": (
            f"{found['fig-layer-drift-scale-free']} "
            "Top: each series from layer 2 to the last before the final norm, over its own geometric mean, so that only its "
            "shape is left (filled: this run; hollow: published). Bottom: root mean square of the difference over that of the "
            "state, in units of the dtype's unit roundoff; at 1 the one equals the largest relative error of one rounding "
            f"(this run). {setting}.",
            "Two panels against depth: the shape of drift, filled and hollow, and relative drift in units of the unit roundoff, "
            " a curve for each model and dtype.",
        ),
        "fig-drift-laws": (
            f"{found['fig-drift-laws']} {_rises(results.laws)}"
            "Drawn: growth of drift a layer, and ratio of drift between neighbouring dtypes over that of their unit roundoffs "
            "(geometric mean over layers), with 95 % intervals. Hollow: published columns, interval of the fit, which takes "
            "layers as independent and is too narrow for that. Filled: this run, bootstrap over files. The two depths differ, "
            f"so a growth a layer of one is not that of the other. {setting}.",
            "Two lists of estimates with intervals: growth a layer, and ratios between dtypes over those of their unit "
            "roundoffs, published and of this run, with a line at no growth and at equal ratios.",
        ),
        "fig-greedy-paths": (
            f"{found['fig-greedy-paths']} Against decoding without a cache, step by step: logits equal bit for bit, token "
            f"equal, or token different. Prompt “{asked['prompt']}”, one run each. {one_each}.",
            "Strips of decoding steps for five cached methods, one block for each model and dtype: where a method leaves the "
            "uncached tokens, its strip turns grey.",
        ),
        "fig-cache-lengths": (
            f"{found['fig-cache-lengths']} Positions in the cache after every step, for "
            f"{greedy.about['models'][0]['name']}. {one_each}.",
            "Two lines that begin together: as posted, the cache's length grows with the square of the step; fed with the last "
            "token alone, by one a step, as through generate.",
        ),
        "tab-greedy-paths": (
            "First of the decoding steps, counted from 0, whose token differs from decoding without a cache, and the number "
            f"of positions in the cache at the end. {asked['n_new_tokens']} steps, one run each. {one_each}.",
            "",
        ),
        "tab-claims-issue-25420": (
            "Claims of issue 25420, in our words and its own, the rule by which each is judged, and what this run says of "
            f"them. {wording.VERDICTS} {setting}.",
            "",
        ),
    }
    if mitigated is not None:
        count, length = mitigated.about["n_samples"], mitigated.about["settings"]["n_tokens"]
        samples = f"{count} samples of {length} tokens of {wording.corpus(mitigated)}"
        about = f"{wording.models(mitigated)}; {samples}; {wording.machine(mitigated)}"
        said["fig-mitigations"] = (
            f"{found['fig-mitigations']} Each mitigation's drift of the logits and time of a decode step over stock's, with "
            f"95 % intervals (bootstrap over files; times: median of paired ratios, one timing a sample). {about}.",
            "Two lists of five mitigations in two dtypes: drift over stock's, and time over stock's, with a line at 1.",
        )
        said["tab-mitigations"] = (
            "Each mitigation over stock: drift of the logits, share of samples whose logits are equal bit for bit, and times, "
            f"with 95 % intervals. {about}.",
            "",
        )
    return wording.published(said)


def findings(results: Results) -> dict[str, str]:
    """Say in one sentence what each figure shows, by the figure's name."""
    paths = _of_greedy(results)
    said = {
        "fig-layer-drift": _order(results.drift.rows),
        "fig-layer-drift-scale-free": _shapes(results.means, results.published),
        "fig-drift-laws": _laws(results.laws),
        "fig-greedy-paths": "Fed the whole text again at each step, as posted, the cached loop writes the uncached loop's tokens "
        f"in {paths['greedy_posted']} runs; fed the last token alone, it does in {paths['greedy_last']} runs.",
        "fig-cache-lengths": _lengths(results.greedy.rows),
    }
    if results.mitigated is not None:
        said["fig-mitigations"] = (
            "Samples of so few files cannot show whether a mitigation lowers the drift."
            if wording.too_few(results.mitigated.rows)
            else _upcasts(results.effects)
        )
    return said


def _dtype_means(drift: pd.DataFrame) -> pd.DataFrame:
    """Average drift from the first fitted layer on: a row a model and layer, a column a dtype, the finest first."""
    later = drift[(drift["place"] == "hidden") & (drift["layer"] >= tables.FIRST_FITTED_LAYER)]
    means = later.groupby(["model", "layer", "dtype"])["max_abs"].mean().unstack()
    return means[sorted(means.columns, key=agreement.UNIT_ROUNDOFF.__getitem__)]


def _ordered(means: pd.DataFrame) -> int:
    """Count the rows of `_dtype_means` in which every coarser dtype drifts more."""
    return int((means.diff(axis=1).iloc[:, 1:] > 0).all(axis=1).sum())


def _order(drift: pd.DataFrame) -> str:
    means = _dtype_means(drift)
    begin = f"From layer {tables.FIRST_FITTED_LAYER} on,"
    if means.shape[1] == 1:
        return f"{begin} mean drift in {DTYPES[means.columns[0]]} is {between(means.iloc[:, 0], '{:.2g}')} in this run's models."
    ordered, models = _ordered(means), means.index.get_level_values("model").nunique()
    of_models = {1: "this run's model", 2: "both models"}.get(models, f"all {models} models")
    if ordered < len(means):
        return f"{begin} a coarser dtype drifts more in {ordered} of {len(means)} layers of {of_models}."
    return f"{begin} a coarser dtype drifts more in every layer of {of_models} ({ordered} of {ordered})."


def _shapes(means: pd.DataFrame, published: pd.DataFrame) -> str:
    rises = []
    for rows in (means, published):
        for _, series in rows.groupby(["model", "dtype"], sort=False):
            drifts = tables.inner(series).sort_values("layer").query("max_abs > 0")["max_abs"]
            if len(drifts) > 2:
                rises.append(drifts.iloc[-1] > drifts.iloc[0])
    moved = means[(means["place"] == "hidden") & (means["relative_rms"] > 0)]
    sizes = moved["relative_rms"] / moved["dtype"].map(agreement.UNIT_ROUNDOFF)
    size = (
        "no state of this run drifts" if sizes.empty else f"relative drift is {between(sizes, '{:.2g}')} unit roundoffs"
    )
    return (
        f"Drift ends higher than it begins in {of_all(sum(rises), len(rises))} series, published and here; here {size}."
    )


def _laws(laws: pd.DataFrame) -> str:
    growth = list(laws.loc[laws["quantity"] == tables.GROWTH, "estimate"])
    grown, rates = sum(e.low > 0 for e in growth), between([e.value for e in growth], "{:.1%}")
    if grown == len(growth):
        return f"Drift grows with depth in {of_all(grown, grown)} series, by {rates} a layer."
    return f"Drift is seen to grow with depth in {grown} of {len(growth)} series; the rates are {rates} a layer."


def _rises(laws: pd.DataFrame) -> str:
    """Say how drift rises from each dtype to the next coarser one; nothing without two dtypes."""
    ratios: dict[str, list[float]] = {}
    for row in laws[laws["quantity"] == tables.RATIO].itertuples():
        dtypes = row.label.removesuffix(", published").rsplit(", ", 1)[1]
        ratios.setdefault(dtypes, []).append(row.estimate.value)
    said = [
        f"from {fine} to {coarse} {_rise(values)}"
        for dtypes, values in reversed(ratios.items())
        for coarse, fine in [dtypes.split(" / ")]
    ]
    return f"It rises {wording.listed(said)}. " if said else ""


def _rise(times: list[float]) -> str:
    """Say how drift rises from one dtype to another beside the unit roundoff, whose rise is 1."""
    near, factors = 1.5, f"{between(times, '{:.2g}')} times"
    if 1 / near <= min(times) and max(times) <= near:
        return f"about as the unit roundoff does ({factors} that)"
    if max(times) < 1:
        return f"by less than the unit roundoff ({factors} that)"
    if min(times) > 1:
        return f"by more than the unit roundoff ({factors} that)"
    return f"{factors} as far as the unit roundoff"


def _lengths(greedy: pd.DataFrame) -> str:
    first = greedy.iloc[0]
    drawn = greedy[(greedy["model"] == first["model"]) & (greedy["dtype"] == first["dtype"])].sort_values("step")
    ends = drawn.groupby("method")["cache_length"].last()
    return (
        f"As posted, the loop ends with {int(ends['cache, as posted'])} positions in its cache; fed the last token alone, "
        f"with {int(ends['cache, last token'])} positions."
    )


def _upcasts(table: pd.DataFrame) -> str:
    if table.empty:
        return "Without a mitigation nothing drifts in this run, so that none can be judged."
    lower = int(table["drift_ratio"].map(lambda e: e.high < 1).sum())
    higher = int(table["drift_ratio"].map(lambda e: e.low > 1).sum())
    raised = f"{higher or 'none'} {'raise' if higher > 1 else 'raises'} it"
    pairs = f"Of {len(table)} pairs of mitigation and dtype"
    if not lower:
        return f"{pairs}, none is seen to lower the drift of the logits, and {raised}."
    best = table.loc[table["drift_ratio"].map(lambda e: e.value).idxmin()]
    return (
        f"{pairs}, {lower} {'lower' if lower > 1 else 'lowers'} the drift of the logits, most of all {best['variant']} in "
        f"{DTYPES[best['dtype']]} (to {best['drift_ratio'].text('{:.2f}')} of stock's), and {raised}."
    )


def _by_series(rows: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> str:
    return "; ".join(
        f"{model} {DTYPES[dtype]} {write(part)}"
        for (model, dtype), part in rows.groupby(["model", "dtype"], sort=False)
    )


def _of_trained(results: Results) -> dict[str, tuple[str, str]]:
    """Write the caption of the trained model's figure, where it was run."""
    if results.trained is None:
        return {}
    texts = results.trained.rows["sample"].nunique()
    return {
        "fig-drift-trained": (
            f"On a trained model, drift grows by {_trained_growth(results)} per layer. Largest absolute difference of the last "
            f"token's hidden states, mean over {texts} texts and 95 % interval. Hollow: published, CodeLlama-7b, 1,000 samples. "
            f"{wording.models(results.trained)}; {wording.machine(results.trained)}.",
            "Curves of drift against layer on a logarithmic axis for a trained model of 30 layers, a colour for each dtype, with "
            "the published columns of CodeLlama hollow beside them.",
        )
    }


def _trained_growth(results: Results) -> str:
    said = {r.dtype: r.sampling.text("{:.1%}") for r in results.trained_growth.itertuples()}
    return wording.in_dtypes(said) or "an amount that these texts cannot tell"


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    trained = _trained_growth(results) if results.trained else "not measured in this run"
    return (
        {"trained": trained}
        | _of_layers(results)
        | _of_tokens(results.drift.rows)
        | _of_greedy(results)
        | _of_mitigations(results.effects)
    )


def _of_layers(results: Results) -> dict[str, str]:
    drift, own_ratios, halves = results.drift.rows, results.ratios, results.halves
    their_growth, their_ratios = results.published_fits
    ratios = {}
    for coarse, fine, key in (("bfloat16", "float16", "bf16_fp16"), ("float16", "float32", "fp16_fp32")):
        theirs = their_ratios[(their_ratios["coarse"] == coarse) & (their_ratios["fine"] == fine)]
        ours = own_ratios[(own_ratios["coarse"] == coarse) & (own_ratios["fine"] == fine)]
        ratios[f"their_{key}"] = f"{theirs['fit'].iloc[0].value:,.3g}"
        ratios[f"our_{key}"] = between([e.value for e in ours["sampling"]], "{:,.3g}") if len(ours) else "not measured"
    first = drift[(drift["place"] == "hidden") & (drift["layer"] == 1)]
    return ratios | {
        "their_growth": between([e.value for e in their_growth.loc[their_growth["model"] != "gpt2", "fit"]], "{:.1%}"),
        "halves": "; ".join(
            f"{r.model} {DTYPES[r.dtype]} {r.first:.0%} and then {r.second:.0%}" for r in halves.itertuples()
        )
        or "not to be fitted in this run",
        "layer_1": _by_series(first, lambda part: f"{part['differing_share'].mean():.1%}"),
    }


def _of_tokens(drift: pd.DataFrame) -> dict[str, str]:
    logits = drift[drift["place"] == "logits"]
    flips = logits[logits["top1_flip"] == 1]
    ties = int((flips["margin"] == 0).sum())
    divergences = logits.groupby("dtype", sort=False)["kl_nats"].mean()
    return {
        "kl": "; ".join(f"{DTYPES[dtype]} {power_of_ten(kl)}" for dtype, kl in divergences.items()),
        "flips": f"{len(flips)} of {len(logits)} comparisons ({ties} at an exact tie of the two best tokens)",
    }


def _of_greedy(results: Results) -> dict[str, str]:
    table, steps = results.divergence, results.steps_last
    runs = len(table[table["method"] == greedy_paths.GENERATE])
    said = {}
    for key, method in (
        ("posted", "cache, as posted"),
        ("posted_positions", "cache, as posted + position ids"),
        ("last", "cache, last token"),
        ("last_positions", "cache, last token + position ids"),
        ("generate", greedy_paths.GENERATE),
    ):
        said[f"greedy_{key}"] = f"{int(table.loc[table['method'] == method, 'equal'].sum())} of {runs}"
    later = steps[(steps["step"] > 0) & steps["same_prefix"]]
    said["bits_last"] = f"{int(later['bits_equal'].sum())} of {len(later)}"
    unequal = results.greedy.rows.merge(steps[~steps["bits_equal"]], on=["model", "dtype", "prompt", "step"])
    unequal = unequal[unequal["method"] == "cache, last token"]
    first = unequal.loc[unequal.groupby(["model", "dtype"])["step"].idxmin()] if len(unequal) else unequal
    said["bits_until"] = (
        "; ".join(f"{r.model} {DTYPES[r.dtype]} at {r.cache_length}" for r in first.itertuples()) or "in no run"
    )
    return said


def _of_mitigations(table: pd.DataFrame) -> dict[str, str]:
    if table.empty:
        nothing = "not measured in this run"
        return dict.fromkeys(("mitigation_best", "mitigation_idle", "mitigation_worse", "linears", "whole"), nothing)

    def row(r) -> str:
        return f"{DTYPES[r.dtype]} {r.drift_ratio.text('{:.2f}')}"

    def named(variant: str) -> str:
        return "; ".join(row(r) for r in table[table["variant"] == variant].itertuples())

    best = table.loc[table["drift_ratio"].map(lambda e: e.value).idxmin()]
    worse = table[table["drift_ratio"].map(lambda e: e.low > 1)]
    return {
        "mitigation_best": f"{best['variant']} in {DTYPES[best['dtype']]}: drift {best['drift_ratio'].text('{:.2f}')} of "
        f"stock's, and equal in every bit in {best['equal_share'].text('{:.0%}')} of samples",
        "mitigation_idle": f"{int(table['drift_ratio'].map(lambda e: e.low <= 1 <= e.high).sum())} of {len(table)}",
        "mitigation_worse": "; ".join(f"{r.variant} {row(r)}" for r in worse.itertuples()) or "none",
        "linears": named("attention linears"),
        "whole": named("whole attention"),
    }
