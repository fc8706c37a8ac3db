"""The experiments on where drift begins: each finds what was planted, and finds nothing where nothing is."""

import dataclasses
import functools

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from planted import changed, run_of
from torch.nn.functional import linear

from kvbook import lengths, paths
from kvbook.errors import UserError
from kvbook.measuring import agreement, full_and_split
from kvbook.runs import threads
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    claims,
    equal_shapes,
    figures,
    gemm_map,
    length_sweep,
    operation_replay,
    statements,
    tables,
)
from kvreport.chapters.where_drift_begins.results import Results
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings
from kvreport.publishing import wording
from kvreport.publishing.statements import check


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return WhereDriftBeginsSettings.checked(
        model=str(llama_folder), families=[str(gpt2_folder)], corpus=str(text_folder), n_samples=4, n_tokens="9-14",
        max_rows=8, chunks="1,3", inner_sizes="16", threads="1", key_lengths="5,17",
    )


@pytest.fixture(scope="module")
def results(settings):
    return Results.of(settings)


def test_every_operation_is_in_every_pass_once(results):
    rows = results.replayed.rows
    keys = ["model", "attention", "dtype", "sample", "pass", "layer", "operation"]
    assert not rows.duplicated(keys).any()
    assert set(rows["pass"]) == {"last 1", "last 3", "all", "all but the last", "real decode step"}
    assert (
        rows.groupby(["model", "attention", "dtype", "sample", "pass"])["calls"]
        .sum()
        .groupby(["model", "attention"])
        .nunique()
        .eq(1)
        .all()
    )


def test_all_rows_once_more_are_equal_and_replayed_inputs_are_too(results):
    rows = results.replayed.rows
    assert (rows.loc[rows["pass"] == "all", "differing_calls"] == 0).all()
    assert (rows.loc[rows["pass"] != "real decode step", "inputs_equal"] == 1).all()


def test_a_prompt_of_equal_shapes_is_the_same_with_a_cache_and_without(results):
    rows = results.prefills.rows
    assert not rows.duplicated(["model", "dtype", "sample", "shapes", "what"]).any()
    equal = rows[rows["shapes"] == equal_shapes.EQUAL]
    assert set(equal["what"]) == {"hidden states", "keys and values", "logits", "operations"}
    assert (equal["differing"] == 0).all()
    assert (rows["elements"] > 0).all()
    assert tables.equal_prefills(rows)["equal"].all()


@pytest.mark.parametrize("what", [equal_shapes.STATES, equal_shapes.KEYS, equal_shapes.LOGITS, equal_shapes.OPERATIONS])
def test_control_a_bit_that_a_cache_changes_is_counted_where_it_shows(llama, ids, monkeypatch, what):
    def nudged(model, ids, use_cache):
        found = read(model, ids, use_cache)
        if use_cache:
            tensors = {
                equal_shapes.STATES: found.hidden, equal_shapes.KEYS: found.attended,
                equal_shapes.LOGITS: [found.logits], equal_shapes.OPERATIONS: found.operations,
            }[what]
            tensors[-1].view(-1)[0] += 1
        return found

    read = equal_shapes.read
    monkeypatch.setattr(equal_shapes, "read", nudged)
    with torch.inference_mode():
        rows = pd.DataFrame(equal_shapes.compare(llama, ids))
    assert rows.loc[(rows["shapes"] == "equal") & (rows["differing"] > 0), "what"].tolist() == [what]


def read_twice(results, differing: int, shapes: str, n_files: int = 40) -> Results:
    """Give results of so many prompts, of which some differ where they were read in these shapes."""
    rows = results.prefills.rows
    one = rows[rows["sample"] == rows["sample"].min()].assign(differing=0)
    many = pd.concat([one.assign(sample=k, source=f"file {k}") for k in range(n_files)], ignore_index=True)
    many.loc[(many["sample"] < differing) & (many["shapes"] == shapes), "differing"] = 1
    return changed(results, prefills=many)


