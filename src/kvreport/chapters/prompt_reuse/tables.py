"""Tables of the chapter on reusing a prompt's cache, as its page shows them."""

import re
from collections.abc import Iterable

import pandas as pd

from kvbook.measuring.estimates import FEWEST_UNITS
from kvreport.chapters.prompt_reuse import measures
from kvreport.chapters.prompt_reuse import rows as named
from kvreport.publishing import documents
from kvreport.publishing.found import Found
from kvreport.publishing.wording import DTYPES

# Where a text leaves the one that it is compared with.
MARK = "‖"


def counts(found: Found) -> pd.DataFrame:
    """Take the published numbers of elements apart, and compare them with what transformers' classes make."""
    counts = pd.DataFrame(documents.published(named.DOCUMENT)["split"]["counts"])
    shapes = pd.DataFrame([found.noted("first_layer", "shapes", hub_id) for hub_id in counts["hub_id"]])
    per_token = shapes["num_key_value_heads"] * (shapes["hidden_size"] // shapes["num_attention_heads"])
    # In any dtype and variant there are as many.
    sizes = found["first_layer"].groupby(["shape", "rows_fed", "dtype", "variant"])["n_elements"].sum()
    ours = [sizes[count.hub_id, count.response_tokens].iloc[0] for count in counts.itertuples()]
    return pd.DataFrame({
        "model": counts["hub_id"].map(named.short), "published": counts["elements"],
        "elements per token": per_token, "tokens": counts["elements"] / per_token,
        "prompt": counts["prompt_tokens"], "response": counts["response_tokens"], "elements": ours,
        "published, differing": counts["differing"],
    })


def first_layer(each: Iterable[Found]) -> pd.DataFrame:
    """List on each processor the share of first-layer keys that differ, by the tokens of the second part."""
    columns = ["model", "dtype", "variant", "rows_fed", "n_elements", "n_differing", "share"]
    return pd.concat(
        found["first layer keys"][columns].assign(processor=run.about["machine"]["processor"])
        for found in each for run in found.behind("first_layer")
    )


def by_layer(found: Found) -> pd.DataFrame:
    """List share and size of the difference in every layer, as posted."""
    columns = ["model", "dtype", "tensor", "part", "layer", "share", "median_ulps", "max_abs", "relative_roundoffs"]
    return found["keys and values"].query("variant == @named.POSTED")[columns]


def _by_case(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values("case", key=lambda cases: cases.map(list(named.CASES).index), kind="stable")


def outcomes(found: Found) -> pd.DataFrame:
    """Count for every case, dtype and way the runs whose tokens equal those without reuse."""
    rows = found["continuations"]
    reused = rows[rows["way"] != named.NO_REUSE].groupby(["case", "dtype", "way"], sort=False)
    runs = reused.agg(seams=("mismatch", "sum"), equal=("equal", "sum"), runs=("equal", "size")).reset_index()
    table = _by_case(runs.merge(measures.EQUAL_BY_WAY.table(found)))
    return table.assign(case=table["case"].map(named.CASES), dtype=table["dtype"].map(DTYPES))


def _threads_own(found: Found) -> pd.DataFrame:
    """Keep the thread's own prompts, and those with another first word, in the finest dtype."""
    rows = found["continuations"]
    return rows[rows["finest"] & (rows["prompt"].isin(named.OWN) | (rows["case"] == named.JOINED))]


def tokenizer_boundaries(found: Found) -> pd.DataFrame:
    """Show the ids on both sides of the cut: what the cache ends in, and what the prompt has in its place."""
    table = [
        {
            "model": f"{named.short(row['hub_id'])} (published vocabulary)", "case": "thread",
            "shared": f"{row['prefix_tokens'] - 1} of {row['prefix_tokens']}",
            "cache ends in": str(row["prefix_ends_in"]), "prompt has there": str(there),
        }
        for row in documents.published(named.DOCUMENT)["seam"] for there in row["whole_has"]
    ]
    own = _threads_own(found)
    own = own[(own["way"] == named.NO_REUSE) & own["case"].isin([named.THREAD, named.JOINED, named.DOCUMENTED])]
    table += [
        {
            "model": row.model, "case": named.CASES[row.case], "shared": f"{row.shared_tokens} of {row.prefix_tokens}",
            "cache ends in": f"{row.prefix_end_id} “{visible(row.prefix_end)}”",
            "prompt has there": f"{row.prompt_there_id} “{visible(row.prompt_there)}”",
        }
        for row in own.itertuples()
    ]
    return pd.DataFrame(table).drop_duplicates(ignore_index=True)


def visible(text: str) -> str:
    """Write a text so that its line breaks and runs of spaces can be seen in one line."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    return re.sub(r"^ | $|  +", lambda spaces: "␣" * len(spaces[0]), text)


_MORE = {
    named.THREAD: "", named.DOCUMENTED: ", after a space", named.CHAT: ", in the chat template",
    named.WHOLE: ", wholly cached",
}


def _prompt(case: str, prompt: str) -> str:
    prompts = documents.published(named.DOCUMENT)["generation"]["prompts"]
    return f"{prompt} {prompts[-1].partition(' ')[2]}" if case == named.JOINED else prompts[int(prompt)] + _MORE[case]


def _marked(row) -> str:
    """Write a continuation, marked where it leaves the one without reuse."""
    if row.equal:
        return visible("".join(row.words))
    step = named.first_difference(row.tokens, row.tokens_uncached)
    return MARK.join(visible("".join(words)) for words in (row.words[:step], row.words[step:]))


def texts(found: Found) -> pd.DataFrame:
    """Put the continuations of the thread's prompts side by side, marked where each leaves the first."""
    own = _threads_own(found)
    shown = _by_case(own[own["cache"].isin(["", "dynamic"]) & own["case"].isin([*_MORE, named.JOINED])])
    shown = shown.assign(
        prompt=[_prompt(row.case, row.prompt) for row in shown.itertuples()],
        text=[_marked(row) for row in shown.itertuples()],
    )
    table = shown.set_index(["model", "prompt", "way"])["text"].unstack(sort=False)
    return table.rename_axis(columns=None).reset_index()


def cuts(found: Found) -> pd.DataFrame:
    """Estimate by vocabulary and place the share of cuts that change the ids; of few files there is no estimate."""
    cuts = found["tokenizer boundaries"].groupby(["tokenizer", "place"], sort=False)
    sizes = cuts.agg(cuts=("source", "size"), files=("source", "nunique"), lost=("lost", "mean")).reset_index()
    return measures.CHANGED_BY_PLACE.table(found).merge(sizes[sizes["files"] >= FEWEST_UNITS])
