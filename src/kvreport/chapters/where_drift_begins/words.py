"""What the chapter on where drift begins says in words: captions, and the numbers of its prose."""

import pandas as pd

from kvbook import lengths
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import attention_forms, cache_factorial, operation_replay, tables
from kvreport.chapters.where_drift_begins.results import Results
from kvreport.publishing import wording
from kvreport.publishing.wording import DTYPES, brackets


def _hardware(run: Run) -> str:
    """Name the hardware without its number of threads, where these are part of the measurement."""
    about = run.about["machine"]
    name = about["processor"] if about["device"] == "cpu" else about["device_name"]
    return f"{name}, torch {about['torch']}"


def captions(results: Results) -> dict[str, dict[str, str]]:
    """Write name, caption and alternative text of every figure and table, as `Page.figure` and `Page.table` take them."""
    asked = results.replayed.about["settings"]
    texts_replayed = f"{asked['n_replayed']} text{'s' * (asked['n_replayed'] > 1)}"
    replayed = (
        f"{wording.models(results.replayed)}; {texts_replayed} of {lengths.said(asked['n_tokens'])} tokens of "
        f"{wording.corpus(results.replayed)}; {wording.machine(results.replayed)}"
    )
    first = results.replayed.rows.iloc[0]
    length = _length_found(results.swept.rows, asked["n_tokens"])
    texts_swept = results.identical["texts"].max()
    swept = "one text" if texts_swept == 1 else f"up to {texts_swept} texts"
    spread = brackets(results.factorial.rows)
    gemm, keys = results.mapped.about["settings"], results.attention.about["settings"]
    texts = (
        f"{wording.models(results.factorial)}; {wording.samples(results.factorial)}, and one token more; "
        f"{wording.machine(results.factorial)}"
    )
    said = {
        "fig-operations": (
            f"{_operations_found(results.states)} Every operation with {first['attention']} attention, in order of "
            "execution. By itself: on such inputs, for the last row alone or for all rows but the last. Handed: in the real "
            f"decode step only. Cells right of the layers are behind them. {length} {replayed}.",
            "Three maps, one a dtype, of operations against layers; which operations differ by themselves is coloured dark.",
        ),
        "fig-kinds": (
            f"{_kinds_found(results.shares)} Share of calls whose result has other bits than in the full pass although "
            "their inputs have its bits, at these widths and on the texts' own numbers. Left or above: the last row alone; "
            "right or below: all rows but the last. "
            f"{length} {replayed}.",
            "Maps of kinds of operation against models, one a dtype and pass, each cell with its share.",
        ),
        "tab-first-difference": (
            "First operation of a real decode step (prefill of all tokens but the last, then the last) whose result has "
            f"other bits than the full pass's row. {length} {replayed}.",
            "",
        ),
        "fig-gemm-map": (
            f"{_gemm_found(results.products)} The first rows of one product with {gemm['outer_size']} columns, computed by "
            "themselves and among all. No model: numbers whose sums are zero, pair by pair, so that rounding is all that is left, "
            f"one draw a cell; {_hardware(results.mapped)}.",
            "Strips of the number of rows against the inner size, one block a dtype and number of threads: which numbers of "
            "rows give other bits is coloured dark.",
        ),
        "fig-lengths": (
            f"{_lengths_found(results.swept.rows)} {swept[:1].upper()}{swept[1:]} cut at every length. Hatched: the prefix's "
            "keys and values already differ from the full pass's; plain blue: they are equal, and the last token's own pass "
            "differs. "
            f"{wording.models(results.swept)}; {swept} of {wording.corpus(results.swept)}; {wording.machine(results.swept)}.",
            "Strips against the number of tokens, one an attention implementation and dtype: where bits are equal the strip "
            "is light.",
        ),
        "tab-lengths": (
            "Share of all lengths at which the last token's logits on a cache are bitwise identical to the full pass's, and "
            "at which the prefill's keys and values are. All lengths are tried, so the share has no interval; the lowest and "
            f"highest are those of single texts. {wording.models(results.swept)}; {swept} of "
            f"{wording.corpus(results.swept)}; {wording.machine(results.swept)}.",
            "",
        ),
        "fig-attention-forms": (
            f"{_forms_found(results.equal)} Share of rows with these bits, for each way to compute them from equal "
            "numbers: light is all, 0 is none, a dot is some. Hidden keys: masked positions behind the last key, as a "
            "static cache has them. One more row behind: the rows before it are compared. No model: random numbers, "
            f"{attention_forms.DRAWS} draws of {attention_forms.HEADS} heads of {attention_forms.HEAD_DIM}, "
            f"{min(keys['key_lengths'])} to {max(keys['key_lengths'])} keys; {wording.machine(results.attention)}.",
            "Maps of forms of the attention against the number of keys, one a kernel and dtype: dark where no row has equal "
            "bits.",
        ),
        "fig-factorial": (
            f"{_factorial_found(results.faults)} A pair counts if some sample's logits differ in a bit. "
            "Relative drift of these logits from the full pass over the unit "
            "roundoff, by who wrote the keys and values that are read and by how the last token is run: alone, or among all "
            f"rows. Mean with {spread}. {length} {texts}.",
            "Points with intervals for three sources of the cache and two ways to run the last token, one panel a dtype and "
            "length.",
        ),
        "tab-factorial": (
            "Relative drift of the last token's logits over the unit roundoff, "
            f"and what is enough for the logits of some sample to differ in a bit. Mean with {spread}. One row alone: the last "
            "token by itself on the full pass's own keys and values; prefill's or decoded cache alone: the last token among "
            f"all rows. {texts}.",
            "",
        ),
    }
    return wording.published(said)