def test_a_prefill_is_called_exact_where_no_bit_of_equal_shapes_differs_and_one_that_does_refutes_it(results):
    def word(of: Results) -> str:
        return claims.CHECKS["prefill-exact"](of).verdict

    # Another number of rows is no prefill of equal shapes, and says nothing of the claim.
    assert word(read_twice(results, 40, equal_shapes.FEWER)).startswith("reproduced")
    assert word(read_twice(results, 1, equal_shapes.EQUAL)).startswith("refuted")
    assert word(read_twice(results, 0, equal_shapes.EQUAL, n_files=3)) == "undecided"
    assert word(dataclasses.replace(results, prefills=None)) == "not run"


def test_statements_on_a_prefill_hold_and_fail_by_what_differs(results):
    exact, fewer = (statements.STATEMENTS[name] for name in ("equal-shapes-equal-bits", "one-token-fewer-differs"))
    at_odds = read_twice(results, 40, equal_shapes.FEWER)
    coarse = at_odds.prefills.rows.replace({"dtype": {at_odds.prefills.rows["dtype"].iloc[0]: "bfloat16"}})
    at_odds = changed(at_odds, prefills=coarse[coarse["dtype"] == "bfloat16"])
    assert (check(exact, at_odds).outcome, check(fewer, at_odds).outcome) == ("holds", "holds")
    alike = read_twice(at_odds, 1, equal_shapes.EQUAL)
    assert (check(exact, alike).outcome, check(fewer, alike).outcome) == ("fails", "fails")


@pytest.fixture
def product():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(12, 16, generator=generator), torch.randn(6, 16, generator=generator)


def invariant(x, weight):
    # Each row by itself: independent of how many come with it.
    return torch.stack([(row * weight).sum(-1) for row in x])


def test_a_product_that_takes_each_row_by_itself_is_equal_at_every_number_of_rows(product):
    rows = list(gemm_map.compare(*product, invariant))
    assert [row["rows"] for row in rows] == list(range(1, 13))
    assert all(row["equal_rows"] == row["rows"] and row["first_row_equal"] for row in rows)


def test_control_a_product_that_depends_on_the_number_of_rows_is_flagged_where_it_does(product):
    def planted(x, weight):
        result = invariant(x, weight)
        if len(x) < 4:
            return result * 1.001
        if len(x) == 6:
            result[-2:] *= 1.001
        return result

    states = tables.gemm_states(pd.DataFrame(gemm_map.compare(*product, planted)))
    assert states.loc[states["state"] == tables.NONE_EQUAL, "rows"].tolist() == [1, 2, 3]
    assert states.loc[states["state"] == tables.FIRST_EQUAL, "rows"].tolist() == [6]
    assert tables.runs_of_numbers(states.loc[states["state"] != tables.ALL_EQUAL, "rows"].tolist()) == "1–3, 6"


@pytest.mark.parametrize("inner", [16, 17])
def test_the_mapped_sums_are_zero_but_for_rounding(inner):
    x, weight = gemm_map.factors(12, inner, 6, seed=3)
    terms = x.double()[:, None] * weight.double()
    assert terms.sum(-1).abs().max() < 1e-13 * terms.abs().max()
    assert terms.abs().sum(-1).min() > 0


def test_control_another_order_of_addition_is_seen_behind_16_bits():
    x, weight = (t.to(torch.bfloat16) for t in gemm_map.factors(64, 1536, 8, seed=3))

    def planted(x, weight):
        # A row alone is added up from its end; one term after the other, as no library's own sum does.
        terms = (x.float()[:, None] * weight.float()).unbind(-1)
        return functools.reduce(torch.add, terms if len(x) > 1 else terms[::-1]).to(x.dtype)

    rows = list(gemm_map.compare(x, weight, planted))
    assert [row["rows"] for row in rows if row["equal_rows"] < row["rows"]] == [1]


