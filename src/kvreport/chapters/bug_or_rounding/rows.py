"""The rows of the chapter on bug or rounding by name; to read them takes no torch."""

from typing import NamedTuple

import pandas as pd

from kvbook.diagnosis import verdict
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.runs.records import Run
from kvreport.chapters.blog_past.rows import BOTH, CACHE_OFF, DECODER, HANDED, NATIVE, NO_PAST

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"bug_or_rounding": 1, "first_bad_layer": 1}

# Bugs that we inject, the models without any, and these in fp64 with their own conversions to fp32 left in.
INJECTED, CLEAN, NARROW_INSIDE = "planted", "clean", "clean, fp32 inside"
# The two that are injected into a single layer too.
LATE, NARROW = "K/V one step late", "cache kept in 16 bits"

ISSUE, REUSE, SCRATCH, BLOG, STATIC = "issue-25420", "forum-reuse", "forum-scratch", "blog-past", "notebook-static"
DRIFT, FED_AGAIN = "prefix + last token", "whole text fed again"
KEYS, WHOLE = "first layer's keys", "cache as long as the prompt"
ANEW, CUT = "prefix reused, text encoded anew", "prefix cut to the shared ids"
WITHIN, PAST_BLOCK = "rolling cache within the block", "rolling cache past the block"
REPLY, LAST_ONLY = "reply's cache past the block", "last character alone fed"
STATIC_NONE, STATIC_DYNAMIC = "static against no cache", "static against dynamic"
# The blog post's, by family and by how its call is run.
BLOG_NAMES = {
    ("gpt2", NATIVE): "GPT-2", ("roberta", NO_PAST): "RoBERTa as posted", ("roberta", DECODER): "RoBERTa made causal",
    ("roberta", HANDED): "RoBERTa, past by hand", ("mpt", CACHE_OFF): "MPT, use_cache false",
    ("mpt", NATIVE): "MPT, use_cache true", ("falcon", BOTH): "Falcon of mid-2023", ("falcon", NATIVE): "Falcon today",
}
# What rows call otherwise than a reader would.
_NAMES = {
    ANEW: "prefix reused, text re-tokenized", CUT: "prefix cropped to the shared ids",
    LAST_ONLY: "only the last character fed", "RoBERTa made causal": "RoBERTa, is_decoder=True",
}

REPORTED, FOUND, REMOVED = "reported", "found while repeating", "cause removed"
LIES = FED, PAST, IN_MODEL = "in what is fed", "in a cache past its block", "in the model or its configuration"


class Symptom(NamedTuple):
    """Two computations that should agree, and whether a document shows that theirs did not.

    Attributes
    ----------
    document, symptom : str
        As the rows call them.
    place : str
        Where the document reports the difference; empty where it does not.
    claim : str
        The document's claim about it in the ledger; empty where there is none.
    lies : str
        Where the bug lies that the prose speaks of; empty where it speaks of rounding.
    inferred : bool
        Whether its cause is inferred: no verdict of the ledger bears it out.
    without : str
        The symptom whose cause is removed.
    """

    document: str
    symptom: str
    place: str = ""
    claim: str = ""
    lies: str = ""
    inferred: bool = False
    without: str = ""

    @property
    def whose(self) -> str:
        """Tell what a document reports from what it does not."""
        return REMOVED if self.without else REPORTED if self.place else FOUND


# In the order of the figure: document by document, and last what no document reports.
SYMPTOMS = (
    Symptom(ISSUE, DRIFT, "comment of 23 October 2023, tables", "drift-everywhere"),
    Symptom(ISSUE, FED_AGAIN, "opening post", "positions-missing", FED),
    Symptom(REUSE, KEYS, "first post, output", "first-layer-differs"),
    Symptom(REUSE, ANEW, "first post, update", "reused-cache-changes-text", FED, inferred=True),
    Symptom(REUSE, CUT, without=ANEW),
    Symptom(SCRATCH, WITHIN, without=PAST_BLOCK),
    Symptom(SCRATCH, PAST_BLOCK, "the post", "cached-is-worse", PAST),
    Symptom(BLOG, "GPT-2", "“GPT2 as a baseline”", "gpt2-compatible"),
    Symptom(BLOG, "RoBERTa as posted", "“RoBERTa as a failure”", "", IN_MODEL, inferred=True),
    Symptom(BLOG, "RoBERTa made causal", without="RoBERTa as posted"),
    Symptom(BLOG, "MPT, use_cache false", "“MPT 7B”", "mpt-cannot", IN_MODEL, inferred=True),
    Symptom(BLOG, "MPT, use_cache true", without="MPT, use_cache false"),
    Symptom(BLOG, "Falcon of mid-2023", "“Falcon 7B”", "falcon-cannot", IN_MODEL, inferred=True),
    Symptom(BLOG, "Falcon today", without="Falcon of mid-2023"),
    Symptom(STATIC, STATIC_NONE, "outputs of “No cache” and “Static cache”"),
    Symptom(STATIC, STATIC_DYNAMIC, "outputs of “Dynamic cache” and “Static cache”"),
    Symptom(REUSE, WHOLE, lies=FED),
    Symptom(SCRATCH, REPLY, lies=PAST),
    Symptom(SCRATCH, LAST_ONLY, lies=FED),
    Symptom(BLOG, "RoBERTa, past by hand", lies=IN_MODEL),
)
_KNOWN = pd.DataFrame([one._asdict() | {"whose": one.whose} for one in SYMPTOMS]).drop(columns="document")
_KEYS = ["document", "symptom", "model", "weights"]