def of_torch(runs: list[Run]) -> dict[str, str]:
    """Write name and caption of the table of several versions of torch, as `Page.table` takes them."""
    first = runs[0]
    asked = first.about["settings"]
    versions = wording.listed([run.about["machine"]["torch"].partition("+")[0] for run in runs])
    said = (
        f"Equal texts replayed with torch {versions} on one kind of processor: the first operation of a decode step that is not "
        "bitwise identical, and the share of calls that are not on inputs that are, by kind of operation and pass. Recorded "
        f"runs {wording.listed([f'`{run.hash}`' for run in runs])}; {wording.models(first)}; {asked['n_replayed']} texts of "
        f"{lengths.said(asked['n_tokens'])} tokens of {wording.corpus(first)}; {first.about['machine']['device_name']}."
    )
    return wording.published({"tab-older-torch": (said, "")})["tab-older-torch"]


def _operations_found(states: pd.DataFrame) -> str:
    """Say in how many places of the first model an operation gives other bits by itself."""
    first = states.iloc[0]
    states = states[(states["model"] == first["model"]) & (states["attention"] == first["attention"])]
    own = (
        states["state"].isin([tables.OWN_ROW, tables.OWN_PREFILL, tables.OWN_BOTH]).groupby(states["dtype"], sort=False)
    )
    if not own.any().any():
        return (
            f"On inputs with the full pass's bits, none of the {own.size().iloc[0]} operations of {first['model']} is seen to "
            "give other bits by itself."
        )
    counts = wording.in_dtypes({dtype: f"{count} of {own.size()[dtype]}" for dtype, count in own.sum().items()})
    return (
        f"On inputs with the full pass's bits, operations of {first['model']} give other bits by themselves: {counts}."
    )


def _kinds_found(shares: pd.DataFrame) -> str:
    """Say which kinds of operation give other bits on equal inputs, and in what share of calls in the cell with most."""
    drawn = shares[shares["pass"].isin([tables.ONE_ROW, operation_replay.PREFILL])]
    most = drawn.groupby("kind", sort=False)["share"].max()
    differing = most[most > 0]
    if differing.empty:
        return "On inputs with the full pass's bits, no kind of operation is seen to give other bits by itself."
    together: dict[str, list[str]] = {}
    for kind, share in differing.items():
        where = drawn.loc[(drawn["kind"] == kind) & (drawn["share"] == share), "dtype"].drop_duplicates().map(DTYPES)
        together.setdefault(wording.listed(list(where)), []).append(f"{kind} {wording.percent(share)}")
    said = "; ".join(f"{wording.listed(kinds)} in {dtypes}" for dtypes, kinds in together.items())
    which = "only these" if len(differing) < len(most) else "all kinds that were run"
    return f"On equal inputs, {which} give other bits, in up to so many calls: {said}."


def _gemm_found(states: pd.DataFrame) -> str:
    """Say at how many numbers of rows a product differs, at most over inner sizes and numbers of threads."""
    most = states["rows"].max()
    differs = states["state"] != tables.ALL_EQUAL
    if not differs.any():
        return f"At none of {most} numbers of rows is a matrix product seen to give a row other bits than among all {most}."
    counts = differs.groupby([states["dtype"], states["threads"], states["inner_size"]], sort=False).sum()
    said = {
        dtype: str(count) if count else "none" for dtype, count in counts.groupby("dtype", sort=False).max().items()
    }
    return f"Of {most} numbers of rows, a product gives some row other bits than all {most} at up to {wording.in_dtypes(said)}."


