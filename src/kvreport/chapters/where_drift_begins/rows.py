"""The rows of the chapter on where drift begins by name; to read them takes no torch."""

import pandas as pd

from kvbook.lengths import said
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.runs import evidence
from kvbook.runs.records import Run
from kvreport.publishing.wording import between

# The chapter's experiments and the revision of their rows.
EXPERIMENTS = {
    "operation_replay": 1, "gemm_map": 1, "length_sweep": 2, "attention_forms": 1, "cache_factorial": 2,
    "equal_shapes": 1, "kernels": 1, "summation": 1,
}


def last(rows: int) -> str:
    """Name the pass of the last rows."""
    return f"last {rows}"


# Passes of the replay.  The real step runs as it comes: a prefill of all tokens but the last, then the last.
REAL, PREFILL, ALL, LAST_ONE = "real decode step", "all but the last", "all", last(1)
# Kinds of operation, in the order in which tables and figures list them.
KINDS = ("embedding", "norm", "linear", "attention", "elementwise", "lm head")
_CASE = ["model", "attention", "dtype"]

# The cached step: who wrote its keys and values, and whether its last token runs alone.
SOURCES = FROM_FULL, FROM_PREFILL, FROM_DECODE = "full pass", "prefill", "decode"
ONE_ROW, ALL_ROWS = "one row", "all rows"

# Passes that read a prompt twice.
EQUAL, FEWER = "equal", "one token fewer"

# How a product of fewer rows compares with that of the most rows.
STATES = ALL_EQUAL, FIRST_EQUAL, NONE_EQUAL = ("every row equal", "first row equal, others not", "first row differs")

# The attention among the calls whose kernels are read, and a call of which no library reports anything.
ATTENTION, UNREPORTED = "attention", "not reported"
# What a profiler says of machine code that oneDNN makes when it runs.
WRITTEN = "written by oneDNN"
# Functions that compute, and none that torch dispatches with or that a profile did not catch.
MULTIPLYING = r"at::native|(?!at::|c10::|torch::|not reported|written by)"

# Forms of the attention.
FORMS = BOOLEAN, ADDITIVE, ALONE, ALONE_MASKED, THREE, SIXTEEN, ALONE_HIDDEN, HIDDEN, LONGER = (
    "all rows, boolean mask", "all rows, additive mask", "1 row, no mask", "1 row, boolean mask",
    "3 rows, boolean mask", "16 rows, boolean mask", "1 row, 64 hidden keys", "all rows, 64 hidden keys",
    "one more row behind",
)


def older_torch() -> list[Run]:
    """Read the recorded replays of equal texts on several versions of torch, the oldest first."""
    return evidence.cited("where_drift_begins", "an older torch", EXPERIMENTS)["operation_replay"]


def of_first_model(rows: pd.DataFrame) -> pd.Series:
    """Tell where rows are of a run's first model."""
    return rows["model"] == rows["model"].iloc[0]


def _differs_itself(rows: pd.DataFrame) -> pd.Series:
    """Tell where an operation differs on equal inputs."""
    return (rows["differing_calls"] > 0) & (rows["inputs_equal"] == 1)


def operations(operation_replay: pd.DataFrame) -> pd.DataFrame:
    """Share of texts in which an operation differs on equal inputs when the last row runs alone."""
    rows = operation_replay
    # What runs before the layers stands before the first of them, and the rest after the last.
    depth = rows.groupby("model")["layer"].transform("max") + 1
    inner = rows["order"].where(rows["layer"].notna()).groupby(rows["model"]).transform("min")
    outside = depth.where(rows["order"] > inner, -1)
    rows = rows.assign(layer=rows["layer"].fillna(outside).astype(int), differs=_differs_itself(rows))
    groups = rows[rows["pass"] == LAST_ONE].groupby([*_CASE, "operation", "kind", "layer"], sort=False)
    return groups.agg(order=("order", "min"), share=("differs", "mean")).reset_index()


def calls(operation_replay: Run) -> pd.DataFrame:
    """Share of each text's calls that differ on equal inputs, by kind of operation."""
    rows = operation_replay.rows
    rows = rows[rows["pass"] != REAL]
    rows = rows.assign(differing=rows["differing_calls"].where(_differs_itself(rows), 0))
    groups = rows.groupby([*_CASE, "pass", "kind", "source", "sample"], sort=False)
    table = groups[["calls", "differing"]].sum().reset_index()
    tokens = said(operation_replay.about["settings"]["n_tokens"])
    return table.assign(share=table["differing"] / table["calls"], tokens=tokens, first=of_first_model(table))


def kinds(calls: pd.DataFrame) -> pd.DataFrame:
    """Average the share of each kind's calls over texts, as the sentences do."""
    return calls.groupby([*_CASE, "pass", "kind"], sort=False)["share"].mean().reset_index()


def calls_but_down_proj(operation_replay: pd.DataFrame) -> pd.DataFrame:
    """Calls of one row in the first model's linear layers, without the last product of each MLP."""
    rows = operation_replay[of_first_model(operation_replay)]
    rows = rows[(rows["pass"] == LAST_ONE) & (rows["kind"] == "linear")]
    rows = rows[~rows["operation"].str.endswith("down_proj", na=False)]
    return rows.assign(share=rows["differing_calls"] / rows["calls"])


