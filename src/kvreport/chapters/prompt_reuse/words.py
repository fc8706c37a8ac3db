"""What the chapter on prompt reuse says in words: captions, and the numbers of its prose."""

import pandas as pd

from kvbook.measuring import estimates
from kvbook.runs.records import Run
from kvreport.chapters.prompt_reuse import continuations, split_keys, tables
from kvreport.chapters.prompt_reuse.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, between, of_all


def _dtypes(run: Run) -> str:
    return ", ".join(DTYPES[dtype] for dtype in run.about["settings"]["dtypes"])


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    split, layer, reuse, cuts = results.split, results.layer, results.reuse, results.cuts
    one_text = f"{wording.models(split)}; {_dtypes(split)}; the thread's one text; {wording.machine(split)}"
    shape = f"True widths, random weights; {_dtypes(layer)}; one text of random ids; {wording.machine(layer)}"
    asked = reuse.about["settings"]
    setting = f"{wording.models(reuse)}; {_dtypes(reuse)}; greedy, at most {asked['n_new_tokens']} tokens; {wording.machine(reuse)}"
    finest = DTYPES[asked["dtypes"][0]]
    files, places = cuts.rows["source"].nunique(), cuts.about["settings"]["n_positions"]
    counted = _of_texts(results.written)
    found = findings(results)
    said = {
        "tab-element-counts": (
            "The thread's numbers of elements taken apart: key heads times head dimension, times prompt and response tokens, "
            f"and the elements that transformers' classes make at these shapes. {shape}.",
            "",
        ),
        "fig-rows-fed": (
            f"{found['fig-rows-fed']} Share that differs between the text fed whole and in two parts. Filled: this run. "
            f"{shape}. Hollow: published, if all that differed lay in the response.",
            "Share of differing elements against the number of rows fed, a line for each shape and dtype, and two hollow "
            "points for the published counts.",
        ),
        "fig-split-layers": (
            f"{found['fig-split-layers']} Against the same text fed whole, by layer, mean of keys and values: share of the "
            f"elements that differ (top), and relative difference in units of the unit roundoff (bottom). {one_text}.",
            "Two rows of panels against layer, one column a model: the share of differing elements, and the size of the "
            "difference in roundoffs, for prompt and response.",
        ),
        "tab-split-switches": (
            "Elements that differ between whole and in two parts: in the first layer's keys, which the thread compared, and "
            "in keys and values of all layers; under each switch. Ulps: median over the differing elements of the response, "
            f"and over layers. {one_text}.",
            "",
        ),
        "tab-seam-ids": (
            "The last id of the prefix alone, which the cache ends in, and the id that the whole prompt has in its place; "
            f"“shared” counts the prefix's ids that the prompt begins with. {wording.models(reuse)}. "
            "Published vocabularies: looked up in the models' public tokenizers.",
            "",
        ),
        "tab-reuse-texts": (
            f"Greedy continuations in {finest}, a dynamic cache. “{tables.MARK}” marks where a text leaves the one without "
            f"reuse; ⏎ is a line break, ␣ a space. {setting}.",
            "",
        ),
        "tab-reuse-outcomes": (
            "Runs whose tokens equal those without reuse, over all models and kinds of cache; beside them the runs "
            f"whose prompt's ids do not begin with the prefix's. Corpus: {asked['n_samples']} texts of {wording.corpus(reuse)} "
            f"for each model. {setting}.",
            "",
        ),
        "fig-reuse-outcomes": (
            f"{found['fig-reuse-outcomes']} In {finest} it is {counted['documented_finest']} by the documentation's recipe, and "
            f"{counted['continued_equal']} where the ids go on from the cached ones. Shares by case and dtype, with 95 % intervals "
            "(Wilson's, counting texts and not runs; the range of fewer than four texts). "
            f"{setting}.",
            "Shares between 0 and 1 for each case: with the prefix's cache as it is, and with the longest common prefix.",
        ),
        "fig-cut-shares": (
            f"{found['fig-cut-shares']} By place and vocabulary, with 95 % intervals (over files). {places} "
            f"random characters of each of {files} files of {wording.corpus(cuts)}; no model, no arithmetic.",
            "Estimates with intervals for each kind of place in a text, one marker a vocabulary.",
        ),
        "tab-claims-forum-reuse": (
            "Claims of the forum thread, in our words and its own, the rule by which each is judged, and what this run says "
            f"of them. {wording.VERDICTS} {setting}.",
            "",
        ),
    }
    return wording.published(said)


