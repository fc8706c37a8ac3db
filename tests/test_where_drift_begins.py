"""The experiments on where drift begins: each finds what was injected, and finds nothing where nothing is."""

import functools
from dataclasses import replace

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from planted import run_of, with_rows, with_runs

from kvbook import lengths, paths
from kvbook.errors import UserError
from kvbook.measuring import agreement, full_and_split
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    equal_shapes,
    figures,
    gemm_map,
    length_sweep,
    measures,
    operation_replay,
    rows,
    tables,
)
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings
from kvreport.publishing import found as found_in
from kvreport.publishing.statements import check

NAME = "where_drift_begins"


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return WhereDriftBeginsSettings.checked(
        model=str(llama_folder), families=[str(gpt2_folder)], corpus=str(text_folder), n_samples=4, n_tokens="9-14",
        max_rows=8, chunks="1,3", inner_sizes="16", threads="1", key_lengths="5,17",
    )


@pytest.fixture(scope="module")
def results(settings):
    return found_in.measured(NAME, settings)


def test_every_operation_is_in_every_pass_once_and_on_equal_inputs_where_it_is_replayed(results):
    replayed = results["operation_replay"]
    text = ["model", "attention", "dtype", "sample"]
    assert not replayed.duplicated([*text, "pass", "layer", "operation"]).any()
    assert set(replayed["pass"]) == {"last 1", "last 3", rows.ALL, rows.PREFILL, rows.REAL}
    calls = replayed.groupby([*text, "pass"])["calls"].sum().groupby(["model", "attention"]).agg(["min", "max"])
    assert (calls["min"] == calls["max"]).all()
    assert (replayed.loc[replayed["pass"] == rows.ALL, "differing_calls"] == 0).all()
    assert (replayed.loc[replayed["pass"] != rows.REAL, "inputs_equal"] == 1).all()


def test_every_text_has_its_own_length_and_the_factorial_one_token_more(results):
    drawn = [lengths.drawn("9-14", index) for index in range(4)]
    assert set(results["operation_replay"]["n_tokens"]) == {drawn[0]}
    by_text = results["cache_factorial"].groupby(["sample", "longer"])["n_tokens"].unique().unstack()
    assert by_text.to_numpy().tolist() == [[[n], [n + 1]] for n in drawn]
    assert results["length_sweep"].groupby("attention")["sample"].nunique().to_dict() == {"sdpa": 2, "eager": 1}


# A prompt read twice


def test_a_prompt_of_equal_shapes_is_the_same_with_a_cache_and_without(results):
    compared = results["equal_shapes"]
    assert not compared.duplicated(["model", "dtype", "sample", "shapes", "what"]).any()
    equal = compared[compared["shapes"] == rows.EQUAL]
    assert set(equal["what"]) == {"hidden states", "keys and values", "logits", "operations"}
    assert (equal["differing"] == 0).all()
    assert (compared["elements"] > 0).all()


@pytest.mark.parametrize("what", [equal_shapes.STATES, equal_shapes.KEYS, equal_shapes.LOGITS, equal_shapes.OPERATIONS])
def test_control_a_bit_that_a_cache_changes_is_counted_where_it_shows(llama, ids, monkeypatch, what):
    def nudged(model, ids, use_cache):
        found = read(model, ids, use_cache)
        if use_cache:
            found.compared[what][-1].view(-1)[0] += 1
        return found

    read = equal_shapes.read
    monkeypatch.setattr(equal_shapes, "read", nudged)
    with torch.inference_mode():
        compared = pd.DataFrame(equal_shapes.compare(llama, ids))
    assert compared.loc[(compared["shapes"] == "equal") & (compared["differing"] > 0), "what"].tolist() == [what]


