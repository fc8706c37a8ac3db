"""What the chapter on past_key_values says in words: captions, and the numbers of its prose."""

import pandas as pd

from kvreport.chapters.blog_past import past_tables, tables
from kvreport.chapters.blog_past.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, between, size


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    run = results.past
    asked = run.about["settings"]
    machine = f"{DTYPES[asked['dtype']]}; {wording.machine(run)}"
    one_text = f"{wording.models(run)}; {machine}; the post's one text"
    texts = (
        f"{wording.models(run)}; {machine}; {asked['n_samples']} samples of {asked['n_tokens']} tokens of "
        f"{wording.corpus(run)}, and the post's text"
    )
    found = findings(results)
    said = {
        "fig-past-published": (
            f"{found['fig-past-published']} Statistics of the absolute difference of the last token's logits with and without "
            "past, each family as it was in mid-2023. Hollow: published, the true models. Filled: this run. "
            f"{one_text}. A difference of zero is not drawn.",
            "Seven panels, one a family and precision, of seven statistics on a logarithmic axis, published and of this run.",
        ),
        "tab-past-published": (
            "The post's differences beside ours, as it took them (each statistic of the differences over the same statistic of "
            f"the logits) and element by element. {one_text}. An empty field: left out of this run.",
            "",
        ),
        "fig-past-variants": (
            f"{found['fig-past-variants']} Root mean square difference of the last token's logits over their standard deviation, "
            f"mean over texts with 95 % interval (bootstrap over files), for every switch. {texts}.",
            "A list of models and variants against the difference on a logarithmic axis, with intervals.",
        ),
        "tab-past-variants": (
            "For every switch: the share of the tokens that the past held, the difference as in the figure, the texts whose "
            f"logits equal in every element those of the last token fed alone, and how often the first choice changes. {texts}.",
            "",
        ),
        "fig-past-depth": (
            f"{found['fig-past-depth']} The model is cut to its first layers; lines: the whole one without a past, and made "
            f"causal: mean difference over texts, 95 % interval (bootstrap over files). {texts}.",
            "Difference against the number of layers on a logarithmic axis, with lines for no past and for the causal model.",
        ),
        "tab-claims-blog-past": (
            "Claims of the post, in our words and its own, the rule by which each is judged, and what this run says of them. "
            f"{wording.VERDICTS} {texts}.",
            "",
        ),
    }
    return wording.published(said)


def findings(results: Results) -> dict[str, str]:
    """Say in one sentence what each figure shows, from the table that it draws; by the figure's name."""
    table = results.variants
    return {
        "fig-past-published": _published(results.beside),
        "fig-past-variants": _variants(table[table["quantization"] == "none"]),
        "fig-past-depth": _depth(table),
    }


def _published(beside: pd.DataFrame) -> str:
    means = beside[beside["statistic"] == "mean"].set_index("case")[["here absolute", "published absolute"]]
    gpt2 = tables.FAMILIES["gpt2"]
    (ours, theirs), rest = means.loc[gpt2], means[~means.index.str.startswith(gpt2)].min()
    own = "was not run" if pd.isna(ours) else f"differs by {size(ours)} on average"
    others = "were not run" if pd.isna(rest["here absolute"]) else f"differ by {size(rest['here absolute'])} or more"
    return (
        f"Unquantized GPT-2 {own} (published: {size(theirs)}), and the other families {others} (published: "
        f"{size(rest['published absolute'])} or more)."
    )


def _variants(plain: pd.DataFrame) -> str:
    spread = plain["spread"].map(lambda e: e.value)
    whole = spread[plain["variant"].isin([past_tables.NATIVE, past_tables.DECODER])]
    as_then = plain["variant"] == plain["family"].map(past_tables.AS_IN_2023)
    put_back = spread[as_then & (plain["variant"] != past_tables.NATIVE)]
    said = []
    if len(whole):
        said.append(f"causal models with their past differ today by at most {size(whole.max())} of the logits' spread")
    if len(put_back):
        names = plain.loc[put_back.index, "family"].drop_duplicates().map(tables.FAMILIES)
        said.append(f"{wording.listed(list(names))} as in mid-2023 by {size(put_back.min())} or more")
    return f"Unquantized, {'; '.join(said) or 'no model was run'}."


def _depth(table: pd.DataFrame) -> str:
    handed = table[table["variant"] == past_tables.HANDED].sort_values("layers")
    if handed.empty:
        return "No bidirectional model was run."
    spread = handed["spread"].map(lambda e: e.value)
    one, more = spread[handed["layers"] == 1], spread[handed["layers"] > 1]
    said = []
    if len(one):
        said.append(f"by {size(one.max())} of their spread with 1 layer")
    if len(more):
        said.append(f"by {between(more, '{:.2g}')} with {between(handed.loc[more.index, 'layers'], '{}')}")
    without = table.loc[table["variant"] == past_tables.NO_PAST, "spread"].map(lambda e: e.value)
    none = f"; no past at all changes them by {between(without, '{:.2g}')}" if len(without) else ""
    return f"A past that is handed over changes a bidirectional model's logits {' and '.join(said)}{none}."


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    rows, table = results.rows, results.variants
    plain = table[table["quantization"] == "none"]

    def spread(family: str, variant: str, of: pd.DataFrame = plain) -> str:
        found = of[(of["family"] == family) & (of["variant"] == variant)]
        return "; ".join(e.text("{:.2g}") for e in found["spread"]) or "not run"

    def alone(family: str, variant: str) -> str:
        found = table[(table["family"] == family) & (table["variant"] == variant)]
        return f"{found['alone_equal'].sum()} of {found['texts'].sum()}" if len(found) else "not run"

    said = {
        "gpt2_native": spread("gpt2", past_tables.NATIVE),
        "gpt2_8bit": spread("gpt2", past_tables.NATIVE, table[table["quantization"] == "8bit"]),
        "gpt2_4bit": spread("gpt2", past_tables.NATIVE, table[table["quantization"] == "4bit"]),
        "roberta_posted": spread("roberta", past_tables.NO_PAST),
        "roberta_alone": alone("roberta", past_tables.NO_PAST),
        "roberta_decoder": spread("roberta", past_tables.DECODER),
        "mpt_off": spread("mpt", past_tables.CACHE_OFF),
        "mpt_alone": alone("mpt", past_tables.CACHE_OFF),
        "mpt_native": spread("mpt", past_tables.NATIVE),
        "falcon_native": spread("falcon", past_tables.NATIVE),
        "falcon_mask": spread("falcon", past_tables.UPPER_LEFT),
        "falcon_rotary": spread("falcon", past_tables.NO_OFFSET),
        "falcon_both": spread("falcon", past_tables.BOTH),
    }
    falcon = rows[rows["family"] == "falcon"].pivot_table(
        index=["model", "quantization", "sample"], columns="variant", values="max_abs"
    )
    said["falcon_masked_equal"] = (
        f"{int((falcon[past_tables.UPPER_LEFT] == falcon[past_tables.BOTH]).sum())} of {len(falcon)}"
        if len(falcon)
        else "not run"
    )
    apart = results.apart["apart"]
    said["relative_apart"] = f"{apart.max():,.0f}" if len(apart) else "not run"
    return said
