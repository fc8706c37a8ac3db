"""Tables of the chapter on where drift begins, as its page shows them."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import pandas as pd

from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import measures, rows
from kvreport.publishing import processors
from kvreport.publishing.found import Found
from kvreport.publishing.judging import with_units
from kvreport.publishing.wording import DTYPES, between, listed, percent


def beside(own: pd.DataFrame, book: pd.DataFrame) -> pd.DataFrame:
    """Put the first model of the book after the models of a run, in the run's dtypes."""
    first = book[(book["model"] == book["model"].iloc[0]) & (book["attention"] == book["attention"].iloc[0])]
    first = first[first["dtype"].isin(own["dtype"]) & first["pass"].isin(own["pass"])]
    return pd.concat([own, first.assign(model="the book-" + first["model"].str.partition("-")[0])], ignore_index=True)


def first_differences(beginnings: pd.DataFrame) -> pd.DataFrame:
    """Count the texts whose decode step differs, and say where it begins most often."""
    table = []
    for (model, attention, dtype), texts in beginnings.groupby(["model", "attention", "dtype"], sort=False):
        places, most = texts["place"].dropna(), _most_often(texts)
        table.append(
            {
                "model": model, "attention": attention, "dtype": DTYPES[dtype],
                "texts that differ": f"{len(places)} of {len(texts)}",
                "begun by the step itself": f"{texts['in_the_step'].sum()} of {len(places)}" if most else "",
                "first operation, most often": f"{most} ({(places == most).sum()})" if most else "",
            }
        )
    return pd.DataFrame(table)


def _most_often(beginnings: pd.DataFrame) -> str:
    return next(iter(beginnings["place"].mode()), "")


def by_torch(runs: Iterable[Run]) -> pd.DataFrame:
    """Lay out what replays with several versions of torch found."""
    table = []
    for run in runs:
        found = Found(rows.ROWS, {"operation_replay": run})
        kinds = found["kinds"][found["kinds"]["share"] > 0]
        for (attention, dtype), texts in found["beginnings"].groupby(["attention", "dtype"], sort=False):
            differing = kinds[(kinds["attention"] == attention) & (kinds["dtype"] == dtype)]
            shares = [f"{row['kind']}, {row['pass']}: {percent(row['share'])}" for _, row in differing.iterrows()]
            table.append(
                {
                    "torch": run.about["machine"]["torch"].partition("+")[0], "attention": attention,
                    "dtype": DTYPES[dtype], "texts that differ": f"{texts['place'].count()} of {len(texts)}",
                    "first operation, most often": _most_often(texts) or "none",
                    "calls that differ locally": "; ".join(shares) or "none",
                }
            )
    return pd.DataFrame(table)


def prefills(compared: pd.DataFrame) -> pd.DataFrame:
    """Count the prompts in which anything differs, by what is compared, for equal shapes and for one token fewer."""
    differs = compared.assign(differs=compared["differing"] > 0)
    groups = differs.groupby(["shapes", "what", "dtype"], sort=False)["differs"]
    counts = groups.agg(lambda of: f"{of.sum()} of {len(of)}").unstack(sort=False)
    return counts.rename(columns=DTYPES).rename_axis(index={"what": "compared"}, columns=None).reset_index()