def test_threads_are_put_back_after_an_error():
    before, during = torch.get_num_threads(), []

    def fail():
        with threads.using(before + 1):
            during.append(torch.get_num_threads())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert (during, torch.get_num_threads()) == ([before + 1], before)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(2, 2, 20, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("kernel", ["SDPA math", "eager"])
def test_every_form_of_the_attention_computes_the_same_up_to_rounding(qkv, kernel):
    rows = list(attention_forms.compare(attention_forms.KERNELS[kernel], *qkv))
    assert {row["form"] for row in rows} == set(attention_forms.FORMS)
    assert all(row["relative_rms"] < 1e-13 and row["form_error"] < 1e-13 for row in rows)


def test_control_a_causal_mask_on_one_query_is_flagged(qkv):
    def upper_left(q, k, v, mask, is_causal):
        # What one-query SDPA does with is_causal: the query sees the first key alone.
        one = q.shape[-2] == 1 and mask is None
        return attention_forms.KERNELS["SDPA math"](q, k, v, mask, is_causal or one)

    found = {row["form"]: row for row in attention_forms.compare(upper_left, *qkv)}
    assert found["1 row, no mask"]["equal_rows"] == 0
    assert found["1 row, no mask"]["relative_rms"] > 0.1
    assert found["1 row, boolean mask"]["relative_rms"] < 1e-13


def test_a_kernel_without_masks_leaves_these_forms_out(qkv):
    def no_masks(q, k, v, mask, is_causal):
        if mask is not None:
            raise RuntimeError("no masks here")
        return attention_forms.KERNELS["eager"](q, k, v, mask, is_causal)

    assert {row["form"] for row in attention_forms.compare(no_masks, *qkv)} == {"1 row, no mask", "one more row behind"}


def test_the_sweep_sees_what_two_passes_give(llama, ids):
    with torch.inference_mode():
        rows = {row["n_tokens"]: row for row in length_sweep.compare(llama, ids)}
        full, split = full_and_split.full_pass(llama, ids[:, :9]), full_and_split.split_pass(llama, ids[:, :9])
    assert list(rows) == list(range(2, ids.shape[1] + 1))
    assert rows[9]["logits_equal"] == int(agreement.bits_equal(full.logits, split.logits).all())
    assert rows[9]["relative_rms"] == agreement.drift(full.logits, split.logits).relative_rms.item()


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
        found = cache_factorial.query(model, ids, written[cache_factorial.FULL], cache_factorial.ALL_ROWS)
    assert agreement.bits_equal(reference.logits, found.logits).all()
    assert {cache.get_seq_length() for cache in written.values()} == {ids.shape[1] - 1}


def test_control_all_rows_read_the_cache_that_they_are_given(llama, ids):
    with torch.inference_mode():
        reference = full_and_split.full_pass(llama, ids)
        wrong = ids.clone()
        wrong[0, 3] += 1
        cache = cache_factorial.caches(llama, wrong)[cache_factorial.PREFILL]
        among = cache_factorial.query(llama, ids, cache, cache_factorial.ALL_ROWS)
        alone = cache_factorial.query(llama, ids, cache, cache_factorial.ONE_ROW)
    assert agreement.drift(reference.logits, among.logits).relative_rms > 1e-3
    assert agreement.drift(alone.logits, among.logits).relative_rms < 1e-5


def factorial_rows(drifts) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "model": "m", "weights": "random", "dtype": "float32", "sample": sample, "source": f"{sample}.py",
                "n_tokens": 8,
            "longer": 0,
            "cache": cache, "query": query, "relative_rms": drift * (1 + 0.1 * sample),
                "differing_share": float(drift > 0),
        }
        for (cache, query), drift in drifts.items()
        for sample in range(4)
    )


KINDS = {"embed": "embedding", "proj": "linear", "act": "elementwise", "head": "lm head"}