def counts_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Name the columns of `tables.count_arithmetic` as a reader does."""
    return table.rename(columns={"per_token": "elements a token", "published_differing": "published, differing"})


def findings(results: Results) -> dict[str, str]:
    """Say in one sentence what each figure shows, by the figure's name."""
    return {
        "fig-rows-fed": _rows_fed(results),
        "fig-split-layers": _by_layer(results.layers),
        "fig-reuse-outcomes": _outcomes(results.written),
        "fig-cut-shares": _cuts(results.cut_shares),
    }


def _rows_fed(results: Results) -> str:
    table, posted = results.rows_fed, results.at_published_rows
    stock = table[table["variant"] == split_keys.POSTED]
    tried = stock["rows_fed"].nunique()
    differing = sorted(stock.loc[stock["n_differing"] > 0, "rows_fed"].unique())
    own = " and ".join(map(str, sorted(posted["rows_fed"].unique())))
    if not differing:
        return (
            f"At none of {tried} numbers of rows fed does a first-layer key differ, the thread's own ({own}) included."
        )
    there = f"{posted['n_differing'].sum():,} elements do" if posted["n_differing"].any() else "no element does"
    return (
        f"Of {tried} numbers of rows fed, {', '.join(map(str, differing))} make first-layer keys differ; "
        f"at the thread's own, {own}, {there}."
    )


def _drawn(curves: pd.DataFrame) -> pd.DataFrame:
    """Average keys and values, as the figure does, in every layer in which the response's differ."""
    response = curves[curves["part"] == "response"]
    means = response.groupby(["model", "dtype", "layer"], sort=False)[["share", "relative_roundoffs"]].mean()
    return means[means["share"] > 0]


def _by_layer(curves: pd.DataFrame) -> str:
    drawn = _drawn(curves)
    if drawn.empty:
        return "Fed in two parts, no key or value of the response differs in any layer."
    series = len(curves[["model", "dtype"]].drop_duplicates())
    differing = drawn.groupby(["model", "dtype"]).ngroups
    return (
        f"Fed in two parts, the response's keys and values differ in {of_all(differing, series)} pairs of model and dtype, by "
        f"up to {drawn['relative_roundoffs'].max():.2g} unit roundoffs and in up to {drawn['share'].max():.0%} of a layer's "
        "elements."
    )


def _outcomes(runs: pd.DataFrame) -> str:
    safe = runs[runs["way"] == continuations.SAFE]
    # Only what was run both ways can be compared.
    posted = runs[(runs["way"] == continuations.POSTED) & runs["case"].isin(safe["case"])]
    as_it_is, common = (of_all(int(rows["equal"].sum()), len(rows)) for rows in (posted, safe))
    return (
        f"In the cases run both ways, tokens equal those without reuse in {as_it_is} runs with the prefix's cache as it is, "
        f"and in {common} with the longest common prefix of ids."
    )


def _cuts(shares: pd.DataFrame) -> str:
    said = [
        f"in {between([e.value for e in shares.loc[shares['place'] == place, 'estimate']], '{:.0%}')} of {which}"
        for place, which in (
            ("anywhere", "all cuts"), ("after a space", "those right after a space"),
            ("before a space", "those right before one"),
        )
        if (shares["place"] == place).any()
    ]  # fmt: skip
    if not said:
        return "In too few files to say how often, a cut changes the ids that a text begins with."
    return f"The first part's ids do not begin the whole text's {', '.join(said)}."


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    return _of_keys(results) | _of_texts(results.written) | _of_cuts(results.cut_shares)


def _of_keys(results: Results) -> dict[str, str]:
    split, fed, posted = results.split.rows, results.rows_fed, results.at_published_rows
    stock = fed[fed["variant"] == split_keys.POSTED]
    padded = int(fed.loc[fed["variant"] == split_keys.FULL_ROWS, "n_differing"].sum())
    said = {
        "first_posted": "; ".join(
            f"{row.model} {DTYPES[row.dtype]} {row.n_differing:,} of {row.n_elements:,}" for row in posted.itertuples()
        ),
        "first_padded": f"{padded:,}",
        "first_stock": f"{int(stock['n_differing'].sum()):,}",
        "published_shares": " and ".join(f"{share:.0%}" for share in results.published_shares["share"]),
    }
    response = split[split["part"] == "response"]
    for key, variant in (
        ("posted", split_keys.POSTED),
        ("whole_cache", split_keys.WHOLE_CACHE),
        ("full_rows", split_keys.FULL_ROWS),
    ):
        rows = response[response["variant"] == variant]
        counts = rows.groupby(["model", "dtype"], sort=False)[["n_differing", "n_elements"]].sum()
        said[f"all_{key}"] = "; ".join(
            f"{model} {DTYPES[dtype]} {row.n_differing / row.n_elements:.0%}"
            for (model, dtype), row in zip(counts.index, counts.itertuples(), strict=True)
        )
    keys = response[(response["layer"] == 0) & (response["tensor"] == "keys")]
    for key, variant in (("posted", split_keys.POSTED), ("overwritten", split_keys.OVERWRITTEN)):
        first = keys[keys["variant"] == variant]
        said[f"layer_one_{key}"] = f"{int(first['n_differing'].sum()):,} of {int(first['n_elements'].sum()):,}"
    curves = results.layers
    inner = curves[(curves["part"] == "response") & (curves["share"] > 0)]
    said["roundoffs"] = "nothing differs" if inner.empty else between(_drawn(curves)["relative_roundoffs"], "{:.2g}")
    said["median_ulps"] = "none" if inner.empty else f"{inner['median_ulps'].median():.0f}"
    return said