def named(symptom: str) -> str:
    """Name a symptom for readers."""
    return _NAMES.get(symptom, symptom)


def drifts(bug_or_rounding: Run) -> pd.DataFrame:
    """Count every drift in unit roundoffs, and tell which are more than rounding can be."""
    rows = bug_or_rounding.rows
    roundoffs = rows["drift"] / rows["dtype"].map(UNIT_ROUNDOFF)
    return rows.assign(
        roundoffs=roundoffs, beyond=roundoffs > verdict.LIMIT, identical=rows["drift"] == 0,
        first=rows["model"] == bug_or_rounding.about["models"][0]["name"],
    )


def injected(drifts: pd.DataFrame) -> pd.DataFrame:
    """Keep the injected bugs and the models without any, in both of their kinds."""
    found = drifts[drifts["document"] == INJECTED]
    return found.assign(injected=~found["symptom"].isin([CLEAN, NARROW_INSIDE]))


def documents(drifts: pd.DataFrame) -> pd.DataFrame:
    """Keep the documents' symptoms, with what is known of each."""
    found = drifts.merge(_KNOWN, on="symptom")
    # The thread's own prompts are no sample.
    return found.assign(sampled=~found["symptom"].isin([ANEW, CUT]), symptom=found["symptom"].map(named))


def verdicts(bug_or_rounding: pd.DataFrame) -> pd.DataFrame:
    """Judge every symptom and every injected bug."""
    table = []
    for key, part in bug_or_rounding.groupby(_KEYS, sort=False):
        of = verdict.judge(part)
        finest = next(iter(of.drift), None)
        table.append((*key, of.kind, of.why, of.slope, finest, of.drift.get(finest), part["source"].nunique()))
    return pd.DataFrame(table, columns=[*_KEYS, "kind", "why", "slope", "finest", "drift", "files"])


def lines(bug_or_rounding: pd.DataFrame) -> pd.DataFrame:
    """Average drift over texts: the points of the log-log figures."""
    means = bug_or_rounding.groupby([*_KEYS, "dtype"], sort=False)["drift"].mean().reset_index()
    return means.assign(roundoff=means["dtype"].map(UNIT_ROUNDOFF)).sort_values([*_KEYS, "roundoff"])


def lines_of_injected(lines: pd.DataFrame) -> pd.DataFrame:
    """Keep the injected bugs and the clean models."""
    return lines[(lines["document"] == INJECTED) & (lines["symptom"] != NARROW_INSIDE)]


def symptoms(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Keep the verdicts on the documents' symptoms, in the order of the figure."""
    return _of_documents(verdicts)


def lines_of_symptoms(lines: pd.DataFrame) -> pd.DataFrame:
    """Keep the points of the documents' symptoms, in the order of the figure."""
    return _of_documents(lines)


def _of_documents(table: pd.DataFrame) -> pd.DataFrame:
    return _KNOWN[["symptom", "whose"]].merge(table, on="symptom")[[*table, "whose"]]


def counted(symptoms: pd.DataFrame) -> pd.DataFrame:
    """Add to the documents' symptoms what is known of them, and whether they are bugs."""
    found = symptoms.merge(_KNOWN.drop(columns="whose"), on="symptom")
    bug = found["kind"] == "bug"
    return found.assign(bug=bug, inferred=bug & found["inferred"], sound=found["kind"].isin(["rounding", "exact"]))


def layers(first_bad_layer: pd.DataFrame) -> pd.DataFrame:
    """Average the drift after every layer over texts."""
    return first_bad_layer.groupby(["dtype", "bug", "layer"], sort=False)["drift"].mean().reset_index()


def first_layers(first_bad_layer: pd.DataFrame) -> pd.DataFrame:
    """Find for every text the first layer whose drift is more than rounding can be; NaN where there is none."""
    beyond = first_bad_layer["drift"] > verdict.LIMIT * first_bad_layer["dtype"].map(UNIT_ROUNDOFF)
    rows = first_bad_layer.assign(layer=first_bad_layer["layer"].where(beyond))
    keys = ["dtype", "bug", "planted_in", "source", "sample"]
    first = rows.groupby(keys, sort=False, dropna=False)["layer"].min().reset_index()
    return first.assign(right=first["layer"] == first["planted_in"], accused=first["layer"].notna())


def last_layer(first_bad_layer: pd.DataFrame) -> pd.DataFrame:
    """Keep the drift after the last layer."""
    return first_bad_layer[first_bad_layer["layer"] == first_bad_layer["layer"].max()]