def replayed_rows(**changes) -> pd.DataFrame:
    base = {
        "model": "m", "attention": "sdpa", "dtype": "float32", "sample": 0, "source": "0.py", "calls": 1,
            "kind": "linear",
    }
    rows = []
    for order, (layer, operation) in enumerate(
        [(None, "embed"), (0, "proj"), (0, "act"), (1, "proj"), (1, "act"), (None, "head")]
    ):
        for name in ("last 1", "all but the last", "real decode step"):
            differing = (name, layer, operation) in changes.get("differing", ())
            equal = (name, layer, operation) not in changes.get("unequal", ())
            rows.append(
                base | {"pass": name, "layer": layer, "operation": operation, "order": order,
                    "differing_calls": int(differing),
                        "first_differing": order if differing else None, "inputs_equal": int(equal)}
            )
    return pd.DataFrame(rows)


def test_an_operation_is_blamed_where_it_differs_on_equal_inputs_and_nowhere_else():
    rows = replayed_rows(
        differing={("last 1", 0, "proj"), ("all but the last", 1, "proj"), ("last 1", 1, "act"),
            ("last 1", None, "head"),
                   ("real decode step", 0, "act")},
        # Handed other inputs: no verdict on the operation itself.
        unequal={("last 1", None, "head")},
    )
    table = tables.operation_shares(rows).set_index(["layer", "operation"])["share"]
    assert table.to_dict() == {
        (-1, "embed"): 0, (0, "proj"): 1, (0, "act"): 0, (1, "proj"): 0, (1, "act"): 1, (2, "head"): 0,
    }
    one_of_two = pd.concat([rows, replayed_rows().assign(sample=1, source="1.py")])
    assert tables.operation_shares(one_of_two).set_index(["layer", "operation"])["share"][0, "proj"] == 0.5


def test_the_first_difference_is_the_earliest_and_says_whether_the_step_began_it():
    rows = replayed_rows(
        differing={("real decode step", 1, "proj"), ("real decode step", 1, "act"), ("real decode step", None, "head")},
        unequal={("real decode step", 1, "proj")},
    )
    found = tables.first_differences(tables.first_by_text(rows)).iloc[0]
    assert (found["first"], found["most"], found["differing"], found["local"]) == ("layer 1 proj", 1, 1, 0)
    begun = rows.assign(inputs_equal=1)
    assert tables.first_differences(tables.first_by_text(begun)).iloc[0]["local"] == 1
    nothing = tables.first_differences(tables.first_by_text(replayed_rows())).iloc[0]
    assert (nothing["first"], nothing["differing"]) == ("none", 0)
    shown = tables.first_shown(tables.first_differences(tables.first_by_text(rows))).iloc[0]
    assert shown.iloc[3:].tolist() == ["1 of 1", "0 of 1", "layer 1 proj (1)"]


def test_a_cause_alone_is_told_with_its_drift_and_how_many_texts_differ():
    one = cache_factorial.ONE_ROW
    rows = factorial_rows(
        {
            (cache, query): (query == one) * 2**-24 for cache in cache_factorial.SOURCES
            for query in (one, cache_factorial.ALL_ROWS)
        }
    )
    shown = tables.factorial_shown(tables.factorial_table(rows)).iloc[0]
    assert shown["prefill's cache alone"] == shown["decoded cache alone"] == "0; 0 of 4 texts"
    assert shown["one row alone"].startswith("1.15 [")
    assert shown["one row alone"].endswith("; 4 of 4 texts")


def held(name, results, **rows):
    """Hold a statement against results with other rows, whatever processor it speaks of: made rows are of none."""
    return check(dataclasses.replace(statements.STATEMENTS[name], on=""), changed(results, **rows)).outcome


