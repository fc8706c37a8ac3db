"""The rows of the chapter on reusing a prompt's cache by name; to read them takes no torch."""

import pandas as pd

from kvbook.measuring import UNIT_ROUNDOFF
from kvreport.publishing import documents

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {"split_keys": 1, "first_layer": 1, "prompt_reuse": 1, "seams": 1, "reused_questions": 1}
DOCUMENT = "forum-reuse"

# Of ``split_keys`` and ``first_layer``: what of the whole pass the second part gets; see `split_keys`.
POSTED, ONE_BEGIN, OVERWRITTEN, WHOLE_CACHE, FULL_ROWS, BOTH = VARIANTS = (
    "as posted", "one begin-of-text", "cache overwritten", "cache of the whole pass", "row count of the whole pass",
    "cache and row count of the whole pass",
)

# Of ``prompt_reuse`` and ``reused_questions``: where the cache and the prompt come from, and what is reused; see
# `continuations`.
CASES = {
    "thread": "the thread's own prompts", "joined word": "first word joins the stop",
    "documented": "cut after the space", "before the space": "cut before the space",
    "continued ids": "ids continued", "chat template": "chat template, system turn",
    "whole prompt": "cache holds the whole prompt", "corpus": "corpus, cut anywhere",
}
THREAD, JOINED, DOCUMENTED, SPACE, CONTINUED, CHAT, WHOLE, CORPUS = CASES
NO_REUSE, AS_IS, SHARED = "no reuse", "prefix cache as it is", "longest common prefix"
# Names of the thread's own prompts.
OWN = ("0", "1")

# Of ``seams``: where a text is cut; see `continuations`.
PLACES = ("inside a word", "after a space", "before a space", "after a line break", "mark before a letter", "elsewhere")
ANYWHERE = "anywhere"


def short(hub_id: str) -> str:
    """Name a model without its owner."""
    return hub_id.split("/")[-1]


def published_shares() -> pd.DataFrame:
    """Divide the thread's counts by the response's elements, the only ones that the two passes compute differently."""
    counts = pd.DataFrame(documents.published(DOCUMENT)["split"]["counts"])
    fed = counts["response_tokens"]
    of_response = counts["elements"] * fed / (counts["prompt_tokens"] + fed)
    model, share = counts["hub_id"].map(short), counts["differing"] / of_response
    return pd.DataFrame({"model": model, "rows_fed": fed, "share": share})


def first_layer_keys(first_layer: pd.DataFrame, published_shares: pd.DataFrame) -> pd.DataFrame:
    """Keep the second part's keys; ``thread_length`` where it has as many tokens as the thread's."""
    rows = first_layer[first_layer["part"] == "response"]
    rows = rows.assign(model=rows["shape"].map(short), share=rows["n_differing"] / rows["n_elements"])
    published = rows["model"].map(published_shares.set_index("model")["rows_fed"])
    return rows.assign(thread_length=rows["rows_fed"] == published)


def keys_and_values(split_keys: pd.DataFrame) -> pd.DataFrame:
    """Tell of every layer the share of elements that differ, and their size in unit roundoffs."""
    rows = split_keys
    return rows.assign(
        share=rows["n_differing"] / rows["n_elements"],
        relative_roundoffs=rows["relative_rms"] / rows["dtype"].map(UNIT_ROUNDOFF), deep=rows["layer"] > 0,
    )


def continuations(prompt_reuse: pd.DataFrame, reused_questions: pd.DataFrame | None = None) -> pd.DataFrame:
    """Bring each continuation to one row, and compare it with the one without reuse."""
    prompt = ["model", "dtype", "case", "prompt"]
    keys = [*prompt, "way", "cache"]
    rows = pd.concat([prompt_reuse, reused_questions]).rename(columns={"item": "prompt"})
    rows = rows.assign(cache=rows["cache"].fillna(""), text=rows["text"].fillna("").astype(str))
    # Every seed's run has the thread's own prompts.
    steps = rows.drop_duplicates([*keys, "step"]).sort_values("step", kind="stable").groupby(keys, sort=False)
    of_all = [name for name in rows if name not in (*keys, "step", "token", "text", "margin")]
    written = steps.agg(tokens=("token", tuple), words=("text", tuple), margins=("margin", tuple))
    found = steps[of_all].first().join(written).reset_index()
    uncached = found.loc[found["way"] == NO_REUSE, [*prompt, *written]]
    found = found.merge(uncached, on=prompt, suffixes=("", "_uncached"))
    equal = found["tokens"] == found["tokens_uncached"]
    return found.assign(
        equal=equal, differs=~equal, mismatch=found["shared_tokens"] < found["prefix_tokens"],
        fed_again=found["fed_tokens"] == found["prompt_tokens"],
        finest=found["dtype"] == min(found["dtype"].unique(), key=UNIT_ROUNDOFF.__getitem__),
    )


def answers(reused_questions: pd.DataFrame) -> pd.DataFrame:
    """Say of each answer to a further question where it first differs from the one without reuse."""
    both = continuations(reused_questions)
    both = both[both["way"] != NO_REUSE].rename(columns={"prompt": "item"})
    pairs = zip(both["tokens"], both["tokens_uncached"], strict=True)
    both = both.assign(first=[first_difference(one, other) for one, other in pairs])
    return both.assign(
        kept=both["equal"], lead=_at_first(both, "margins"), lead_uncached=_at_first(both, "margins_uncached")
    )


def forks(answers: pd.DataFrame) -> pd.DataFrame:
    """Keep the answers in the chat template, on the right cache, that differ from those without reuse."""
    forks = answers[(answers["case"] == CHAT) & (answers["way"] == SHARED) & ~answers["kept"]]
    leads = forks[["lead", "lead_uncached"]]
    return forks.assign(widest=leads.max(axis=1), tied=leads.min(axis=1) == 0)


def _at_first(answers: pd.DataFrame, column: str) -> list[float | None]:
    """Return a number of the first token that differs; None where none does, or where the answer has ended."""
    pairs = zip(answers["first"], answers[column], strict=True)
    return [of[int(first)] if first < len(of) else None for first, of in pairs]


def first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return the place of the first token that differs, or at which one of the two ends; infinite where none does."""
    if one == other:
        return float("inf")
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def prompts(continuations: pd.DataFrame) -> pd.DataFrame:
    """Keep the prompts after a prefix, with its cache as it is.

    Texts of the corpus are no prompts, and after a cache of the whole prompt nothing is left to feed.
    """
    return continuations[(continuations["way"] == AS_IS) & ~continuations["case"].isin([CORPUS, WHOLE])]


def tokenizer_boundaries(seams: pd.DataFrame) -> pd.DataFrame:
    """List the cuts of each vocabulary, all of them first and then by place."""
    rows = seams.assign(changes=seams["safe"] == 0, lost=seams["prefix_tokens"] - seams["shared_tokens"])
    return pd.concat(
        part for _, of in rows.groupby("tokenizer", sort=False)
        for part in (of.assign(place=ANYWHERE), *(of[of["place"] == place] for place in PLACES))
    )
