"""What the chapter on issue 25420 says in words: captions, and the numbers of its prose."""

from collections.abc import Callable

import pandas as pd

from kvbook import agreement, fits
from kvbook.analyses import layer_drift as tables
from kvbook.analyses import wording
from kvbook.analyses.wording import DTYPES, power_of_ten
from kvbook.experiments import greedy_paths
from kvbook.records import Run


def captions(drift: Run, greedy: Run, mitigated: Run | None) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them.

    Parameters
    ----------
    drift, greedy, mitigated : Run
        The chapter's runs.

    Returns
    -------
    dict
        By name: ``name``, ``caption`` and, for a figure, ``alt``.
    """
    setting = f"{wording.models(drift)}; {wording.samples(drift)}; {wording.machine(drift)}"
    one_each = f"{wording.models(greedy)}; {wording.machine(greedy)}"
    asked = greedy.about["settings"]
    paths = _of_greedy(greedy.rows)
    said = {
        "fig-layer-drift": (
            "Largest absolute difference of the last token's hidden states between the full pass and prefix + last token. "
            "Filled: this run, mean and 95 % interval (bootstrap over files); a mean of zero is not drawn. "
            "Hollow: published, CodeLlama-7b and GPT-2, 1,000 samples. The last state is after the final norm. "
            f"{setting}.",
            "Curves of drift against layer on a logarithmic axis, a panel for each model, a colour for each dtype, filled for "
            "this run and hollow for the published numbers.",
        ),
        "tab-layer-drift": (f"Mean over samples of the largest absolute difference, by layer. {setting}.", ""),
        "fig-layer-drift-scale-free": (
            "Top: each series from layer 2 to the last before the final norm, over its own geometric mean, so that only its "
            "shape is left (filled: this run; hollow: published). Bottom: root mean square of the difference over that of the "
            "state, in units of the dtype's unit roundoff; at 1 the one equals the largest relative error of one rounding "
            f"(this run). {setting}.",
            "Two panels against depth: the shape of drift, which rises in every series, and relative drift in units of the unit "
            "roundoff, a curve for each model and dtype.",
        ),
        "fig-drift-laws": (
            "Growth of drift a layer, and ratio of drift between neighbouring dtypes over that of their unit roundoffs "
            "(geometric mean over layers), with 95 % intervals. Hollow: published columns, interval of the fit, which takes "
            "layers as independent and is too narrow for that. Filled: this run, bootstrap over files. The two depths differ, "
            f"so a growth a layer of one is not that of the other. {setting}.",
            "Two lists of estimates with intervals: growth a layer, and ratios between dtypes over those of their unit "
            "roundoffs, published and of this run, with a line at no growth and at equal ratios.",
        ),
        "fig-greedy-paths": (
            "Greedy decoding with a cache against decoding without, step by step: logits equal bit for bit, token equal, or "
            f"token different. All tokens are equal in {paths['greedy_posted']} runs as posted, and in {paths['greedy_last']} "
            f"with the last token alone. Prompt “{asked['prompt']}”, one run each. {one_each}.",
            "Strips of decoding steps for five cached methods, one block for each model and dtype: where a method leaves the "
            "uncached tokens, its strip turns grey.",
        ),
        "fig-cache-lengths": (
            f"Positions in the cache after every step, for {greedy.about['models'][0]['name']}. {one_each}.",
            "Two lines that begin together: as posted, the cache's length grows with the square of the step; fed with the last "
            "token alone, by one a step, as through generate.",
        ),
        "tab-greedy-paths": (
            "First of the decoding steps, counted from 0, whose token differs from decoding without a cache, and the number "
            f"of positions in the cache at the end. {asked['n_new_tokens']} steps, one run each. {one_each}.",
            "",
        ),
        "tab-claims-issue-25420": (
            "Claims of issue 25420, in our words, and what this run says of them. “In kind” stands where the weights are not "
            f"the document's, so that the mechanism is shown and its magnitude is not. {setting}.",
            "",
        ),
    }
    if mitigated is not None:
        about = f"{wording.models(mitigated)}; {wording.samples(mitigated)}; {wording.machine(mitigated)}"
        said["fig-mitigations"] = (
            "Drift of the logits and time of a decode step under each mitigation, over stock's, with 95 % intervals "
            f"(bootstrap over files; times: median of paired ratios, one timing a sample). {about}.",
            "Two lists of five mitigations in two dtypes: drift over stock's, and time over stock's, with a line at 1.",
        )
        said["tab-mitigations"] = (
            "Each mitigation over stock: drift of the logits, share of samples whose logits are equal bit for bit, and times, "
            f"with 95 % intervals. {about}.",
            "",
        )
    return {
        name: {"name": name, "caption": caption} | ({"alt": alt} if alt else {})
        for name, (caption, alt) in said.items()
    }


def _both(estimates: list[fits.Estimate], form: str) -> str:
    """Write the range of several estimates."""
    values = [estimate.value for estimate in estimates]
    return " to ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def _by_series(rows: pd.DataFrame, write: Callable[[pd.DataFrame], str]) -> str:
    return "; ".join(
        f"{model} {DTYPES[dtype]} {write(part)}"
        for (model, dtype), part in rows.groupby(["model", "dtype"], sort=False)
    )


def numbers(
    drift: pd.DataFrame, greedy: pd.DataFrame, mitigations: pd.DataFrame | None, published: pd.DataFrame
) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key.

    Parameters
    ----------
    drift, greedy : DataFrame
        Rows of the experiments of these names.
    mitigations : DataFrame or None
        None when the settings left the experiment out.
    published : DataFrame
        From `documents.published_drift`.
    """
    return _of_layers(drift, published) | _of_tokens(drift) | _of_greedy(greedy) | _of_mitigations(mitigations)


