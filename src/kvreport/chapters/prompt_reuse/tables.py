"""Tables behind the chapter on the forum thread about reusing a prompt's cache."""

import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from kvbook.measuring import agreement, estimates
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvbook.runs.records import Run
from kvreport.chapters.prompt_reuse import continuations, split_keys, tokenizer_boundaries
from kvreport.publishing import documents
from kvreport.publishing.wording import DTYPES

DOCUMENT = "forum-reuse"

# Where a text leaves the one that it is held against.
MARK = "‖"


def _short(hub_id: str) -> str:
    return hub_id.split("/")[-1]


def count_arithmetic(first_layer: pd.DataFrame, shapes: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Take the published numbers of elements apart, and hold them against what transformers' classes make."""
    table = []
    for count in documents.published(DOCUMENT)["split"]["counts"]:
        shape = shapes[count["hub_id"]]
        per_token = shape["num_key_value_heads"] * (shape["hidden_size"] // shape["num_attention_heads"])
        ours = first_layer[
            (first_layer["shape"] == count["hub_id"]) & (first_layer["rows_fed"] == count["response_tokens"])
        ]
        made = ours.groupby(["dtype", "variant"])["n_elements"].sum().unique()
        table.append(
            {
                "model": _short(count["hub_id"]),
                "published": count["elements"],
                "per_token": per_token,
                "tokens": count["elements"] / per_token,
                "prompt": count["prompt_tokens"],
                "response": count["response_tokens"],
                "elements": int(made[0]) if len(made) == 1 else None,
                "published_differing": count["differing"],
            }
        )
    return pd.DataFrame(table)


def counts_shown(table: pd.DataFrame) -> pd.DataFrame:
    """Name the columns of `count_arithmetic` as a reader does."""
    return table.rename(columns={"per_token": "elements per token", "published_differing": "published, differing"})


def rows_fed_table(first_layer: pd.DataFrame) -> pd.DataFrame:
    """Give the share of the second part's keys that differ, by the number of rows fed."""
    table = first_layer[first_layer["part"] == "response"].assign(
        model=lambda rows: rows["shape"].map(_short), share=lambda rows: rows["n_differing"] / rows["n_elements"]
    )
    columns = ["model", "dtype", "variant", "rows_fed", "n_elements", "n_differing", "share"]
    return table[columns].reset_index(drop=True)


def rows_fed_by_processor(runs: Iterable[Run]) -> pd.DataFrame:
    """Join `rows_fed_table` of several runs, each with its processor's name."""
    return pd.concat([rows_fed_table(run.rows).assign(processor=run.about["machine"]["processor"]) for run in runs])


def published_response_shares() -> pd.DataFrame:
    """Give the published counts as shares of the response's elements, the only rows that both passes could compute apart."""
    counts = documents.published(DOCUMENT)["split"]["counts"]
    return pd.DataFrame(
        {
            "model": _short(count["hub_id"]),
            "rows_fed": count["response_tokens"],
            "share": count["differing"]
            / (count["elements"] * count["response_tokens"] / (count["prompt_tokens"] + count["response_tokens"])),
        }
        for count in counts
    )


def at_published_rows(rows_fed: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Keep of `rows_fed_table` what was fed as the thread did: stock, and the number of rows of `published_response_shares`."""
    stock = rows_fed[rows_fed["variant"] == split_keys.POSTED]
    return stock.merge(published[["model", "rows_fed"]], on=["model", "rows_fed"])


def by_layer(split: pd.DataFrame, variant: str = split_keys.POSTED) -> pd.DataFrame:
    """Give share and size of the difference in every layer."""
    rows = split[split["variant"] == variant]
    return rows.assign(
        share=rows["n_differing"] / rows["n_elements"],
        relative_roundoffs=rows["relative_rms"] / rows["dtype"].map(UNIT_ROUNDOFF),
    )[["model", "dtype", "tensor", "part", "layer", "share", "median_ulps", "max_abs", "relative_roundoffs"]]


def switches(split: pd.DataFrame) -> pd.DataFrame:
    """Count for every variant what differs: in the tensor that the thread compared, and in all layers."""
    table = []
    for (model, dtype, variant), rows in split.groupby(["model", "dtype", "variant"], sort=False):
        response = rows[rows["part"] == "response"]
        table.append(
            {
                "model": model,
                "dtype": DTYPES[dtype],
                "variant": variant,
                "first layer’s keys, response": _counted(
                    response[(response["layer"] == 0) & (response["tensor"] == "keys")]
                ),
                "all layers, prompt": _counted(rows[rows["part"] == "prompt"]),
                "all layers, response": _counted(response),
                "median ulps": response["median_ulps"].median(),
            }
        )
    return pd.DataFrame(table)


def _counted(rows: pd.DataFrame) -> str:
    return f"{rows['n_differing'].sum():,} of {rows['n_elements'].sum():,}"


_RUN = ["model", "dtype", "case", "item"]


def written(reuse: pd.DataFrame) -> pd.DataFrame:
    """Bring each continuation to one row and hold it against the one without reuse."""
    table = []
    keys = [*_RUN, "way", "cache"]
    # The thread's own prompts are in the run of every seed.
    reuse = reuse.assign(cache=reuse["cache"].fillna(""), text=reuse["text"].fillna("").astype(str))
    reuse = reuse.drop_duplicates([*keys, "step"]).sort_values("step", kind="stable")
    of_all = [
        "prefix_tokens", "prompt_tokens", "shared_tokens", "fed_tokens", "cache_length", "prefix_end", "prefix_end_id",
        "prompt_there", "prompt_there_id",
    ]
    of_each = {"tokens": "token", "words": "text", "margins": "margin"}
    columns = {name: reuse[name].tolist() for name in (*of_all, *of_each.values())}
    for values, places in reuse.groupby(keys, sort=False).indices.items():
        table.append(
            dict(zip(keys, values, strict=True))
            | {name: columns[name][places[0]] for name in of_all}
            | {name: tuple(columns[column][place] for place in places) for name, column in of_each.items()}
        )
    frame = pd.DataFrame(table)
    base = frame[frame["way"] == continuations.NO_REUSE].set_index(_RUN)
    against = base.loc[pd.MultiIndex.from_frame(frame[_RUN])]
    pairs = list(zip(against["tokens"], frame["tokens"], strict=True))
    frame["equal"] = [one == other for one, other in pairs]
    # Where one text ends earlier the two part at its end.
    steps = [
        None if one == other else (agreement.first_divergence(list(one), list(other)) if one[: len(other)] != other
                                   and other[: len(one)] != one else min(len(one), len(other)))
        for one, other in pairs
    ]
    frame["first_divergence"] = steps
    frame["margin"] = [
        None if step is None or step >= len(margins) else margins[step]
        for step, margins in zip(steps, against["margins"], strict=True)
    ]
    frame["seam"] = frame["shared_tokens"] < frame["prefix_tokens"]
    return frame.drop(columns="margins")


CASES = {
    continuations.THREAD: "the thread's own prompts",
    continuations.JOINED: "first word joins the stop",
    continuations.DOCUMENTED: "cut after the space",
    continuations.SPACE: "cut before the space",
    continuations.CONTINUED: "ids continued",
    continuations.CHAT: "chat template, system turn",
    continuations.WHOLE: "cache holds the whole prompt",
    continuations.CORPUS: "corpus, cut anywhere",
}


def outcomes(table: pd.DataFrame) -> pd.DataFrame:
    """Count for every case, dtype and way the runs whose tokens equal those without reuse."""
    reused = table[table["way"] != continuations.NO_REUSE]
    found = []
    for case in CASES:
        for (dtype, way), rows in reused[reused["case"] == case].groupby(["dtype", "way"], sort=False):
            equal = int(rows["equal"].sum())
            found.append(
                {
                    "case": CASES[case], "dtype": DTYPES[dtype], "way": way, "seams": int(rows["seam"].sum()),
                    "equal": equal, "runs": len(rows), "estimate": estimates.share_over(rows, rows["equal"], "item")[0],
                }
            )
    return pd.DataFrame(found)


def outcome_grid(counts: pd.DataFrame) -> pd.DataFrame:
    """Lay `outcomes` out for reading: a row a case and dtype, a column a way."""
    said = counts["equal"].astype(str) + " of " + counts["runs"].astype(str)
    grid = counts.assign(said=said).pivot(index=["case", "dtype"], columns="way", values="said")
    order = list(dict.fromkeys(zip(counts["case"], counts["dtype"], strict=True)))
    ways = [way for way in (continuations.POSTED, continuations.SAFE) if way in grid]
    seam = counts.groupby(["case", "dtype"])["seams"].max()
    grid = grid.loc[order, ways]
    grid.insert(
        0,
        "ids do not continue",
        [
            f"{seam[key]} of {int(n)}"
            for key, n in zip(
                order,
                [counts[(counts["case"] == c) & (counts["dtype"] == d)]["runs"].max() for c, d in order],
                strict=True,
            )
        ],
    )
    return grid.rename_axis(columns=None).reset_index()


def seam_table(table: pd.DataFrame) -> pd.DataFrame:
    """Show the ids on both sides of the seam: what the cache ends in, and what the prompt has in its place."""
    found = []
    for row in documents.published(DOCUMENT)["seam"]:
        for there in row["whole_has"]:
            found.append(
                {
                    "model": _short(row["hub_id"]) + " (published vocabulary)", "case": "thread",
                    "shared": f"{row['prefix_tokens'] - 1} of {row['prefix_tokens']}",
                    "cache ends in": str(row["prefix_ends_in"]), "prompt has there": str(there),
                }
            )
    own = table[(table["way"] == continuations.NO_REUSE) & (table["dtype"] == table["dtype"].iloc[0])]
    own = own[own["item"].isin(continuations.OWN) | (own["case"] == continuations.JOINED)]
    for row in own[
        own["case"].isin([continuations.THREAD, continuations.JOINED, continuations.DOCUMENTED])
    ].itertuples():
        found.append(
            {
                "model": row.model,
                "case": CASES[row.case],
                "shared": f"{row.shared_tokens} of {row.prefix_tokens}",
                "cache ends in": f"{row.prefix_end_id} “{shown(row.prefix_end)}”",
                "prompt has there": f"{row.prompt_there_id} “{shown(row.prompt_there)}”",
            }
        )
    return pd.DataFrame(found).drop_duplicates(ignore_index=True)


def shown(text: str) -> str:
    """Write a text so that its line breaks and runs of spaces can be seen in one line."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    return re.sub(r"^ | $|  +", lambda spaces: "␣" * len(spaces[0]), text)


def side_by_side(table: pd.DataFrame, cases: tuple[str, ...]) -> pd.DataFrame:
    """Put the continuations of the thread's prompts beside one another, the place marked at which each leaves the first."""
    rows = table[(table["dtype"] == table["dtype"].iloc[0]) & table["cache"].isin(["", "dynamic"])]
    rows = rows[rows["item"].isin(continuations.OWN) | (rows["case"] == continuations.JOINED)]
    prompts = documents.published(DOCUMENT)["generation"]["prompts"]
    found = []
    for case in cases:
        for (model, item), group in rows[rows["case"] == case].groupby(["model", "item"], sort=False):
            if case == continuations.JOINED:
                prompt = f"{item} {prompts[-1].partition(' ')[2]}"
            else:
                more = {
                    continuations.DOCUMENTED: ", after a space", continuations.WHOLE: ", wholly cached",
                    continuations.CHAT: ", in the chat template",
                }
                prompt = prompts[int(item)] + more.get(case, "")
            line = {"model": model, "prompt": prompt}
            for run in group.itertuples():
                step = run.first_divergence
                if step is None or pd.isna(step):
                    line[run.way] = shown("".join(run.words))
                else:
                    words = run.words
                    line[run.way] = shown("".join(words[: int(step)])) + MARK + shown("".join(words[int(step) :]))
            found.append(line)
    return pd.DataFrame(found)


def cut_shares(cuts: pd.DataFrame) -> pd.DataFrame:
    """Estimate the share of cuts after which the first part's ids do not begin the whole text's."""
    table = []
    for name, rows in cuts.groupby("tokenizer", sort=False):
        unsafe = rows["safe"] == 0
        for place in ("anywhere", *tokenizer_boundaries.KINDS):
            part = rows if place == "anywhere" else rows[rows["place"] == place]
            if part["source"].nunique() < estimates.FEWEST_UNITS:
                continue
            share, files = estimates.share_of_rows(part, unsafe[part.index])
            table.append(
                {
                    "tokenizer": name,
                    "place": place,
                    "estimate": share,
                    "cuts": len(part),
                    "files": files,
                    "lost": float((part["prefix_tokens"] - part["shared_tokens"]).mean()),
                }
            )
    return pd.DataFrame(table, columns=["tokenizer", "place", "estimate", "cuts", "files", "lost"])
