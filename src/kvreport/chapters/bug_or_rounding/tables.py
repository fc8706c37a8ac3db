"""Tables of the chapter on bug or rounding, as its page shows them."""

from dataclasses import dataclass

import pandas as pd

from kvbook.diagnosis import verdict
from kvreport.chapters.bug_or_rounding import rows


def who_reports(counted: pd.DataFrame) -> pd.DataFrame:
    """List every symptom that counts as reported, with its place and what is known of its cause."""
    found = counted[counted["whose"] == rows.REPORTED]
    cause = found["inferred"].map({True: "inferred", False: "shown"}).where(found["bug"], "")
    return pd.DataFrame(
        {
            "document": found["document"], "where": found["place"], "symptom": found["symptom"].map(rows.named),
            "what it is": found["kind"], "cause": cause, "n": found["files"],
        }
    )


def planted_grid(planted: pd.DataFrame) -> pd.DataFrame:
    """Lay out which bug was called what in which family."""
    grid = planted.pivot_table(index="symptom", columns="model", values="kind", aggfunc="first", sort=False)
    return grid.fillna("does not apply").rename_axis(columns=None).reset_index().rename(columns={"symptom": "injected"})


@dataclass(frozen=True)
class Advice:
    """One line of the decision table.

    Attributes
    ----------
    seen : str
        The symptom, as who has it would say it.
    symptom : str
        That whose rows decide what it is.
    kind : str
        The verdict under which `cause` is the explanation.
    cause, remedy, evidence : str
        What it is, what to do, where it is shown.
    """

    seen: str
    symptom: str
    kind: verdict.Kind
    cause: str
    remedy: str
    evidence: str


ADVICE = (
    Advice(
        "With and without a cache the logits differ in the last digits", rows.DRIFT, "rounding",
        "Kernels add in another order when the number of tokens changes",
        "Nothing, or use {doc}`exact caches <04_exact_caches>`",
        "{doc}`layer drift <06_layer_drift>`, {doc}`where drift begins <05_where_drift_begins>`",
    ),
    Advice(
        "In bf16 the text diverges after a while, although the ids are right", rows.DRIFT, "rounding",
        "As above; at a near-tie a rounding decides the next token",
        "Compare a loss or a divergence instead of tokens", "{doc}`does it matter <02_does_it_matter>`",
    ),
    Advice(
        "Static and dynamic cache differ", rows.STATIC_DYNAMIC, "rounding",
        "Attention over more keys, some of them masked, can add in another order", "Nothing, or as above",
        "{doc}`where drift begins <05_where_drift_begins>`, {doc}`static caches <10_static_cache>`",
    ),
    Advice(
        "The first layer's keys differ between a text in one part and in two", rows.KEYS, "rounding",
        "No cached value enters there; the matrix product has another number of rows", "Nothing",
        "{doc}`prompt reuse <07_prompt_reuse>`",
    ),
    Advice(
        "Text goes wrong from the second token on, and the cache grows faster than the text", rows.FED_AGAIN, "bug",
        "The whole text is fed again on top of the cache", "Feed only the tokens that the cache does not hold",
        "{doc}`layer drift <06_layer_drift>`",
    ),
    Advice(
        "Reusing a prompt's cache gives another text, in fp32 too", rows.ANEW, "bug",
        "Tokenizer boundary mismatch: tokenized whole, the text has other ids at the joint",
        "`kvbook check MODEL --prefix … --rest …` shows it; keep the shared ids (`kvbook.measuring.caches.reusable`)",
        "{doc}`prompt reuse <07_prompt_reuse>`",
    ),
    Advice(
        "`generate` on a cache that holds the whole prompt gives another text, and no error", rows.WHOLE, "bug",
        "It feeds the whole prompt a second time", "Crop the cache by one token first", "{doc}`the atlas <12_atlas>`",
    ),
    Advice(
        "My own cache is right up to `block_size` and worse after it", rows.PAST_BLOCK, "bug",
        "Stale entries: they were computed from tokens that have left the window",
        "Refill the cache from part of the window", "{doc}`from scratch <08_from_scratch>`",
    ),
    Advice(
        "My own cache is wrong for prompts of several tokens", rows.LAST_ONLY, "bug",
        "Only the prompt's last token was fed", "Feed the whole prompt first, with a causal mask",
        "{doc}`from scratch <08_from_scratch>`",
    ),
    Advice(
        "With a cache the model has no context, and `past_key_values` is None", "MPT, use_cache false", "bug",
        "`use_cache` is false in the configuration, as is MPT's default", "Pass `use_cache=True`",
        "{doc}`past tables <09_blog_past>`",
    ),
    Advice(
        "A model with code of its own fails with a cache", "Falcon of mid-2023", "bug",
        "A causal mask aligned to the upper left, and positions that start again at 0",
        "No causal mask for a single query; positions from the cache's length", "{doc}`past tables <09_blog_past>`",
    ),
    Advice(
        "A bidirectional model fails with a cache", "RoBERTa, past by hand", "bug",
        "Cached states have not seen the tokens that came later", "Do not cache it",
        "{doc}`past tables <09_blog_past>`",
    ),
    Advice(
        "Logits agree in 16 bits and not in fp32", rows.NARROW, "bug",
        "Something is stored in fewer bits than the model computes with, and nobody asked for it",
        "Look at the cache's dtype in the first bad layer; if it is meant, pass `--cache-dtype` to `kvbook check`",
        "{numref}`fig-bug-layer`",
    ),
)


def decisions(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Give each advice under the verdict that these rows give."""
    table = []
    for advice in ADVICE:
        kinds = set(verdicts.loc[verdicts["symptom"] == advice.symptom, "kind"])
        cause, remedy = advice.cause, advice.remedy
        # What is bitwise identical on some texts may round on others.
        if not kinds <= ({"rounding", "exact"} if advice.kind == "rounding" else {advice.kind}):
            cause, remedy = "this run does not show why", "Run `kvbook check` on your model"
        table.append(
            {
                "your symptom": advice.seen,
                "what it is": f"**{', '.join(sorted(kinds)) or 'not run'}**: {cause}",
                "what to do": f"{remedy}. See {advice.evidence}.",
            }
        )
    return pd.DataFrame(table)