def _of_texts(runs: pd.DataFrame) -> dict[str, str]:
    posted, safe = (runs[runs["way"] == way] for way in (continuations.POSTED, continuations.SAFE))
    finest = runs["dtype"].iloc[0]

    def equal(rows: pd.DataFrame) -> str:
        return f"{int(rows['equal'].sum())} of {len(rows)}"

    def pick(rows: pd.DataFrame, case: str, only_finest: bool = False) -> pd.DataFrame:
        return rows[(rows["case"] == case) & ((rows["dtype"] == finest) | (not only_finest))]

    thread = pick(posted, continuations.THREAD)
    whole = pick(posted, continuations.WHOLE)
    continued = pick(posted, continuations.CONTINUED)
    joined = pick(posted, continuations.JOINED, only_finest=True)
    said = {
        "finest": DTYPES[finest],
        "thread_seams": f"{int(thread['seam'].sum())} of {len(thread)}",
        "thread_equal": equal(thread),
        "documented_equal": equal(pick(posted, continuations.DOCUMENTED)),
        "documented_finest": equal(pick(posted, continuations.DOCUMENTED, only_finest=True)),
        "documented_seams": equal(pick(posted, continuations.DOCUMENTED).assign(equal=lambda rows: rows["seam"])),
        "joined_equal": equal(joined) if len(joined) else "0 of 0 (no word of this vocabulary does)",
        "continued_equal": equal(pick(posted, continuations.CONTINUED, only_finest=True)),
        "continued_coarse": equal(continued[continued["dtype"] != finest])
        if (continued["dtype"] != finest).any()
        else "none run",
        "whole_equal": equal(whole),
        "whole_safe": equal(pick(safe, continuations.WHOLE)),
        "whole_length": _range(whole["cache_length"]),
        "whole_right_length": _range(pick(safe, continuations.WHOLE)["cache_length"]),
        "whole_prompt": _range(whole["prompt_tokens"]),
        "safe_finest": equal(safe[safe["dtype"] == finest]),
        "safe_coarse": equal(safe[safe["dtype"] != finest]) if (safe["dtype"] != finest).any() else "none run",
        "joined_words": ", ".join(f"“{word}”" for word in dict.fromkeys(pick(posted, continuations.JOINED)["item"]))
        or "none",
    }
    corpus = pick(posted, continuations.CORPUS)
    broken = corpus[corpus["seam"]]
    said["corpus_seams"] = (
        estimates.share_over(corpus, corpus["seam"], "item")[0].text("{:.0%}") if len(corpus) else "not run"
    )
    whole_ids = corpus[~corpus["seam"]]
    said["corpus_differ"] = (
        f"{int((~broken['equal']).sum())} of {len(broken)} with a seam and "
        f"{int((~whole_ids['equal']).sum())} of {len(whole_ids)} without"
    )
    rounding = safe.loc[~safe["equal"], "margin"].dropna()
    said["rounding_margin"] = f"at most {rounding.max():.2g}" if len(rounding) else "none to be seen"
    seams = posted.loc[posted["seam"] & ~posted["equal"], "margin"].dropna()
    said["seam_margin"] = f"up to {seams.max():.2g}" if len(seams) else "none to be seen"
    return said


def _range(values: pd.Series) -> str:
    return " or ".join(str(int(value)) for value in sorted(values.unique())) or "none"


def _of_cuts(shares: pd.DataFrame) -> dict[str, str]:
    said = {}
    for key, place in (
        ("anywhere", "anywhere"),
        ("after_space", "after a space"),
        ("before_space", "before a space"),
        ("mark_letter", "mark before a letter"),
    ):
        rows = shares[shares["place"] == place]
        said[f"cut_{key}"] = (
            "; ".join(f"{row.tokenizer} {row.estimate.text('{:.1%}')}" for row in rows.itertuples()) or "too few files"
        )
    anywhere = shares[shares["place"] == "anywhere"]
    said["cut_lost"] = "; ".join(f"{row.tokenizer} {row.lost:.2f}" for row in anywhere.itertuples()) or "too few files"
    return said