def kernels(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """List which kernel runs at which numbers of rows, where nothing is held back; operations alike share a line."""
    alike: dict[tuple, list[str]] = {}
    by_rows = {
        _label(found, "kernels"): _named(found) for name, found in everywhere.items()
        if found.runs.get("kernels") and not processors.LIMIT.search(name)
    }
    of_all = pd.concat(by_rows, names=["processor"])
    linear = ", ".join(of_all[of_all["linear"]]["operation"].unique())
    for (on, dtype, operation), of in of_all.groupby(["processor", "dtype", "operation"], sort=False):
        ran = groupby(zip(of["rows"], of["kernel"], strict=True), lambda pair: pair[1])
        spans = [(between([count for count, _ in pairs], "{}"), kernel) for kernel, pairs in ran]
        alike.setdefault((on, DTYPES[dtype], *spans), []).append(operation)
    table = pd.DataFrame(
        [
            {"processor": on, "dtype": dtype, "operation": ", ".join(operations), "rows": at, "kernel": kernel}
            for (on, dtype, *spans), operations in alike.items() for at, kernel in spans
        ]
    )
    return table.assign(operation=table["operation"].str.replace(linear, "all linear layers", regex=False))


def _named(found: Found) -> pd.DataFrame:
    """Give the kernels by rows; for what no library reports, the functions that a profile names."""
    ran, profiled = found["kernels by rows"], found["summation"]
    if profiled is None:
        return ran
    told = profiled[profiled["function"].str.match(rows.MULTIPLYING, na=False)]
    each = told.assign(operation=told["operations"].str.split(", ")).explode("operation")
    names = each.groupby(["dtype", "operation"])["function"].agg(lambda of: " and ".join(sorted(set(of))))
    asked = names.reindex(pd.MultiIndex.from_frame(ran[["dtype", "operation"]])).set_axis(ran.index)
    return ran.assign(kernel=ran["kernel"].mask(ran["kernel"] == rows.UNREPORTED, asked.fillna(rows.UNREPORTED)))


def orders(everywhere: Mapping[str, Found], held_back: bool = False) -> pd.DataFrame:
    """List which function runs at which numbers of rows, and in which order it adds up, on the fewest threads.

    Where a library is held back, what is not as it is where none is.
    """
    alike: dict[tuple, dict[str, int]] = {}
    free: set[tuple] = set()
    for name, found in everywhere.items():
        if (ran := found["summation"]) is None:
            continue
        held, on = bool(processors.LIMIT.search(name)), _label(found, "summation")
        ran = ran[ran["threads"] == ran["threads"].min()].sort_values(["dtype", "rows"], ascending=[False, True])
        # Code that oneDNN writes when it runs has no name but the one that it reports.
        function = ran["function"].where(ran["function"].str.match(rows.MULTIPLYING, na=False), ran["kernel"])
        ran = ran.assign(said=list(zip(ran["rows"], function, map(_order, ran.itertuples()), strict=True)))
        for (dtype, operations), of in ran.groupby(["dtype", "operations"], sort=False):
            told = {(dtype, operations, *said) for said in of["said"]}
            if not held:
                free |= told
            if held != held_back or (held and told <= free):
                continue
            runs = [(between([one[0] for one in ones], "{}"), *what) for what, ones in _spans(of["said"])]
            terms = dict.fromkeys(operations.split(", "), of["inner_size"].iloc[0])
            alike.setdefault((on, DTYPES[dtype], *runs), {}).update(terms)
    linear = {name for operations in alike.values() for name in operations} - {rows.ATTENTION}
    table = [
        {
            "processor": on, "dtype": dtype, "operation": _among([*terms], linear),
            "terms": ", ".join(map(str, sorted(set(terms.values())))), "rows": at, "function": function, "adds": order,
        }
        for (on, dtype, *runs), terms in alike.items() for at, function, order in runs
    ]
    return pd.DataFrame(table)


def _among(operations: list[str], linear: set[str]) -> str:
    """Name operations, or what is missing of all linear layers, whichever is shorter."""
    found, but = ", ".join(operations), ", ".join(sorted(linear - set(operations)))
    if rows.ATTENTION in operations or len(found) < len(but):
        return found
    return f"all but {but}" if but else "all linear layers"


def _spans(said: Iterable[tuple]) -> list[tuple[tuple, list[tuple]]]:
    return [(what, list(ones)) for what, ones in groupby(said, lambda one: one[1:])]


def _order(of: Any) -> str:
    """Say how the sums of one product are made; of the attention nothing was asked."""
    if pd.isna(of.in_a_row):
        return ""
    if of.sums > 1:
        return f"{of.sums:.0f} sums in turn"
    return "one sum" if of.in_a_row == of.inner_size else f"pieces of {of.in_a_row:.0f}"


def by_kernel(everywhere: Mapping[str, Found]) -> pd.DataFrame:
    """Lay out which products of one row in bf16 run in which kernel, and which of them differ."""
    table = []
    for found in everywhere.values():
        operations, ran = found["operations of the first model"], found["kernels by rows"]
        if operations is None or ran is None:
            continue
        differing = operations.query("kind == 'linear' and dtype == 'bfloat16' and attention == 'sdpa' and share > 0")
        names = {operation.rpartition(".")[2] for operation in differing["operation"]}
        linear = _named(found)[ran["linear"] & (ran["dtype"] == "bfloat16")]
        estimate = measures.LINEAR.where(dtype="bfloat16")(found)[0]
        table.append(
            {
                "processor": _label(found, "operation_replay"),
                "kernel of linear layers": listed(linear["kernel"].unique()),
                "calls that differ": with_units([estimate], "files", "{:.1%}"),
                "in": listed([name for name in linear["operation"].unique() if name in names]) or "none",
            }
        )
    return pd.DataFrame(table)


def _label(found: Found, experiment: str) -> str:
    return processors.label(run.about["machine"] for run in found.behind(experiment))


def drifts(found: Found) -> pd.DataFrame:
    """Average the drift of every way to score the last token, and count the texts whose logits are equal."""
    differs = found["steps"].groupby(list(measures.DRIFT.by), sort=False)["differs"]
    counts = pd.DataFrame({"equal": differs.size() - differs.sum(), "samples": differs.size()})
    return measures.DRIFT.table(found, "drift").merge(counts.reset_index())
