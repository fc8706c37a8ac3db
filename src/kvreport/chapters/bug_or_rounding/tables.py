"""Tables behind the chapter on bug or rounding."""

from dataclasses import dataclass

import pandas as pd

from kvbook.diagnosis import verdict
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import first_bad_layer, symptoms

_KEYS = ["document", "symptom", "model", "weights"]


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """Judge every symptom and every planted bug."""
    table = []
    for values, part in rows.groupby(_KEYS, sort=False):
        finding = verdict.judge(part)
        finest = next(iter(finding.drift), None)
        table.append(
            dict(zip(_KEYS, values, strict=True))
            | {
                "kind": finding.kind,
                "why": finding.why,
                "slope": finding.slope,
                "finest": finest,
                "drift": finding.drift.get(finest),
                "texts": part["sample"].nunique(),
            }
        )
    return pd.DataFrame(table)


def lines(rows: pd.DataFrame) -> pd.DataFrame:
    """Average drift over texts: the points of the log-log figures."""
    means = rows.groupby([*_KEYS, "dtype"], sort=False)["drift"].mean().reset_index()
    return means.assign(roundoff=means["dtype"].map(UNIT_ROUNDOFF)).sort_values([*_KEYS, "roundoff"])


def planted(table: pd.DataFrame) -> pd.DataFrame:
    """Take of `judged` or `lines` what was planted, and the clean families."""
    return table[(table["document"] == symptoms.PLANTED) & (table["symptom"] != symptoms.NARROW_INSIDE)]


def of_documents(table: pd.DataFrame) -> pd.DataFrame:
    """Take of `judged` or `lines` the documents' symptoms, document by document."""
    order = (symptoms.ISSUE, symptoms.REUSE, symptoms.SCRATCH, symptoms.BLOG, symptoms.STATIC)
    found = table[table["document"].isin(order)]
    return found.sort_values("document", key=lambda names: names.map(order.index), kind="stable")


def complained_of(table: pd.DataFrame) -> pd.Series:
    """Tell a document's own symptoms from those with their cause taken away; bool, one a line of `of_documents`."""
    return ~table["symptom"].isin(symptoms.WITHOUT_THE_CAUSE)


def planted_grid(planted: pd.DataFrame) -> pd.DataFrame:
    """Lay out which bug was called what in which family."""
    grid = planted.pivot_table(index="symptom", columns="model", values="kind", aggfunc="first", sort=False)
    return grid.fillna("does not apply").rename_axis(columns=None).reset_index().rename(columns={"symptom": "planted"})


def layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the drift behind every layer over texts."""
    return rows.groupby(["dtype", "bug", "layer"], sort=False)["drift"].mean().reset_index()


def first_beyond(rows: pd.DataFrame, dtype: str, bug: str) -> int | None:
    """Find the first layer whose drift is more than rounding can be."""
    part = rows[(rows["dtype"] == dtype) & (rows["bug"] == bug)]
    beyond = part[part["drift"] > verdict.LIMIT * UNIT_ROUNDOFF[dtype]]
    return int(beyond["layer"].min()) if len(beyond) else None


@dataclass(frozen=True)
class Advice:
    """One line of the decision table.

    Attributes
    ----------
    seen : str
        The symptom, as who has it would say it.
    symptom : tuple of str
        Document and symptom whose rows decide what it is.
    kind : str
        The verdict under which `cause` is the explanation.
    cause, remedy, evidence : str
        What it is, what to do, where it is shown.
    """

    seen: str
    symptom: tuple[str, str]
    kind: verdict.Kind
    cause: str
    remedy: str
    evidence: str


ADVICE = (
    Advice(
        "With and without a cache the logits differ in the last digits", (symptoms.ISSUE, symptoms.DRIFT), "rounding",
        "Kernels give a row other bits when other rows come with it",
        "Nothing, or switch it off: {doc}`exact caches <07_exact_caches>`",
        "{doc}`layer drift <01_layer_drift>`, {doc}`where drift begins <06_where_drift_begins>`",
    ),
    Advice(
        "Static and dynamic cache differ", (symptoms.STATIC, symptoms.STATIC_DYNAMIC), "rounding",
        "Attention over more keys, some of them masked, adds up in another order", "Nothing, or as above",
        "{doc}`static caches <05_static_cache>`, {doc}`exact caches <07_exact_caches>`",
    ),
    Advice(
        "The first layer's keys differ between a text in one part and in two", (symptoms.REUSE, symptoms.KEYS), "rounding",
        "No cached value enters there: the matrix product has other rows", "Nothing", "{doc}`prompt reuse <02_prompt_reuse>`",
    ),
    Advice(
        "Texts go wrong from the second token on; the cache grows faster than the text",
        (symptoms.ISSUE, symptoms.FED_AGAIN), "bug", "The whole text is fed again on top of the cache",
        "Feed only what the cache does not hold; its length must be that of the text", "{doc}`layer drift <01_layer_drift>`",
    ),
    Advice(
        "A reused prompt's cache gives another text", (symptoms.REUSE, symptoms.ANEW), "bug",
        "Tokenizer seam: encoded whole, the text has other ids at the joint",
        "`python -m kvbook check MODEL --prefix … --rest …`; keep the shared ids alone (`kvbook.measuring.caches.reusable`)",
        "{doc}`prompt reuse <02_prompt_reuse>`",
    ),
    Advice(
        "`generate` with a cache that holds the whole prompt gives another text, and no error",
        (symptoms.REUSE, symptoms.WHOLE), "bug", "It feeds the whole prompt a second time",
        "Leave the last token out of the cache (`kvbook.measuring.caches.reusable`)", "{doc}`prompt reuse <02_prompt_reuse>`",
    ),
    Advice(
        "My own cache is right up to the block and worse behind it", (symptoms.SCRATCH, symptoms.PAST_BLOCK), "bug",
        "Stale entries: they were computed from tokens that have left the window, at positions that it does not have",
        "Fill the cache anew from part of the window, or use a model made for it", "{doc}`from scratch <03_from_scratch>`",
    ),
    Advice(
        "My own cache is wrong for longer prompts", (symptoms.SCRATCH, symptoms.LAST_ONLY), "bug",
        "Only the prompt's last token was fed",
        "Feed the whole prompt first, with a causal mask", "{doc}`from scratch <03_from_scratch>`",
    ),
    Advice(
        "With past the model speaks as if it had no context; the returned past is None",
        (symptoms.BLOG, "MPT, use_cache false"), "bug", "`use_cache` is false in the configuration, MPT's default",
        'Pass `use_cache=True`, or write `"use_cache": true` into `config.json`', "{doc}`past tables <04_blog_past>`",
    ),
    Advice(
        "A model with code of its own fails with past, and `generate` seems fine",
        (symptoms.BLOG, "Falcon of mid-2023"), "bug",
        "A causal mask aligned to the upper left for one query, and positions that start again at 0",
        "No causal mask for a single query; positions from the cache's length; see that the cache is handed over at all",
        "{doc}`past tables <04_blog_past>`",
    ),
    Advice(
        "A model that sees both sides fails with past", (symptoms.BLOG, "RoBERTa, past by hand"), "bug",
        "What was cached has not seen the tokens that came later", "Do not cache it; a causal model can be cached",
        "{doc}`past tables <04_blog_past>`",
    ),
    Advice(
        "Logits agree in 16 bits, or as well as 16 bits do, and not in fp32", (symptoms.PLANTED, first_bad_layer.NARROW), "bug",
        "Something is stored narrower than the model computes", "Look at the cache's dtype in the first suspicious layer",
        "{numref}`fig-bug-layer`",
    ),
)  # fmt: skip


def decisions(table: pd.DataFrame) -> pd.DataFrame:
    """Make the decision table: advice under the verdict that this run's rows give."""
    lines_of = []
    for advice in ADVICE:
        document, symptom = advice.symptom
        found = table[(table["document"] == document) & (table["symptom"] == symptom)]
        kinds = set(found["kind"])
        here = ", ".join(sorted(kinds)) or "not run"
        withheld = bool(kinds) and kinds != {advice.kind}
        lines_of.append(
            {
                "your symptom": advice.seen,
                "what it is": f"**{here}**: " + ("this run does not show why" if withheld else advice.cause),
                "what to do": ("run the check on your model" if withheld else advice.remedy)
                + f". See {advice.evidence}.",
            }
        )
    return pd.DataFrame(lines_of)
