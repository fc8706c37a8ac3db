"""Tables of the chapter on where drift begins, as its page shows them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import measures, rows
from kvreport.publishing import processors
from kvreport.publishing.found import Found, of_runs
from kvreport.publishing.judging import with_units
from kvreport.publishing.wording import DTYPES, between, listed, percent


def beside(own: pd.DataFrame, book: pd.DataFrame) -> pd.DataFrame:
    """Put the first model of the book after the models of a run, in the run's dtypes."""
    first = book[(book["model"] == book["model"].iloc[0]) & (book["attention"] == book["attention"].iloc[0])]
    first = first[first["dtype"].isin(own["dtype"]) & first["pass"].isin(own["pass"])]
    return pd.concat([own, first.assign(model="the book-" + first["model"].str.split("-").str[0])], ignore_index=True)


def first_differences(beginnings: pd.DataFrame) -> pd.DataFrame:
    """Count the texts whose decode step differs, and say where it begins most often."""
    table = []
    for (model, attention, dtype), texts in beginnings.groupby(["model", "attention", "dtype"], sort=False):
        places, most = texts["place"].dropna(), _most_often(texts)
        table.append({
            "model": model, "attention": attention, "dtype": DTYPES[dtype],
            "texts that differ": f"{len(places)} of {len(texts)}",
            "begun by the step itself": f"{texts['in_the_step'].sum()} of {len(places)}" if most else "",
            "first operation, most often": f"{most} ({(places == most).sum()})" if most else "",
        })
    return pd.DataFrame(table)


def _most_often(beginnings: pd.DataFrame) -> str:
    return next(iter(beginnings["place"].mode()), "")


def by_torch(runs: Iterable[Run]) -> pd.DataFrame:
    """Lay out what replays with several versions of torch found."""
    table = []
    for run in runs:
        found = of_runs("where_drift_begins", {"operation_replay": run})
        kinds = found["kinds"][found["kinds"]["share"] > 0]
        for (attention, dtype), texts in found["beginnings"].groupby(["attention", "dtype"], sort=False):
            differing = kinds[(kinds["attention"] == attention) & (kinds["dtype"] == dtype)]
            shares = [f"{row['kind']}, {row['pass']}: {percent(row['share'])}" for _, row in differing.iterrows()]
            table.append({
                "torch": run.about["machine"]["torch"].partition("+")[0], "attention": attention,
                "dtype": DTYPES[dtype], "texts that differ": f"{texts['place'].count()} of {len(texts)}",
                "first operation, most often": _most_often(texts) or "none",
                "calls that differ locally": "; ".join(shares) or "none",
            })
    return pd.DataFrame(table)


def prefills(compared: pd.DataFrame) -> pd.DataFrame:
    """Count the prompts in which anything differs, by what is compared, for equal shapes and for one token fewer."""
    differs = compared.assign(differs=compared["differing"] > 0)
    groups = differs.groupby(["shapes", "what", "dtype"], sort=False)["differs"]
    counts = groups.agg(lambda of: f"{of.sum()} of {len(of)}").unstack(sort=False)
    return counts.rename(columns=DTYPES).rename_axis(index={"what": "compared"}, columns=None).reset_index()


def _told(found: Found) -> pd.DataFrame:
    """Tell of each operation, dtype and number of rows what runs: a profile's name, else what a library reports."""
    if (ran := found["summation"]) is None:
        return found["kernels by rows"].assign(adds="")
    ran = ran[ran["threads"] == ran["threads"].min()].sort_values(["dtype", "rows"], ascending=[False, True])
    # Code that oneDNN writes when it runs has no name but the one that it reports.  The attention is several functions,
    # of which a profile tells the first.
    named = ran["function"].str.match(rows.MULTIPLYING, na=False) & (ran["operations"] != rows.ATTENTION)
    kernel = ran["function"].where(named, ran["kernel"])
    ran = ran.assign(kernel=kernel, adds=[*map(_order, ran.itertuples())], operation=ran["operations"].str.split(", "))
    ran = ran.rename(columns={"inner_size": "terms"}).explode("operation")
    return ran.assign(linear=ran["operation"] != rows.ATTENTION)


