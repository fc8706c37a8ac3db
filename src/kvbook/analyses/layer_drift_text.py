"""What the chapter on issue 25420 says in words: captions, and the numbers of its prose."""

import pandas as pd

from kvbook import fits
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
    said = {
        "fig-layer-drift": (
            "Largest absolute difference of the last token's hidden states between the full pass and prefix + last token. "
            f"Filled: this run, mean and 95 % interval (bootstrap over files). {setting}. "
            "Hollow: published, CodeLlama-7b and GPT-2, 1,000 samples. The last state is behind the final norm.",
            "Curves of drift against layer on a logarithmic axis, one colour a dtype: in each model the coarser dtype "
            "lies higher.",
        ),
        "tab-layer-drift": (
            f"Mean over samples of the largest absolute difference, by layer. {setting}.",
            "",
        ),
        "fig-layer-drift-scale-free": (
            "Left: each series over its own geometric mean, so that only its shape is left (solid and filled: this run; "
            "dashed and hollow: published). Right: root mean square of the difference over that of the state, in units of "
            f"the dtype's unit roundoff (this run). {setting}.",
            "Two panels against depth. Left, all series cross 1 in the middle layers. Right, curves of relative drift in "
            "units of the unit roundoff, one a model and dtype.",
        ),
        "fig-drift-laws": (
            "Growth of drift a layer, and ratio of drift between dtypes (geometric mean over layers), with 95 % intervals. "
            f"Hollow: published columns, interval of the fit. Filled: this run, bootstrap over files. {setting}.",
            "Two lists of estimates with intervals: growth a layer, and ratios between dtypes, published and of this run.",
        ),
        "fig-greedy-paths": (
            "Greedy decoding with a cache against decoding without, step by step: logits equal bit for bit, token equal, or "
            f"token different. Prompt “{asked['prompt']}”, one run each. {one_each}.",
            "Strips of decoding steps for five cached methods, one block a model and dtype: where a method leaves the "
            "uncached tokens, its strip turns grey.",
        ),
        "tab-greedy-paths": (
            "First of the decoding steps, counted from 0, whose token differs from decoding without a cache, and the number "
            f"of positions in the cache at the end. {asked['n_new_tokens']} steps, one run each. {one_each}.",
            "",
        ),
        "tab-claims-issue-25420": (
            f"Claims of issue 25420 and what this run says of them. {setting}. “In kind”: the mechanism is shown on weights "
            "that are not the document's, so its magnitudes are not.",
            "",
        ),
    }
    if mitigated is not None:
        said["fig-mitigations"] = (
            "Drift of the logits and time of a decode step under each mitigation, over stock's, with 95 % intervals "
            "(bootstrap over files; times: median of paired ratios). "
            f"{wording.models(mitigated)}; {wording.samples(mitigated)}; {wording.machine(mitigated)}.",
            "Points for five mitigations and two dtypes: drift over stock's against time over stock's, dotted lines at 1.",
        )
    return {
        name: {"name": name, "caption": caption} | ({"alt": alt} if alt else {})
        for name, (caption, alt) in said.items()
    }


