"""Tables behind the chapter on bug or rounding."""

from dataclasses import dataclass

import pandas as pd

from kvbook.diagnosis import verdict
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.bug_or_rounding import first_bad_layer, reported, symptoms

_KEYS = ["document", "symptom", "model", "weights"]
# What rows call otherwise than a reader would.
_NAMES = {
    symptoms.ANEW: "prefix reused, text re-tokenized", symptoms.CUT: "prefix cropped to the shared ids",
    symptoms.LAST_ONLY: "only the last character fed",
    "RoBERTa made causal": "RoBERTa, is_decoder=True",
}


def named(symptom: str) -> str:
    """Name a symptom for readers."""
    return _NAMES.get(symptom, symptom)


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
                "files": part["source"].nunique(),
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
    """Take of `judged` or `lines` what documents report, document by document, and last what was found while repeating it."""
    found = table[table["symptom"].isin(reported.BY_NAME)]
    found = found.assign(whose=[reported.BY_NAME[name].whose for name in found["symptom"]])
    order = {name: (one.whose == reported.FOUND, k) for k, (name, one) in enumerate(reported.BY_NAME.items())}
    return found.sort_values("symptom", key=lambda names: names.map(order), kind="stable")


def who_reports(found: pd.DataFrame) -> pd.DataFrame:
    """Lay out, of `of_documents`, every symptom that is counted as reported, with its place and what is known of its cause."""
    table = []
    for row in found[found["whose"] == reported.REPORTED].itertuples():
        symptom = reported.BY_NAME[row.symptom]
        cause = "" if row.kind != "bug" else "inferred" if symptom.inferred else "shown"
        table.append(
            {
                "document": row.document,
                "where": symptom.place,
                "symptom": named(row.symptom),
                "what it is": row.kind,
                "cause": cause,
                "n": row.files,
            }
        )
    return pd.DataFrame(table)


def planted_grid(planted: pd.DataFrame) -> pd.DataFrame:
    """Lay out which bug was called what in which family."""
    grid = planted.pivot_table(index="symptom", columns="model", values="kind", aggfunc="first", sort=False)
    return grid.fillna("does not apply").rename_axis(columns=None).reset_index().rename(columns={"symptom": "injected"})


def in_fp64(rows: pd.DataFrame) -> pd.DataFrame:
    """Take the rows in fp64, with the drift in roundoffs and whether it is more than rounding can be."""
    found = rows[rows["dtype"] == "float64"]
    roundoffs = found["drift"] / UNIT_ROUNDOFF["float64"]
    return found.assign(roundoffs=roundoffs, beyond=roundoffs > verdict.LIMIT)


def layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the drift after every layer over texts."""
    return rows.groupby(["dtype", "bug", "layer"], sort=False)["drift"].mean().reset_index()


def first_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Find for every text the first layer whose drift is more than rounding can be; NaN where there is none."""
    beyond = rows["drift"] > verdict.LIMIT * rows["dtype"].map(UNIT_ROUNDOFF)
    keys = ["dtype", "bug", "planted_in", "source", "sample"]
    return (
        rows["layer"].where(beyond).groupby([rows[key] for key in keys], sort=False, dropna=False).min().reset_index()
    )


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
        "Kernels add in another order when the number of tokens changes",
        "Nothing, or use {doc}`exact caches <04_exact_caches>`",
        "{doc}`layer drift <06_layer_drift>`, {doc}`where drift begins <05_where_drift_begins>`",
    ),
    Advice(
        "In bf16 the text diverges after a while, although the ids are right", (symptoms.ISSUE, symptoms.DRIFT),
            "rounding",
        "As above; at a near-tie a rounding decides the next token",
        "Compare a loss or a divergence instead of tokens",
        "{doc}`does it matter <02_does_it_matter>`",
    ),
    Advice(
        "Static and dynamic cache differ", (symptoms.STATIC, symptoms.STATIC_DYNAMIC), "rounding",
        "Attention over more keys, some of them masked, can add in another order", "Nothing, or as above",
        "{doc}`where drift begins <05_where_drift_begins>`, {doc}`static caches <10_static_cache>`",
    ),
    Advice(
        "The first layer's keys differ between a text in one part and in two", (symptoms.REUSE, symptoms.KEYS),
            "rounding",
        "No cached value enters there; the matrix product has another number of rows", "Nothing",
        "{doc}`prompt reuse <07_prompt_reuse>`",
    ),
    Advice(
        "Text goes wrong from the second token on, and the cache grows faster than the text",
        (symptoms.ISSUE, symptoms.FED_AGAIN), "bug", "The whole text is fed again on top of the cache",
        "Feed only the tokens that the cache does not hold", "{doc}`layer drift <06_layer_drift>`",
    ),
    Advice(
        "Reusing a prompt's cache gives another text, in fp32 too", (symptoms.REUSE, symptoms.ANEW), "bug",
        "Tokenizer boundary mismatch: tokenized whole, the text has other ids at the joint",
        "`kvbook check MODEL --prefix … --rest …` shows it; keep the shared ids (`kvbook.measuring.caches.reusable`)",
        "{doc}`prompt reuse <07_prompt_reuse>`",
    ),
    Advice(
        "`generate` on a cache that holds the whole prompt gives another text, and no error",
        (symptoms.REUSE, symptoms.WHOLE), "bug", "It feeds the whole prompt a second time",
        "Crop the cache by one token first", "{doc}`the atlas <12_atlas>`",
    ),
    Advice(
        "My own cache is right up to `block_size` and worse after it", (symptoms.SCRATCH, symptoms.PAST_BLOCK), "bug",
        "Stale entries: they were computed from tokens that have left the window",
        "Refill the cache from part of the window", "{doc}`from scratch <08_from_scratch>`",
    ),
    Advice(
        "My own cache is wrong for prompts of several tokens", (symptoms.SCRATCH, symptoms.LAST_ONLY), "bug",
        "Only the prompt's last token was fed",
        "Feed the whole prompt first, with a causal mask", "{doc}`from scratch <08_from_scratch>`",
    ),
    Advice(
        "With a cache the model has no context, and `past_key_values` is None",
        (symptoms.BLOG, "MPT, use_cache false"), "bug",
            "`use_cache` is false in the configuration, as is MPT's default",
        "Pass `use_cache=True`", "{doc}`past tables <09_blog_past>`",
    ),
    Advice(
        "A model with code of its own fails with a cache",
        (symptoms.BLOG, "Falcon of mid-2023"), "bug",
        "A causal mask aligned to the upper left, and positions that start again at 0",
        "No causal mask for a single query; positions from the cache's length",
        "{doc}`past tables <09_blog_past>`",
    ),
    Advice(
        "A bidirectional model fails with a cache", (symptoms.BLOG, "RoBERTa, past by hand"), "bug",
        "Cached states have not seen the tokens that came later", "Do not cache it",
            "{doc}`past tables <09_blog_past>`",
    ),
    Advice(
        "Logits agree in 16 bits and not in fp32", (symptoms.PLANTED, first_bad_layer.NARROW), "bug",
        "Something is stored in fewer bits than the model computes with, and nobody asked for it",
        "Look at the cache's dtype in the first bad layer; if it is meant, pass `--cache-dtype` to `kvbook check`",
        "{numref}`fig-bug-layer`",
    ),
)


def decisions(table: pd.DataFrame) -> pd.DataFrame:
    """Make the decision table: advice under the verdict that these rows give."""
    lines_of = []
    for advice in ADVICE:
        document, symptom = advice.symptom
        found = table[(table["document"] == document) & (table["symptom"] == symptom)]
        kinds = set(found["kind"])
        # What is bitwise identical on some texts may round on others.
        fits = not kinds or kinds == {advice.kind} or (advice.kind == "rounding" and kinds <= {"rounding", "exact"})
        lines_of.append(
            {
                "your symptom": advice.seen,
                "what it is": f"**{', '.join(sorted(kinds)) or 'not run'}**: "
                + (advice.cause if fits else "this run does not show why"),
                "what to do": (advice.remedy if fits else "Run `kvbook check` on your model")
                + f". See {advice.evidence}.",
            }
        )
    return pd.DataFrame(lines_of)