def _length_found(swept: pd.DataFrame, n_tokens: lengths.Length) -> str:
    """Say what the sweep over lengths shows at the texts' length and beside it, or over the range of their lengths."""
    first = swept.iloc[0]
    swept = swept[swept["attention"] == first["attention"]]
    low, high = lengths.bounds(n_tokens)
    if low < high:
        rows = swept[swept["n_tokens"].between(low, high)]
        differs = 1 - rows.groupby("dtype", sort=False)["cache_equal"].mean()
        return (
            f"Each text has its own length ({{numref}}`fig-lengths`): with {first['attention']} attention, the keys and values "
            f"of {first['model']}'s prefill differ from the full pass's at this share of lengths from {low} to {high}: "
            f"{wording.in_dtypes({dtype: wording.percent(share) for dtype, share in differs.items()})}."
        )
    rows = swept[swept["n_tokens"].between(low - 1, low + 1)]
    together: dict[str, list[str]] = {}
    for length, of in sorted(rows.groupby("n_tokens"), key=lambda pair: pair[0] != low):
        dtypes = [DTYPES[dtype] for dtype in of.loc[of["cache_equal"] == 0, "dtype"]]
        together.setdefault(wording.listed(dtypes) or "no dtype", []).append(str(length))
    said = ", ".join(f"in {dtypes} at {wording.listed(lengths)}" for dtypes, lengths in together.items())
    return (
        f"Another length can give another picture ({{numref}}`fig-lengths`): with {first['attention']} attention, the keys and "
        f"values of {first['model']}'s prefill differ from the full pass's {said} tokens."
    )


def _lengths_found(swept: pd.DataFrame) -> str:
    """Say at how many lengths a cached step has the full pass's bits, by attention and dtype."""
    tried = swept["n_tokens"].nunique()
    if swept["logits_equal"].all():
        return f"At all {tried} lengths, in every dtype, a cached step's logits have the full pass's bits."
    in_all_texts = swept.groupby(["dtype", "attention", "n_tokens"], sort=False)["logits_equal"].min()
    counts = in_all_texts.groupby(["dtype", "attention"], sort=False).sum()
    said = [
        f"in {DTYPES[dtype]} at {wording.listed([str(int(count)) for count in of])}"
        for dtype, of in counts.groupby("dtype", sort=False)
    ]
    kernels = wording.listed(list(dict.fromkeys(swept["attention"])))
    return f"Of {tried} lengths, a cached step has the full pass's bits {', '.join(said)} ({kernels} attention)."


def _forms_found(equal: pd.Series) -> str:
    """Say how often the last query alone has the causal pass's bits."""
    alone = equal["1 row, no mask"]
    if (alone == 1).all():
        return "The last query alone has the bits of the causal pass over all rows in every kernel, dtype and draw."
    said = {
        dtype: " to ".join(dict.fromkeys(wording.percent(end) for end in (of.min(), of.max())))
        for dtype, of in alone.groupby("dtype", sort=False)
    }
    return (
        "The last query alone has the bits of the causal pass in this share of rows, by kernel: "
        f"{wording.in_dtypes(said)}."
    )


def _factorial_found(faults: pd.DataFrame) -> str:
    """Say in how many pairs of dtype and length each factor alone changes the logits."""
    by_query, by_cache = (faults[faults["fault"].isin([tables.BOTH, alone])] for alone in (tables.QUERY, tables.CACHE))
    pairs = f"{len(faults)} pairs of dtype and length"
    if by_query.empty and by_cache.empty:
        return (
            "Neither running the last token alone nor reading a prefill's keys and values is seen to change its logits, in "
            f"{pairs}."
        )
    where = [
        f"{wording.listed([DTYPES[dtype] for dtype in rows['dtype']])} at {n_tokens} tokens"
        for n_tokens, rows in by_cache.groupby("n_tokens", sort=False)
    ]
    return (
        f"Running the last token alone gives it other logits in {len(by_query)} of {pairs}. A prefill's cache alone "
        "does in " + (f"{len(by_cache)} ({'; '.join(where)})." if where else "none.")
    )


def _by_kind(shares: pd.DataFrame, name: str) -> str:
    """Write the share of differing calls by dtype and kind, over all models."""
    parts = []
    for dtype, rows in shares[shares["pass"] == name].groupby("dtype", sort=False):
        sums = rows.groupby("kind", sort=False)[["differing", "calls"]].sum()
        said = [f"{row.Index} {row.differing / row.calls:.0%}" for row in sums.itertuples() if row.differing]
        parts.append(f"{DTYPES[dtype]}: {', '.join(said) or 'none'}")
    return "; ".join(parts)