def test_statements_on_operations_hold_and_fail_by_what_differs(results):
    texts = [replayed_rows().assign(sample=k, source=f"{k}.py") for k in range(40)]
    rows = pd.concat(texts).assign(model=results.model, kind=lambda table: table["operation"].map(KINDS))
    rows = pd.concat([rows, rows.assign(dtype="bfloat16"), rows[rows["pass"] == "last 1"].assign(**{"pass": "all"})])
    names = ("one-row-linear-fp32", "one-row-bf16", "row-wise-never", "control")
    assert [held(name, results, replayed=rows) for name in names] == ["fails", "holds", "holds", "holds"]
    every = rows.assign(differing_calls=1, first_differing=rows["order"])
    assert [held(name, results, replayed=every) for name in names] == ["holds", "fails", "fails", "fails"]
    one_row = rows.assign(differing_calls=(rows["kind"] == "linear") * (rows["pass"] == "last 1") * 1)
    assert [held(name, results, replayed=one_row) for name in names] == ["holds", "fails", "holds", "holds"]
    assert held("prefill-linear-never", results, replayed=one_row) == "holds"
    prefill = one_row.assign(differing_calls=(rows["kind"] == "linear") * (rows["pass"] == "all but the last") * 1)
    assert held("prefill-linear-never", results, replayed=prefill) == "fails"