@pytest.mark.parametrize(
    ("shapes", "differing", "n_files", "verdict", "exact", "fewer"),
    [
        # A prefill of another shape says nothing of the claim.
        (rows.FEWER, 40, 40, "reproduced in kind", "holds", "holds"),
        (rows.EQUAL, 1, 40, "refuted in kind", "fails", "fails"),
        (rows.EQUAL, 0, 3, "undecided", "holds", "not resolved"),
    ],
)
def test_a_prefill_is_called_exact_by_the_prompts_of_equal_shapes(
    results, shapes, differing, n_files, verdict, exact, fewer
):
    compared = results["equal_shapes"]
    one = compared[(compared["sample"] == 0) & (compared["dtype"] == "float32")].assign(differing=0, dtype="bfloat16")
    many = pd.concat([one.assign(sample=k, source=f"file {k}") for k in range(n_files)], ignore_index=True)
    many.loc[(many["sample"] < differing) & (many["shapes"] == shapes), "differing"] = 1
    found = with_rows(results, equal_shapes=many)
    assert measures.CHECKS["prefill-exact"](found).verdict == verdict
    names = ("equal-shapes-equal-bits", "one-token-fewer-differs")
    assert [check(measures.STATEMENTS[name], found).outcome for name in names] == [exact, fewer]


# One matrix product


def invariant(x, weight):
    # Each row by itself: independent of how many come with it.
    return torch.stack([(row * weight).sum(-1) for row in x])


def at_some_numbers_of_rows(x, weight):
    result = invariant(x, weight)
    if len(x) < 4:
        return result * 1.001
    if len(x) == 6:
        result[-2:] *= 1.001
    return result


@pytest.mark.parametrize(
    ("product", "first_differs", "others_differ"), [(invariant, [], []), (at_some_numbers_of_rows, [1, 2, 3], [6])]
)
def test_a_product_is_flagged_at_the_numbers_of_rows_that_change_it_and_at_no_other(
    results, product, first_differs, others_differ
):
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(12, 16, generator=generator), torch.randn(6, 16, generator=generator)
    mapped = pd.DataFrame(gemm_map.compare(x, weight, product))
    states = with_rows(results, gemm_map=mapped)["products"].set_index("rows")["state"]
    assert states.index.tolist() == list(range(1, 13))
    assert states.index[states == rows.NONE_EQUAL].tolist() == first_differs
    assert states.index[states == rows.FIRST_EQUAL].tolist() == others_differ


@pytest.mark.parametrize("inner", [16, 17])
def test_the_mapped_sums_are_zero_but_for_rounding(inner):
    x, weight = gemm_map.factors(12, inner, 6, seed=3)
    terms = x.double()[:, None] * weight.double()
    assert terms.sum(-1).abs().max() < 1e-13 * terms.abs().max()
    assert terms.abs().sum(-1).min() > 0


def test_control_another_order_of_addition_is_seen_after_rounding_to_16_bits():
    x, weight = (t.to(torch.bfloat16) for t in gemm_map.factors(64, 1536, 8, seed=3))

    def backwards_if_alone(x, weight):
        # One term after the other, as no library's own sum does.
        terms = (x.float()[:, None] * weight.float()).unbind(-1)
        return functools.reduce(torch.add, terms if len(x) > 1 else terms[::-1]).to(x.dtype)

    compared = gemm_map.compare(x, weight, backwards_if_alone)
    assert [row["rows"] for row in compared if row["equal_rows"] < row["rows"]] == [1]