def _share(equal: pd.Series, form: str) -> str:
    """Write the share of equal rows of a form by dtype: from the kernel with the least to that with the most."""
    parts = []
    for dtype, of in equal[form].groupby("dtype", sort=False):
        ends = dict.fromkeys(f"{end:.1%}" for end in (of.min(), of.max()))
        parts.append(f"{DTYPES[dtype]} {' to '.join(ends)}")
    return "; ".join(parts)


def numbers(results: Results) -> dict[str, str]:
    """Write every number that the chapter's prose quotes, by its glue key."""
    return {
        **_of_replay(results),
        **_of_gemm(results.products),
        "prefill_lengths": f"{int(results.swept.rows['cache_equal'].sum())} of {len(results.swept.rows)}",
        **_of_attention(results),
        **_of_factorial(results),
    }


def _of_replay(results: Results) -> dict[str, str]:
    replayed, shares = results.replayed.rows, results.shares
    on_equal = replayed[replayed["pass"] != operation_replay.REAL]
    again = on_equal[on_equal["pass"] == operation_replay.ALL]
    differing = shares.groupby("kind", sort=False)["differing"].sum()
    chunks = [
        name for name in dict.fromkeys(shares["pass"])
        if name.startswith("last ") and name != operation_replay.last(1)
    ]  # fmt: skip
    return {
        "replayed_calls": f"{on_equal['calls'].sum():,}",
        "inputs_equal": f"{int(on_equal.loc[on_equal['inputs_equal'] == 1, 'calls'].sum()):,}",
        "inputs_unequal": "; ".join(f"{row.model}, {row.operation}" for row in results.unequal.itertuples()) or "none",
        "again": f"{int(again['differing_calls'].sum())} of {again['calls'].sum():,}",
        "own_one_row": _by_kind(shares, operation_replay.last(1)),
        "own_chunks": " — ".join(f"{name} rows: {_by_kind(shares, name)}" for name in chunks) or "not measured",
        "own_prefill": _by_kind(shares, operation_replay.PREFILL),
        "never": ", ".join(kind for kind, count in differing.items() if not count) or "none",
    }


def _of_gemm(states: pd.DataFrame) -> dict[str, str]:
    said = []
    for (dtype, threads), rows in states.groupby(["dtype", "threads"], sort=False):
        lists: dict[str, list[str]] = {}
        for inner, of in rows.groupby("inner_size"):
            differing = tables.runs_of_numbers(list(of.loc[of["state"] != tables.ALL_EQUAL, "rows"])) or "none"
            lists.setdefault(differing, []).append(str(inner))
        listed = ", and ".join(
            numbers if len(lists) == 1 else f"{numbers} at inner size{'s' * (len(sizes) > 1)} {wording.listed(sizes)}"
            for numbers, sizes in lists.items()
        )
        said.append(f"{DTYPES[dtype]}, {threads} thread{'s' * (threads > 1)}: {listed}")
    moved = [
        DTYPES[dtype]
        for dtype, rows in states.groupby("dtype", sort=False)
        if rows.groupby(["inner_size", "rows"])["state"].nunique().max() > 1
    ]
    return {
        "gemm": "; ".join(said),
        "gemm_threads": f"changes it in {', '.join(moved)}" if moved else "changes it in no dtype",
    }


def _of_attention(results: Results) -> dict[str, str]:
    attention, equal = results.attention.rows, results.equal
    changed = attention[attention["equal_rows"] < attention["compared_rows"]]
    ratios = changed["form_error"] / changed["reference_error"]
    return {
        "attention_one": _share(equal, "1 row, no mask"),
        "attention_mask": _share(equal, "all rows, boolean mask"),
        "attention_hidden_one": _share(equal, "1 row, 64 hidden keys"),
        "attention_hidden": _share(equal, "all rows, 64 hidden keys"),
        "attention_behind": _share(equal, "one more row behind"),
        "attention_error": (
            f"{ratios.median():.2f} (from {ratios.min():.2f} to {ratios.max():.2f})"
            if len(ratios)
            else "not defined: none differ"
        ),
    }


def _of_factorial(results: Results) -> dict[str, str]:
    table = results.drifts
    reference = table[(table["cache"] == cache_factorial.FULL) & (table["query"] == cache_factorial.ALL_ROWS)]
    return {
        "fault": "; ".join(
            f"{DTYPES[row.dtype]}, {row.n_tokens} tokens: {row.fault}" for row in results.faults.itertuples()
        ),
        "fault_control": f"{int(reference['equal'].sum())} of {int(reference['samples'].sum())}",
    }