def _of_layers(drift: pd.DataFrame, published: pd.DataFrame) -> dict[str, str]:
    their_growth, their_ratios = tables.published_fits(published)
    own_ratios, halves = tables.ratio_table(drift), tables.halves(drift)
    ratios = {}
    for coarse, fine, key in (("bfloat16", "float16", "bf16_fp16"), ("float16", "float32", "fp16_fp32")):
        theirs = their_ratios[(their_ratios["coarse"] == coarse) & (their_ratios["fine"] == fine)]
        ours = own_ratios[(own_ratios["coarse"] == coarse) & (own_ratios["fine"] == fine)]
        ratios[f"their_{key}"] = f"{theirs['fit'].iloc[0].value:,.3g}"
        ratios[f"our_{key}"] = _both(list(ours["sampling"]), "{:,.3g}") if len(ours) else "not measured"
    first = drift[(drift["place"] == "hidden") & (drift["layer"] == 1)]
    later = drift[(drift["place"] == "hidden") & (drift["layer"] >= tables.FIRST_FITTED_LAYER)]
    means = later.groupby(["model", "layer", "dtype"])["max_abs"].mean().unstack()
    finest_first = sorted(means.columns, key=agreement.UNIT_ROUNDOFF.__getitem__)
    ordered = int((means[finest_first].diff(axis=1).iloc[:, 1:] > 0).all(axis=1).sum())
    return ratios | {
        "ordered_layers": f"{ordered} of {len(means)}",
        "their_growth": _both(list(their_growth.loc[their_growth["model"] != "gpt2", "fit"]), "{:.1%}"),
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
        "flips": f"{len(flips)} of {len(logits)} comparisons, {ties} of these at an exact tie of the two best tokens",
    }


def _of_greedy(greedy: pd.DataFrame) -> dict[str, str]:
    table = tables.divergence_table(greedy)
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
    steps = tables.steps_equal(greedy, "cache, last token")
    later = steps[(steps["step"] > 0) & steps["same_prefix"]]
    said["bits_last"] = f"{int(later['bits_equal'].sum())} of {len(later)}"
    unequal = greedy.merge(steps[~steps["bits_equal"]], on=["model", "dtype", "step"])
    unequal = unequal[unequal["method"] == "cache, last token"]
    first = unequal.loc[unequal.groupby(["model", "dtype"])["step"].idxmin()] if len(unequal) else unequal
    said["bits_until"] = (
        "; ".join(f"{r.model} {DTYPES[r.dtype]} at {r.cache_length}" for r in first.itertuples()) or "in no run"
    )
    return said


def _of_mitigations(mitigations: pd.DataFrame | None) -> dict[str, str]:
    if mitigations is None or (table := tables.mitigation_table(mitigations)).empty:
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