# Attention


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(2, 2, 20, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("kernel", ["SDPA math", "eager"])
def test_every_form_of_the_attention_computes_the_same_up_to_rounding(qkv, kernel):
    compared = list(attention_forms.compare(attention_forms.KERNELS[kernel], *qkv))
    assert tuple(row["form"] for row in compared) == rows.FORMS
    assert all(row["relative_rms"] < 1e-13 and row["form_error"] < 1e-13 for row in compared)


def test_control_a_causal_mask_on_one_query_is_flagged(qkv):
    def upper_left(q, k, v, mask=None, is_causal=False):
        # What one-query SDPA does with is_causal: the query sees the first key alone.
        one = q.shape[-2] == 1 and mask is None
        return attention_forms.KERNELS["SDPA math"](q, k, v, mask, is_causal or one)

    found = {row["form"]: row for row in attention_forms.compare(upper_left, *qkv)}
    assert found[rows.ALONE]["equal_rows"] == 0
    assert found[rows.ALONE]["relative_rms"] > 0.1
    assert found[rows.ALONE_MASKED]["relative_rms"] < 1e-13


def test_a_kernel_without_masks_leaves_these_forms_out(qkv):
    def no_masks(q, k, v, mask=None, is_causal=False):
        if mask is not None:
            raise RuntimeError("no masks here")
        return attention_forms.KERNELS["eager"](q, k, v, mask, is_causal)

    assert {row["form"] for row in attention_forms.compare(no_masks, *qkv)} == {rows.ALONE, rows.LONGER}


# Lengths, and the cache or the new token


def test_the_sweep_sees_what_two_passes_give(llama, ids):
    with torch.inference_mode():
        swept = {row["n_tokens"]: row for row in length_sweep.compare(llama, ids)}
        full, split = full_and_split.full_pass(llama, ids[:, :9]), full_and_split.split_pass(llama, ids[:, :9])
    assert list(swept) == list(range(2, ids.shape[1] + 1))
    assert swept[9]["logits_equal"] == int(agreement.bits_equal(full.logits, split.logits).all())
    assert swept[9]["relative_rms"] == agreement.drift(full.logits, split.logits).relative_rms.item()


def test_control_a_changed_key_is_a_changed_cache(llama, ids):
    with torch.inference_mode():
        one, other = full_and_split.prefill(llama, ids), full_and_split.prefill(llama, ids)
        assert length_sweep.cache_equal(one, other)
        other.layers[3].keys[0, 1, 5, 2] += 1e-6
        assert not length_sweep.cache_equal(one, other)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_rows_on_the_full_passes_own_cache_are_the_full_pass(request, ids, family):
    model = request.getfixturevalue(family)
    with torch.inference_mode():
        reference, written = full_and_split.full_pass(model, ids), cache_factorial.caches(model, ids)
        found = cache_factorial.query(model, ids, written[rows.FROM_FULL], rows.ALL_ROWS)
    assert agreement.bits_equal(reference.logits, found.logits).all()
    assert {cache.get_seq_length() for cache in written.values()} == {ids.shape[1] - 1}


def test_control_all_rows_read_the_cache_that_they_are_given(llama, ids):
    wrong = ids.clone()
    wrong[0, 3] += 1
    with torch.inference_mode():
        reference = full_and_split.full_pass(llama, ids)
        cache = cache_factorial.caches(llama, wrong)[rows.FROM_PREFILL]
        among, alone = (cache_factorial.query(llama, ids, cache, how) for how in (rows.ALL_ROWS, rows.ONE_ROW))
    assert agreement.drift(reference.logits, among.logits).relative_rms > 1e-3
    assert agreement.drift(alone.logits, among.logits).relative_rms < 1e-5


# Tables and statements, from rows that are made up

TEXTS = range(40)
KINDS = {"embed": "embedding", "q_proj": "linear", "act": "elementwise", "down_proj": "linear"}
PLACES = ((None, "embed"), (0, "q_proj"), (0, "act"), (1, "q_proj"), (1, "act"), (None, "down_proj"))
LAST, PREFILL, REAL = rows.LAST_ONE, rows.PREFILL, rows.REAL


def replayed(*differing, unequal=(), texts=range(1), dtype="float32") -> pd.DataFrame:
    """Replay texts; (pass, layer, operation) names what differs, and what is given other inputs."""
    return pd.DataFrame(
        {
            "model": "m", "attention": "sdpa", "dtype": dtype, "sample": text, "source": f"{text}.py", "calls": 1,
            "kind": KINDS[operation], "pass": name, "layer": layer, "operation": operation, "order": order,
            "differing_calls": int((name, layer, operation) in differing),
            "first_differing": order if (name, layer, operation) in differing else None,
            "inputs_equal": int((name, layer, operation) not in unequal),
        }
        for text in texts for order, (layer, operation) in enumerate(PLACES) for name in (LAST, PREFILL, REAL, rows.ALL)
    )


def steps(by_query: float = 0, by_cache: float = 0) -> pd.DataFrame:
    """Score texts in every way; one row drifts by the one number, a cache of another pass by the other."""
    return pd.DataFrame(
        {
            "dtype": "float32", "sample": text, "source": f"{text}.py", "n_tokens": 8, "longer": 0, "cache": cache,
            "query": query, "relative_rms": drift * (1 + 0.1 * text), "differing_share": float(drift > 0),
        }
        for text in TEXTS for cache in rows.SOURCES for query in (rows.ONE_ROW, rows.ALL_ROWS)
        for drift in [(query == rows.ONE_ROW) * by_query + (cache != rows.FROM_FULL) * by_cache]
    )


def mapped(short: int, long: int, dtype: str) -> pd.DataFrame:
    """Map a short sum and a long one, which differ up to these numbers of rows."""
    return pd.DataFrame(
        {"dtype": dtype, "threads": 1, "inner_size": size, "rows": n, "first_row_equal": int(n > most),
         "equal_rows": n if n > most else 0}
        for size, most in ((4, short), (8, long)) for n in range(1, 25)
    )


def swept(texts=range(2), **least: int) -> pd.DataFrame:
    """Cut texts at lengths 2 to 11; the first has equal logits below a length, the next at one length more."""
    return pd.DataFrame(
        {"attention": "sdpa", "dtype": dtype, "sample": text, "source": f"{text}.py", "n_tokens": n,
         "logits_equal": int(n < start + text % 2), "cache_equal": int(n < 7)}
        for dtype, start in least.items() for text in texts for n in range(2, 12)
    )


def attended(share: float, dtype: str) -> pd.DataFrame:
    return pd.DataFrame(
        {"kernel": "eager", "dtype": dtype, "keys": 5, "form": form, "compared_rows": 9, "equal_rows": 9 * (1 - share)}
        for form in rows.FORMS
    )


def test_an_operation_is_blamed_where_it_differs_on_equal_inputs_and_nowhere_else(results):
    differing = {
        (LAST, 0, "q_proj"), (PREFILL, 1, "q_proj"), (LAST, 1, "act"), (LAST, None, "down_proj"), (REAL, 0, "act")
    }
    one = replayed(*differing, unequal={(LAST, None, "down_proj")})
    both = pd.concat([one, replayed(texts=[1])])
    table = with_rows(results, operation_replay=both)["operations"].set_index(["layer", "operation"])["share"]
    assert table.to_dict() == {
        (-1, "embed"): 0, (0, "q_proj"): 0.5, (0, "act"): 0, (1, "q_proj"): 0, (1, "act"): 0.5, (2, "down_proj"): 0,
    }


@pytest.mark.parametrize(
    ("differing", "unequal", "told"),
    [
        ([(1, "q_proj"), (1, "act")], [(1, "q_proj")], ["1 of 1", "0 of 1", "layer 1 q_proj (1)"]),
        ([(1, "q_proj"), (1, "act")], [], ["1 of 1", "1 of 1", "layer 1 q_proj (1)"]),
        ([(None, "embed")], [], ["1 of 1", "1 of 1", "embed (1)"]),
        ([], [], ["0 of 1", "", ""]),
    ],
)
def test_the_first_difference_is_the_earliest_and_says_whether_the_step_began_it(results, differing, unequal, told):
    made = replayed(*((REAL, *place) for place in differing), unequal={(REAL, *place) for place in unequal})
    beginnings = with_rows(results, operation_replay=made)["beginnings"]
    assert tables.first_differences(beginnings).iloc[0, 3:].tolist() == told


def test_shares_of_calls_are_means_over_texts_in_figures_and_in_sentences(results):
    one = replayed((LAST, 0, "q_proj"), (LAST, 1, "q_proj"), (LAST, 1, "act"))
    # One file has two texts that differ, the other one text that does not.
    made = pd.concat([one, one.assign(sample=1), replayed(texts=[2])])
    found = with_rows(results, operation_replay=made)
    share = found["kinds"].set_index(["pass", "kind"])["share"][LAST, "linear"]
    (sentence,) = measures.LINEAR(found)
    assert share == sentence.estimate.value == pytest.approx(2 / 3 * 2 / 3)


def test_each_version_of_torch_has_what_its_own_replay_found():
    def run(torch: str, *differing) -> Run:
        machine, about = {"torch": f"{torch}+cpu"}, {"n_tokens": "33-190"}
        return run_of(replayed(*differing), machine=machine, settings=about)

    table = tables.by_torch([run("2.6.0", (LAST, 0, "q_proj")), run("2.13.0", (REAL, 1, "q_proj"))])
    assert table.iloc[:, [0, 4, 5]].to_numpy().tolist() == [
        ["2.6.0", "none", "linear, last 1: 33%"], ["2.13.0", "layer 1 q_proj", "none"]
    ]


def test_the_recorded_versions_of_torch_replay_equal_texts_and_the_oldest_comes_first():
    runs = rows.older_torch()
    versions = [tuple(map(int, run.about["machine"]["torch"].partition("+")[0].split("."))) for run in runs]
    assert versions == sorted(set(versions))
    assert len(versions) >= 2
    for name in ("settings", "models", "corpus", "commit"):
        assert len({str(run.about[name]) for run in runs}) == 1, name
    assert len({run.about["machine"]["processor"] for run in runs}) == 1


def test_a_cause_alone_is_told_with_its_drift_and_how_many_texts_differ(results):
    told = tables.factorial(tables.drifts(with_rows(results, cache_factorial=steps(by_query=2**-24)))).iloc[0]
    assert told["prefill's cache alone"] == told["decoded cache alone"] == "0; 0 of 40 texts"
    assert told["one row alone"].startswith("2.95 [")
    assert told["one row alone"].endswith("; 40 of 40 texts")


@pytest.mark.parametrize(
    ("made", "scatter", "differing"),
    [
        (swept(float32=3), "10% to 20%", "3–11"), (swept(float32=9), "70% to 80%", "9–11"),
        # Controls: of one text there is nothing to compare, and equal lengths are not counted as differing.
        (swept(float32=99, texts=range(1)), "one text", "none"),
        (swept(float32=99).assign(logits_equal=lambda made: (made["n_tokens"] % 5 > 0) * 1), "80%", "5, 10"),
    ],
)
def test_the_share_of_lengths_with_equal_bits_is_told_for_each_text(made, scatter, differing):
    told = tables.lengths(made).iloc[0]
    assert (told["lowest and highest text"], told["lengths that differ in some text"]) == (scatter, differing)


def _begins(*first: str) -> pd.DataFrame:
    """Let the real step of 40 texts in bf16 begin at one of these operations each."""
    return pd.concat([replayed((REAL, 0, first[k % len(first)]), texts=[k], dtype="bfloat16") for k in TEXTS])


ALWAYS = {(name, *place) for name in (LAST, PREFILL, REAL, rows.ALL) for place in PLACES}
LINEAR = {place for place in PLACES if KINDS[place[1]] == "linear"}
FP32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("experiment", "made", "outcomes"),
    [
        ("operation_replay", replayed(texts=TEXTS),
         {"one-row-linear-fp32": "fails", "row-wise-never": "holds", "control": "holds"}),
        ("operation_replay", replayed(*ALWAYS, texts=TEXTS),
         {"one-row-linear-fp32": "holds", "row-wise-never": "fails", "control": "fails"}),
        ("operation_replay", replayed(*((LAST, *place) for place in LINEAR), texts=TEXTS),
         {"one-row-linear-fp32": "holds", "row-wise-never": "holds", "prefill-linear-never": "holds"}),
        ("operation_replay", replayed(*((PREFILL, *place) for place in LINEAR), texts=TEXTS),
         {"one-row-linear-fp32": "fails", "row-wise-never": "holds", "prefill-linear-never": "fails"}),
        ("operation_replay", replayed(texts=TEXTS, dtype=BF16), {"one-row-bf16": "holds"}),
        ("operation_replay", replayed(*ALWAYS, texts=TEXTS, dtype=BF16), {"one-row-bf16": "fails"}),
        ("operation_replay", replayed((LAST, None, "down_proj"), texts=TEXTS, dtype=BF16),
         {"down-proj-alone-in-bf16-on-amd": "holds", "other-products-differ-in-bf16": "not resolved"}),
        ("operation_replay", replayed((LAST, 0, "q_proj"), texts=TEXTS, dtype=BF16),
         {"down-proj-alone-in-bf16-on-amd": "fails", "other-products-differ-in-bf16": "holds"}),
        ("operation_replay", _begins("act"), {"bf16-begins-later": "holds", "bf16-begins-in-the-step": "holds"}),
        ("operation_replay", _begins("q_proj"), {"bf16-begins-later": "fails", "bf16-begins-in-the-step": "holds"}),
        # A text without a difference is none that begins later.
        ("operation_replay", _begins("none"), {"bf16-begins-later": "fails", "bf16-begins-in-the-step": "fails"}),
        ("cache_factorial", steps(by_query=1),
         {"one-row-is-enough": "holds", "prefill-is-not-enough": "holds", "decoded-cache-is-enough": "fails"}),
        ("cache_factorial", steps(by_cache=1),
         {"one-row-is-enough": "fails", "prefill-is-not-enough": "fails", "decoded-cache-is-enough": "holds"}),
        ("length_sweep", swept(TEXTS, float32=3, bfloat16=3),
         {"no-length-agrees-fp32": "fails", "some-lengths-agree-bf16": "holds"}),
        ("length_sweep", swept(TEXTS, float32=3, bfloat16=3).assign(logits_equal=0),
         {"no-length-agrees-fp32": "holds", "some-lengths-agree-bf16": "not resolved"}),
        ("gemm_map", mapped(0, 3, FP32), {"short-products-fp32": "holds"}),
        ("gemm_map", mapped(18, 20, FP32), {"short-products-fp32": "fails"}),
        ("gemm_map", mapped(0, 3, BF16), {"short-sums-never-bf16": "holds", "a-long-sum-differs-bf16": "fails"}),
        ("gemm_map", mapped(18, 20, BF16), {"short-sums-never-bf16": "fails", "a-long-sum-differs-bf16": "holds"}),
        ("gemm_map", mapped(0, 1, BF16), {"a-long-sum-differs-for-one-row-on-amd": "holds"}),
        ("gemm_map", mapped(0, 2, BF16), {"a-long-sum-differs-for-one-row-on-amd": "fails"}),
        ("attention_forms", attended(0, FP32),
         {"masks-alike": "holds", "one-query-fp32": "fails", "hidden-keys-change-rows": "fails"}),
        ("attention_forms", attended(1, FP32),
         {"masks-alike": "fails", "one-query-fp32": "holds", "hidden-keys-change-rows": "holds"}),
        ("attention_forms", attended(0, BF16), {"one-query-bf16": "holds"}),
        ("attention_forms", attended(1, BF16), {"one-query-bf16": "fails"}),
    ],
)
def test_statements_hold_and_fail_by_what_differs(results, experiment, made, outcomes):
    found = with_rows(results, **{experiment: made})
    # Whatever processor they speak of: made rows are of none.
    asked = {name: replace(measures.STATEMENTS[name], on="") for name in outcomes}
    assert {name: check(statement, found).outcome for name, statement in asked.items()} == outcomes