def beginnings(operation_replay: pd.DataFrame) -> pd.DataFrame:
    """First operation of each text's real decode step that differs, in the order of execution."""
    text, real = [*_CASE, "source", "sample"], operation_replay[operation_replay["pass"] == REAL]
    differing = real[real["first_differing"].notna()].sort_values("first_differing")
    first = differing.drop_duplicates(text)[[*text, "layer", "operation", "inputs_equal"]]
    found = real[text].drop_duplicates().merge(first, how="left", on=text)
    outside = found["layer"].isna()
    at_q = (found["layer"] == 0) & found["operation"].str.endswith("q_proj", na=False)
    return found.assign(
        first=of_first_model(found), at_q=at_q, later=found["operation"].notna() & ~at_q,
        in_the_step=found["inputs_equal"] == 1,
        place=found["operation"].where(outside, "layer " + found["layer"].map("{:.0f} ".format) + found["operation"]),
    )


def products(gemm_map: pd.DataFrame) -> pd.DataFrame:
    """Compare the product of each number of rows with that of the most rows."""
    state = gemm_map["first_row_equal"].map({1: FIRST_EQUAL, 0: NONE_EQUAL})
    return gemm_map.assign(state=state.where(gemm_map["equal_rows"] < gemm_map["rows"], ALL_EQUAL))


def differing_products(products: pd.DataFrame) -> pd.DataFrame:
    """Products with their number of rows if one of these differs, else 0, and whether their sums are the longest."""
    size, differing = products["inner_size"], products["rows"] * (products["state"] != ALL_EQUAL)
    return products.assign(K="K = " + size.astype(str), longest=size == size.max(), differing=differing)


def lengths(length_sweep: pd.DataFrame) -> pd.DataFrame:
    """Share of texts whose logits differ at a length, and of those whose prefill wrote another cache."""
    means = length_sweep.groupby(["attention", "dtype", "n_tokens"], sort=False)[["logits_equal", "cache_equal"]].mean()
    return (1 - means).set_axis(["logits", "cache"], axis=1).reset_index()


def forms(attention_forms: pd.DataFrame) -> pd.DataFrame:
    """Share of rows that differ from the causal pass."""
    forms = attention_forms.groupby(["kernel", "dtype", "form", "keys"], sort=False)
    sums = forms[["equal_rows", "compared_rows"]].sum()
    return (1 - sums["equal_rows"] / sums["compared_rows"]).rename("share").reset_index()


def steps(cache_factorial: pd.DataFrame) -> pd.DataFrame:
    """Cached steps with their drift in unit roundoffs, in two groups: the drawn lengths, and one token more."""
    rows = cache_factorial
    return rows.assign(
        n_tokens=rows.groupby(["dtype", "longer"])["n_tokens"].transform(lambda of: between(of, "{}")),
        units=rows["relative_rms"] / rows["dtype"].map(UNIT_ROUNDOFF), differs=rows["differing_share"] > 0,
    )


def prompts(equal_shapes: pd.DataFrame) -> pd.DataFrame:
    """Tell of every prompt that was read twice whether anything differs."""
    prompts = equal_shapes.groupby(["shapes", "dtype", "source", "sample"], sort=False)
    differing = prompts["differing"].sum().reset_index()
    return differing.assign(differs=differing["differing"] > 0, equal=differing["differing"] == 0)


def kernels_by_rows(kernels: pd.DataFrame) -> pd.DataFrame:
    """Name what ran for each number of rows; of the attention, too, how many rows its products have at most."""
    rows = kernels.join(kernels["shape"].str.extract(r"(?P<height>\d+)x(?P<terms>\d+)").apply(pd.to_numeric))
    # A shape is reported of some calls only, and the attention's first product has its terms.
    rows["terms"] = rows.groupby("operation")["terms"].transform("min")
    groups = rows.groupby(["dtype", "operation", "rows"], sort=False)
    names = groups.agg(kernel=("kernel", lambda of: " and ".join(sorted(set(of)))))
    found = names.join(groups[["height", "terms"]].max()).reset_index()
    return found.assign(linear=found["operation"] != ATTENTION)


def orders(summation: pd.DataFrame) -> pd.DataFrame:
    """Tell of every product whether its order is another than that of the most rows, and whether bits disagree."""
    rows = summation[summation["in_a_row"].notna()]
    other, differs = rows["order_equal"] == 0, rows["equal_rows"] < rows["rows"]
    return rows.assign(other=other, unexplained=other != differs, last=rows["operations"].str.contains("down_proj"))


def with_threads(orders: pd.DataFrame) -> pd.DataFrame:
    """Tell at which shapes and numbers of rows kernel and order change with the number of threads."""
    groups = orders.groupby(["dtype", "operations", "rows"], sort=False)[["kernel", "other"]]
    return groups.agg(lambda of: len(set(of)) > 1).reset_index()


def one_against_many(orders: pd.DataFrame) -> pd.DataFrame:
    """Divide the terms in a row of one row's sums by those of the most rows, on the fewest threads."""
    orders = orders[orders["threads"] == orders["threads"].min()].set_index(["dtype", "operations"])
    terms = [orders.loc[orders["rows"] == count, "in_a_row"] for count in (1, orders["rows"].max())]
    return (terms[0] / terms[1]).rename("longer").reset_index()