def _order(of: Any) -> str:
    """Say how the sums of one product are made; of the attention nothing was asked."""
    if pd.isna(of.in_a_row):
        return ""
    if of.sums > 1:
        return f"{of.sums:.0f} sums in turn"
    return "one sum" if of.in_a_row == of.inner_size else f"pieces of {of.in_a_row:.0f}"


def free(everywhere: Mapping[str, Found]) -> dict[str, Found]:
    """Choose where the kernels were read and no library is held back."""
    read = {name: found for name, found in everywhere.items() if found["kernels"] is not None}
    return {name: found for name, found in read.items() if not processors.LIMIT.search(name)}


def replayed(everywhere: Mapping[str, Found]) -> dict[str, Found]:
    """Choose where the kernels were read and operations replayed."""
    return {
        name: found for name, found in everywhere.items()
        if found["operations"] is not None and found["kernels"] is not None
    }


def kernels(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """List what runs at which numbers of rows, and how it adds; what is alike is joined."""
    alike: dict[tuple, dict[str, str]] = {}
    for found in everywhere.values():
        told = _told(found)
        on = _label(found, "kernels", "summation")
        for (dtype, operation), of in told.groupby(["dtype", "operation"], sort=False):
            spans = groupby(zip(of["rows"], of["kernel"], of["adds"], strict=True), lambda one: one[1:])
            runs = [(between((count for count, *_ in ones), "{}"), *what) for what, ones in spans]
            alike.setdefault((on, DTYPES[dtype], *runs), {})[operation] = f"{of['terms'].max():.0f}"
    linear = {operation for terms in alike.values() for operation in terms} - {rows.ATTENTION}
    table = [
        {
            "processor": on, "dtype": dtype, "operation": _among([*terms], linear),
            "terms": ", ".join(dict.fromkeys(terms.values())), "rows": at, "kernel": kernel, "adds": adds,
        }
        for (on, dtype, *runs), terms in alike.items() for at, kernel, adds in runs
    ]
    return pd.DataFrame(table)


def _among(operations: Sequence[str], linear: set[str]) -> str:
    """Name operations, but linear layers by those that are missing where these are fewer."""
    missing, others = sorted(linear - {*operations}), [name for name in operations if name not in linear]
    if 2 * len(missing) >= len(linear):
        return ", ".join(operations)
    return ", ".join([f"all but {', '.join(missing)}" if missing else "all linear layers", *others])


def by_kernel(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Lay out which products of one row in bf16 run in which kernel, and which of them differ."""
    table = []
    for found in everywhere.values():
        operations, ran = found["operations"], _told(found)
        operations = operations[rows.of_first_model(operations)]
        differing = operations.query("kind == 'linear' and dtype == 'bfloat16' and attention == 'sdpa' and share > 0")
        names = {operation.rpartition(".")[2] for operation in differing["operation"]}
        linear = ran[ran["linear"] & (ran["dtype"] == "bfloat16")]
        estimate = measures.LINEAR.where(dtype="bfloat16")(found)[0]
        one, every = linear["rows"] == 1, {*linear["operation"]}
        table.append(
            {
                "processor": _label(found, "operation_replay"),
                "calls that differ": with_units([estimate], "files", "{:.1%}"),
                "in": _among([name for name in linear["operation"].unique() if name in names], every) or "none",
                "one row adds": _adds(linear[one]), "more rows add": _adds(linear[~one]),
                "kernel of linear layers": listed(linear["kernel"].unique()),
            }
        )
    return pd.DataFrame(table)


def _adds(ran: pd.DataFrame) -> str:
    """Name the orders of some products, and which have which."""
    orders = {order: [*of.unique()] for order, of in ran.groupby("adds", sort=False)["operation"]}
    linear = {*ran["operation"]}
    return "; ".join(f"{order} in {_among(of, linear)}" if len(orders) > 1 else order for order, of in orders.items())


def _label(found: Found, *experiments: str) -> str:
    return processors.label(run.about["machine"] for run in found.behind(*experiments))


def drifts(found: Found) -> pd.DataFrame:
    """Average the drift of every way to score the last token, and count the texts whose logits are equal."""
    differs = found["steps"].groupby(list(measures.DRIFT.by), sort=False)["differs"]
    counts = pd.DataFrame({"equal": differs.size() - differs.sum(), "samples": differs.size()})
    return measures.DRIFT.table(found, "drift").merge(counts.reset_index())