def test_statements_on_the_first_difference_hold_and_fail_by_where_it_is(results):
    def begins(*first: str) -> str:
        """Let the real step of 40 texts in bf16 begin to differ at one of these operations each."""
        texts = [
            replayed_rows(differing={("real decode step", 0, name)}).assign(sample=k, source=f"{k}.py")
            for k, name in enumerate(first * (40 // len(first)))
        ]
        rows = pd.concat(texts).replace({"operation": {"proj": "q_proj"}})
        return held("bf16-begins-later", results, replayed=rows.assign(model=results.model, dtype="bfloat16"))

    assert begins("act") == "holds"
    assert begins("proj") == "fails"
    # A text without a difference is none that begins later.
    assert begins("none") == "fails"


def test_shares_of_calls_are_means_over_texts_in_figures_and_in_the_text(results):
    differing = {("last 1", 0, "proj"), ("last 1", 1, "proj"), ("last 1", 1, "act"), ("last 1", None, "embed")}
    one = replayed_rows(differing=differing)
    # One file has two texts that differ, the other one text that does not.
    rows = pd.concat([one, one.assign(sample=1), replayed_rows().assign(sample=2, source="1.py")])
    found = changed(results, replayed=rows.assign(model=results.model))
    share = found.shares.set_index(["pass", "kind"])["share"]["last 1", "linear"]
    assert share == pytest.approx(4 / 6 * 2 / 3)
    assert statements.NUMBERS["linear_fp32"](found) == f"{share:.1%}"


def test_statements_on_the_cause_hold_and_fail_by_which_is_enough(results):
    one, every = cache_factorial.ONE_ROW, cache_factorial.ALL_ROWS

    def rows(by_query: float, by_cache: float) -> pd.DataFrame:
        made = factorial_rows(
            {
                (cache, query): (query == one) * by_query + (cache != cache_factorial.FULL) * by_cache
                for cache in cache_factorial.SOURCES
                for query in (one, every)
            }
        )
        return pd.concat(
            [made.assign(source=made["source"] + str(k), sample=made["sample"] + 4 * k) for k in range(10)]
        )

    names = ("one-row-is-enough", "prefill-is-not-enough", "decoded-cache-is-enough")
    assert [held(name, results, factorial=rows(1, 0)) for name in names] == ["holds", "holds", "fails"]
    assert [held(name, results, factorial=rows(0, 1)) for name in names] == ["fails", "fails", "holds"]


def test_statements_on_products_and_attention_hold_and_fail_by_their_rows(results):
    def mapped(short: int, long: int) -> pd.DataFrame:
        """Rows that differ below some number, for a short sum and for a long one."""
        each = [
            mapped_rows({"float32": below, "bfloat16": below}).assign(inner_size=size)
            for size, below in ((4, short), (8, long))
        ]
        return pd.concat(each)

    names = ("short-products-fp32", "short-sums-never-bf16", "a-long-sum-differs-bf16")
    assert [held(name, results, mapped=mapped(0, 3)) for name in names] == ["holds", "holds", "fails"]
    assert [held(name, results, mapped=mapped(18, 20)) for name in names] == ["fails", "fails", "holds"]
    one_row = "a-long-sum-differs-for-one-row-on-amd"
    assert [held(one_row, results, mapped=mapped(0, most)) for most in (1, 2)] == ["holds", "fails"]
    forms = results.attention.rows
    equal, none = forms.assign(equal_rows=forms["compared_rows"]), forms.assign(equal_rows=0)
    assert held("masks-alike", results, attention=equal) == "holds"
    assert held("masks-alike", results, attention=none) == "fails"
    assert held("one-query-fp32", results, attention=none) == "holds"
    assert held("one-query-fp32", results, attention=equal) == "fails"
    assert held("hidden-keys-change-rows", results, attention=equal) == "fails"


def test_statements_on_lengths_hold_and_fail_by_how_many_agree(results):
    few = swept_rows(float32=3, bfloat16=3)
    few = pd.concat([few.assign(source=f"{k}.py", sample=few["sample"] + 2 * k) for k in range(20)])
    none = few.assign(logits_equal=0)
    names = ("no-length-agrees-fp32", "some-lengths-agree-bf16")
    assert [held(name, results, swept=few) for name in names] == ["fails", "holds"]
    assert [held(name, results, swept=none) for name in names] == ["holds", "not resolved"]


def test_every_statement_and_number_can_be_given_of_any_run(results):
    assert all(check(one, results).outcome for one in statements.STATEMENTS.values())
    assert all(isinstance(give(results), str) for give in statements.NUMBERS.values())


def test_a_run_that_cannot_start_leaves_nothing_behind(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for module, change in (
        (operation_replay, {"families": ["nosuch"]}),
        (operation_replay, {"n_tokens": 65}),
        (cache_factorial, {"n_tokens": 64}),
        (length_sweep, {"n_tokens": 42}),
        (gemm_map, {"device": "cuda:99"}),
        (attention_forms, {"device": "nosuch"}),
    ):
        with pytest.raises(UserError) as error:
            module.EXPERIMENT.run(WhereDriftBeginsSettings.checked(**settings.model_dump() | change))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_figures_draw_what_the_tables_hold(results):
    beside = tables.beside(results.shares, results.shares)
    assert set(beside["model"]) - set(results.shares["model"]) == {f"the book-{results.model.partition('-')[0]}"}
    drawn = [
        figures.figure_operations(results.operations),
        figures.figure_kinds(results.shares, figures.shown_passes()),
        figures.figure_kinds(beside, figures.shown_passes()),
        figures.figure_gemm(results.products),
        figures.figure_lengths(results.lengths),
        figures.figure_forms(results.forms),
        figures.figure_factorial(results.drifts),
    ]
    for fig in drawn:
        fig.canvas.draw()
        assert all(ax.has_data() for ax in fig.axes)
        plt.close(fig)


def test_the_library_s_own_product_is_what_is_mapped_by_default(product):
    x, weight = product
    assert list(gemm_map.compare(x, weight)) == list(gemm_map.compare(x, weight, linear))


def mapped_rows(differing: dict[str, int]) -> pd.DataFrame:
    return pd.DataFrame(
        {"dtype": dtype, "threads": 1, "inner_size": 4, "rows": rows, "first_row_equal": int(rows > count),
         "equal_rows": rows if rows > count else 0}
        for dtype, count in differing.items() for rows in range(1, 25)
    )


def swept_rows(**least) -> pd.DataFrame:
    """Two texts at lengths 2 to 11, equal bits below a length of their own."""
    return pd.DataFrame(
        {"attention": "sdpa", "model": "m", "dtype": dtype, "sample": sample, "n_tokens": n,
         "logits_equal": int(n < start + sample), "cache_equal": int(n < 7)}
        for dtype, start in least.items() for sample in (0, 1) for n in range(2, 12)
    )


def test_the_share_of_lengths_with_equal_bits_is_told_for_each_text():
    table = tables.identical_lengths(swept_rows(float32=3, bfloat16=9)).set_index("dtype")
    counts = table.loc["float32", ["texts", "lengths", "identical", "least", "most"]].tolist()
    assert counts == pytest.approx([2, 10, 0.15, 0.1, 0.2])
    assert table.loc["bfloat16", "differing"] == [9, 10, 11]
    shown = tables.lengths_shown(table.reset_index())
    assert shown["lowest and highest text"].tolist() == ["10% to 20%", "70% to 80%"]
    assert shown["lengths that differ in some text"].tolist() == ["3–11", "9–11"]
    # Control: of one text there is nothing to compare, and equal lengths are not counted as differing.
    one = tables.identical_lengths(swept_rows(float32=99).query("sample == 0"))
    assert tables.lengths_shown(one)[
        ["lowest and highest text", "lengths that differ in some text"]
    ].to_numpy().tolist() == [["one text", "none"]]


def test_every_text_has_its_own_length_and_the_factorial_one_token_more(results):
    replayed, factorial = results.replayed.rows, results.factorial.rows
    drawn = [lengths.drawn("9-14", index) for index in range(4)]
    assert set(replayed["n_tokens"]) == {drawn[0]}
    by_text = factorial.groupby(["sample", "longer"])["n_tokens"].agg(["min", "max"])
    assert by_text["min"].unstack().to_numpy().tolist() == [[n, n + 1] for n in drawn]
    assert (by_text["min"] == by_text["max"]).all()
    assert set(results.drifts["n_tokens"]) == {
        wording.between(drawn, "{}"),
        wording.between([n + 1 for n in drawn], "{}"),
    }
    assert results.swept.rows.groupby("attention")["sample"].nunique().to_dict() == {"sdpa": 2, "eager": 1}


def test_the_recorded_versions_of_torch_replay_equal_texts_and_the_oldest_comes_first():
    runs = Results.by_torch()
    versions = [tuple(int(part) for part in run.about["machine"]["torch"].partition("+")[0].split(".")) for run in runs]
    assert versions == sorted(set(versions))
    assert len(versions) >= 2
    for name in ("settings", "models", "corpus", "commit"):
        assert len({str(run.about[name]) for run in runs}) == 1, name
    assert len({run.about["machine"]["processor"] for run in runs}) == 1


def test_each_version_of_torch_has_what_its_own_replay_found():
    def run(torch: str, *differing) -> Run:
        return run_of(replayed_rows(differing=differing), machine={"torch": f"{torch}+cpu"})

    same, other = run("2.6.0", ("last 1", 0, "proj")), run("2.13.0", ("real decode step", 1, "proj"))
    table = tables.by_torch([same, other]).set_index("torch")
    assert table.loc["2.6.0", "calls that differ locally"] == "linear, last 1: 17%"
    assert table.loc["2.6.0", "first operation, most often"] == "none"
    assert table.loc["2.13.0", "first operation, most often"] == "layer 1 proj"
    assert table.loc["2.13.0", "calls that differ locally"] == "none"


@pytest.mark.parametrize("longest", [12, 63, 64, 191])
def test_the_map_of_lengths_names_some_of_them(longest):
    rows = [
        {"attention": "sdpa", "dtype": "float32", "n_tokens": length, "logits": 0.5, "cache": 0.0}
        for length in range(2, longest + 1)
    ]
    (ax, *_) = figures.figure_lengths(pd.DataFrame(rows)).axes
    assert 2 <= len(ax.get_xticks()) <= 16