def test_a_chapter_without_its_runs_says_that_they_were_not_run(results):
    nothing = with_runs(results, **dict.fromkeys(results.runs))
    assert {check(one, nothing).outcome for one in measures.STATEMENTS.values()} == {"not run"}
    assert measures.CHECKS["prefill-exact"](nothing).verdict == "not run"


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (operation_replay, {"families": ["nosuch"]}), (operation_replay, {"n_tokens": 65}),
        (cache_factorial, {"n_tokens": 64}), (length_sweep, {"n_tokens": 42}), (gemm_map, {"device": "cuda:99"}),
        (attention_forms, {"device": "nosuch"}),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing_and_says_why_in_one_line(
    settings, tmp_path, monkeypatch, module, change
):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    with pytest.raises(UserError) as error:
        module.EXPERIMENT.run(WhereDriftBeginsSettings.checked(**settings.model_dump() | change))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_figures_draw_what_the_tables_hold(results):
    beside = tables.beside(results["kinds"], results["kinds"])
    assert set(beside["model"]) - set(results["kinds"]["model"]) == {"the book-small"}
    drawn = [
        figures.figure_operations(results["operations"]), figures.figure_kinds(results["kinds"]),
        figures.figure_kinds(beside), figures.figure_gemm(results["products"]),
        figures.figure_lengths(results["lengths"]), figures.figure_forms(results["forms"]),
        figures.figure_factorial(tables.drifts(results)),
    ]
    for fig in drawn:
        fig.canvas.draw()
        assert all(ax.has_data() for ax in fig.axes)
        plt.close(fig)


@pytest.mark.parametrize("longest", [12, 63, 64, 191])
def test_the_map_of_lengths_names_some_of_them(longest):
    shares = [
        {"attention": "sdpa", "dtype": "float32", "n_tokens": length, "logits": 0.5, "cache": 0.0}
        for length in range(2, longest + 1)
    ]
    fig = figures.figure_lengths(pd.DataFrame(shares))
    assert 2 <= len(fig.axes[0].get_xticks()) <= 16
    plt.close(fig)