def _both(estimates: list[fits.Estimate], form: str) -> str:
    """Write the range of several estimates."""
    values = [estimate.value for estimate in estimates]
    return " to ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def numbers(
    drift: pd.DataFrame, greedy: pd.DataFrame, mitigations: pd.DataFrame | None, published: pd.DataFrame
) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    their_growth, their_ratios = tables.published_fits(published)
    llama_growth = list(their_growth.loc[their_growth["model"] != "gpt2", "fit"])
    said = {
        "their_growth": _both(llama_growth, "{:.1%}"),
        "their_bf16_fp16": _one(their_ratios, "bfloat16", "float16", "fit").text("{:.1f}"),
        "their_fp16_fp32": _one(their_ratios, "float16", "float32", "fit").text("{:,.0f}"),
    }
    ours, own_ratios = tables.growth_table(drift), tables.ratio_table(drift)
    said["our_growth"] = (
        "; ".join(f"{r.model} {DTYPES[r.dtype]} {r.sampling.text('{:.1%}')}" for r in ours.itertuples())
        or "not to be fitted in this run"
    )
    for coarse, fine, key in (("bfloat16", "float16", "our_bf16_fp16"), ("float16", "float32", "our_fp16_fp32")):
        found = own_ratios[(own_ratios["coarse"] == coarse) & (own_ratios["fine"] == fine)]
        said[key] = "; ".join(f"{r.model} {r.sampling.text('{:,.3g}')}" for r in found.itertuples()) or "not measured"
    logits = drift[drift["place"] == "logits"]
    said["our_logits"] = "; ".join(
        f"{model} {DTYPES[dtype]} {power_of_ten(rows['max_abs'].mean())}"
        for (model, dtype), rows in logits.groupby(["model", "dtype"], sort=False)
    )
    said["kl"] = "; ".join(
        f"{model} {DTYPES[dtype]} {power_of_ten(rows['kl_nats'].mean())}"
        for (model, dtype), rows in logits.groupby(["model", "dtype"], sort=False)
    )
    flips = fits.share(int(logits["top1_flip"].sum()), len(logits))
    said["flips"] = f"{int(logits['top1_flip'].sum())} of {len(logits)} comparisons ({flips.text('{:.2%}')})"
    table = tables.divergence_table(greedy)
    runs = len(table[table["method"] == greedy_paths.GENERATE])
    for key, method in (
        ("posted", "cache, as posted"),
        ("posted_positions", "cache, as posted + position ids"),
        ("last", "cache, last token"),
        ("last_positions", "cache, last token + position ids"),
        ("generate", greedy_paths.GENERATE),
    ):
        rows = table[table["method"] == method]
        said[f"greedy_{key}"] = f"{int(rows['first_divergence'].isna().sum())} of {runs}"
        said[f"bits_{key}"] = f"{rows['bits_equal_steps'].sum()} of {rows['steps'].sum()}"
    lengths = greedy[(greedy["method"] == "cache, as posted") & (greedy["model"] == greedy["model"].iloc[0])]
    said["posted_first"] = (
        "step "
        + " or ".join(
            map(
                str,
                sorted({int(x) for x in table.loc[table["method"] == "cache, as posted", "first_divergence"].dropna()}),
            )
        )
        if table.loc[table["method"] == "cache, as posted", "first_divergence"].notna().any()
        else "no step"
    )
    said["posted_lengths"] = ", ".join(map(str, lengths.drop_duplicates("step")["cache_length"].head(6)))
    right = greedy[(greedy["method"] == "cache, last token") & (greedy["model"] == greedy["model"].iloc[0])]
    said["right_lengths"] = ", ".join(map(str, right.drop_duplicates("step")["cache_length"].head(6)))
    said["mitigation_best"], said["mitigation_rest"] = "not measured in this run", "not measured in this run"
    if mitigations is not None and not (of := tables.mitigation_table(mitigations)).empty:
        values = of["drift_ratio"].map(lambda e: e.value)
        best = of.loc[values.idxmin()]
        said["mitigation_best"] = (
            f"{best['variant']} in {DTYPES[best['dtype']]}: drift {best['drift_ratio'].text('{:.2f}')} of stock's, "
            f"decode step {best['decode_ratio'].text('{:.2f}')} and full pass {best['full_ratio'].text('{:.2f}')} of its time"
        )
        indifferent = of[of["drift_ratio"].map(lambda e: e.low <= 1 <= e.high)]
        said["mitigation_rest"] = f"{len(indifferent)} of {len(of)}"
    return said


def _one(ratios: pd.DataFrame, coarse: str, fine: str, column: str) -> fits.Estimate:
    return ratios.loc[(ratios["coarse"] == coarse) & (ratios["fine"] == fine), column].iloc[0]
