"""The experiments on where drift begins: each finds what was planted, and finds nothing where nothing is."""

import functools
import re

import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from planted import run_of
from torch.nn.functional import linear

from kvbook import lengths, paths
from kvbook.errors import UserError
from kvbook.measuring import agreement, full_and_split
from kvbook.measuring.estimates import FEWEST_UNITS
from kvbook.runs.records import Run
from kvreport.chapters.where_drift_begins import (
    attention_forms,
    cache_factorial,
    figures,
    gemm_map,
    length_sweep,
    operation_replay,
    tables,
    words,
)
from kvreport.chapters.where_drift_begins.results import Results
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings
from kvreport.publishing import citation, wording


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return WhereDriftBeginsSettings.checked(
        model=str(llama_folder), families=[str(gpt2_folder)], corpus=str(text_folder), n_samples=4, n_tokens="9-14",
        max_rows=8, chunks="1,3", inner_sizes="16", threads="1", key_lengths="5,17",
    )  # fmt: skip


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


def test_every_caption_and_number_can_be_said_of_any_run(results):
    captions = words.captions(results)
    assert all(name == said["name"] and said["caption"].endswith(".") for name, said in captions.items())
    numbers = words.numbers(results)
    assert all(isinstance(value, str) and value for value in numbers.values())
    assert not any("nan" in value for value in numbers.values())


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
        with gemm_map.threads(before + 1):
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
            "model": "m", "weights": "random", "dtype": "float32", "sample": sample, "source": f"{sample}.py", "n_tokens": 8,
            "longer": 0,
            "cache": cache, "query": query, "relative_rms": drift * (1 + 0.1 * sample), "differing_share": float(drift > 0),
        }
        for (cache, query), drift in drifts.items()
        for sample in range(4)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("by_query", "by_cache", "fault"),
    [(1e-7, 1e-7, tables.BOTH), (1e-7, 0, tables.QUERY), (0, 1e-7, tables.CACHE), (0, 0, tables.NEITHER)],
)
def test_the_fault_is_found_where_it_was_planted(by_query, by_cache, fault):
    one, every = cache_factorial.ONE_ROW, cache_factorial.ALL_ROWS
    rows = factorial_rows(
        {
            (cache, query): (query == one) * by_query + (cache != cache_factorial.FULL) * by_cache
            for cache in cache_factorial.SOURCES
            for query in (one, every)
        }
    )
    assert tables.whose_fault(tables.factorial_table(rows))["fault"].tolist() == [fault]


def replayed_rows(**changes) -> pd.DataFrame:
    base = {"model": "m", "attention": "sdpa", "dtype": "float32", "sample": 0, "calls": 1, "kind": "linear"}
    rows = []
    for order, (layer, operation) in enumerate(
        [(None, "embed"), (0, "proj"), (0, "act"), (1, "proj"), (1, "act"), (None, "head")]
    ):
        for name in ("last 1", "all but the last", "real decode step"):
            differing = (name, layer, operation) in changes.get("differing", ())
            equal = (name, layer, operation) not in changes.get("unequal", ())
            rows.append(
                base | {"pass": name, "layer": layer, "operation": operation, "order": order, "differing_calls": int(differing),
                        "first_differing": order if differing else None, "inputs_equal": int(equal)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def test_each_state_of_an_operation_is_told_from_the_others():
    rows = replayed_rows(
        differing={
            ("last 1", 0, "proj"), ("real decode step", 0, "proj"), ("real decode step", 0, "act"),
            ("all but the last", 1, "proj"), ("last 1", 1, "act"), ("all but the last", 1, "act"),
            # Handed other inputs in the replay: no verdict on the operation itself.
            ("all but the last", None, "head"), ("real decode step", None, "head"),
        },
        unequal={("all but the last", None, "head")},
    )  # fmt: skip
    table = tables.operation_states(rows).set_index(["layer", "operation"])["state"]
    assert table.to_dict() == {
        (-1, "embed"): tables.EQUAL,
        (0, "proj"): tables.OWN_ROW,
        (0, "act"): tables.HANDED,
        (1, "proj"): tables.OWN_PREFILL,
        (1, "act"): tables.OWN_BOTH,
        (2, "head"): tables.HANDED,
    }


def test_the_first_difference_is_the_earliest_and_says_whether_it_was_handed():
    rows = replayed_rows(
        differing={("real decode step", 1, "proj"), ("real decode step", 1, "act"), ("real decode step", None, "head")},
        unequal={("real decode step", 1, "proj")},
    )
    found = tables.first_differences(rows).iloc[0]
    assert (found["first"], found["cause"], found["differing"]) == ("layer 1 proj", "the cache it reads", 1)
    nothing = tables.first_differences(replayed_rows()).iloc[0]
    assert (nothing["first"], nothing["differing"]) == ("none", 0)


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
    states = results.states
    drawn = [
        figures.figure_operations(states, states["model"].iloc[0], states["attention"].iloc[0]),
        figures.figure_kinds(results.shares, figures.shown_passes()),
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


def test_every_figure_begins_with_its_finding_in_a_sentence_that_a_title_can_hold(results):
    for name, said in words.captions(results).items():
        if name.startswith("fig-"):
            assert re.search(r"\b(give|gives|has|have|is|seen)\b", citation.first_sentence(said["caption"])), name
            assert not citation.first_sentence(said["caption"]).endswith("…"), name


def test_operations_that_differ_by_themselves_are_counted_and_what_was_handed_on_is_not():
    own = {("last 1", 0, "proj"), ("all but the last", 1, "act")}
    handed = {("real decode step", None, "head")}
    assert "2 of 6 in fp32" in words._operations_found(tables.operation_states(replayed_rows(differing=own | handed)))
    assert "none of the 6 operations of m is seen" in words._operations_found(
        tables.operation_states(replayed_rows(differing=handed))
    )


def test_only_the_kinds_that_differ_are_named_and_without_any_none_is_seen_to():
    rows = replayed_rows(differing={("last 1", 0, "proj")}).assign(kind=lambda table: table["operation"])
    # In one dtype of two, and one pass of two, the calls of one layer of two: an average over cells would be 12 %.
    both = pd.concat([rows, rows.assign(dtype="float16", differing_calls=0)])
    assert "only these give other bits, in up to so many calls: proj 50% in fp32." in words._kinds_found(
        tables.kind_shares(both)
    )
    alike = pd.concat([rows, rows.assign(dtype="float16")])
    assert "proj 50% in fp32 and fp16" in words._kinds_found(tables.kind_shares(alike))
    assert "no kind of operation is seen" in words._kinds_found(tables.kind_shares(rows.assign(differing_calls=0)))
    every = rows.assign(differing_calls=1)
    assert "all kinds that were run" in words._kinds_found(tables.kind_shares(every))


def mapped_rows(differing: dict[str, int]) -> pd.DataFrame:
    return pd.DataFrame(
        {"dtype": dtype, "threads": 1, "inner_size": 4, "rows": rows, "first_row_equal": int(rows > count),
         "equal_rows": rows if rows > count else 0}
        for dtype, count in differing.items() for rows in range(1, 9)
    )  # fmt: skip


def test_a_product_is_said_to_differ_at_as_many_numbers_of_rows_as_it_does():
    said = "Of 8 numbers of rows, a product gives some row other bits than all 8 at up to 3 in fp32 and none in bf16."
    assert said in words._gemm_found(tables.gemm_states(mapped_rows({"float32": 3, "bfloat16": 0})))
    assert words._gemm_found(tables.gemm_states(mapped_rows({"float32": 0}))).startswith("At none of 8 numbers of rows")


def test_numbers_of_rows_are_listed_by_inner_size_where_these_differ():
    one, other = mapped_rows({"bfloat16": 1}), mapped_rows({"bfloat16": 0}).assign(inner_size=8)
    assert words._of_gemm(tables.gemm_states(one))["gemm"] == "bf16, 1 thread: 1"
    said = words._of_gemm(tables.gemm_states(pd.concat([one, other])))["gemm"]
    assert said == "bf16, 1 thread: 1 at inner size 4, and none at inner size 8"


def test_the_texts_length_is_told_from_those_beside_it():
    rows = pd.DataFrame(
        {"model": "m", "attention": attention, "dtype": dtype, "n_tokens": n, "cache_equal": int(n != 5 or attention != "sdpa")}
        for attention in ("sdpa", "eager") for dtype in ("float32", "bfloat16") for n in range(2, 9)
    )  # fmt: skip
    assert words._length_found(rows, 5).endswith("in fp32 and bf16 at 5, in no dtype at 4 and 6 tokens.")
    assert words._length_found(rows, 7).endswith("in no dtype at 7, 6 and 8 tokens.")


def swept_rows(**least) -> pd.DataFrame:
    """Two texts at lengths 2 to 11, equal bits below a length of their own."""
    return pd.DataFrame(
        {"attention": "sdpa", "model": "m", "dtype": dtype, "sample": sample, "n_tokens": n,
         "logits_equal": int(n < start + sample), "cache_equal": int(n < 7)}
        for dtype, start in least.items() for sample in (0, 1) for n in range(2, 12)
    )  # fmt: skip


def test_over_a_range_the_share_of_lengths_is_told():
    rows = swept_rows(float32=3, bfloat16=9)
    assert words._length_found(rows, "5-8").endswith("at this share of lengths from 5 to 8: 50% in fp32 and bf16.")
    assert words._length_found(rows.assign(cache_equal=1), "5-8").endswith("0% in fp32 and bf16.")


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


@pytest.mark.parametrize(
    ("files", "said"), [(1, "of 1 file"), (3, "lowest to highest of 3 files"), (4, "over 4 files")]
)
def test_few_files_have_a_lowest_and_a_highest_and_no_interval(files, said):
    rows = factorial_rows({(c, q): 1e-7 for c in cache_factorial.SOURCES for q in (cache_factorial.ONE_ROW,)})
    rows = pd.concat([rows.assign(sample=n, source=f"{n}.py", relative_rms=(1.0 + n) * 2**-24) for n in range(files)])
    assert said in wording.brackets(rows)
    drift = tables.factorial_table(rows)["drift"].iloc[0]
    if files < FEWEST_UNITS:
        assert (drift.low, drift.high, drift.kind) == (1.0, files, "range")
    else:
        assert 1.0 <= drift.low < drift.high <= files
        assert drift.kind == "95 %"


def test_lengths_with_equal_bits_are_counted_by_attention():
    rows = pd.DataFrame(
        {"attention": attention, "dtype": "float16", "n_tokens": n, "logits_equal": int(n < least)}
        for attention, least in (("sdpa", 4), ("eager", 9)) for n in range(2, 9)
    )  # fmt: skip
    assert "in fp16 at 2 and 7 (sdpa and eager attention)" in words._lengths_found(rows)
    assert words._lengths_found(rows.assign(logits_equal=1)).startswith("At all 7 lengths")


def test_a_query_alone_is_said_to_agree_only_where_every_row_does():
    rows = pd.DataFrame(
        {"dtype": "float32", "kernel": kernel, "form": "1 row, no mask", "equal_rows": equal, "compared_rows": 1000}
        for kernel, equal in (("a", 0), ("b", 999))
    )
    assert "0% to >99% in fp32" in words._forms_found(tables.equal_shares(rows))
    assert "in every kernel, dtype and draw" in words._forms_found(tables.equal_shares(rows.assign(equal_rows=1000)))


@pytest.mark.parametrize(
    ("by_query", "by_cache", "said"),
    [
        (
            1e-7,
            0,
            "Running the last token alone gives it other logits in 1 of 1 pairs of dtype and length. "
            "A prefill's cache alone does in none.",
        ),
        (0, 1e-7, "in 0 of 1 pairs of dtype and length. A prefill's cache alone does in 1 (fp32 at "),
        (0, 0, "Neither"),
    ],
)
def test_what_is_enough_to_change_the_logits_is_said_of_each_alone(by_query, by_cache, said):
    one = cache_factorial.ONE_ROW
    rows = factorial_rows(
        {
            (cache, query): (query == one) * by_query + (cache != cache_factorial.FULL) * by_cache
            for cache in cache_factorial.SOURCES
            for query in (one, cache_factorial.ALL_ROWS)
        }
    )
    assert said in words._factorial_found(tables.whose_fault(tables.factorial_table(rows)))


def test_the_recorded_versions_of_torch_replay_equal_texts_and_the_oldest_comes_first():
    runs = Results.by_torch()
    versions = [tuple(int(part) for part in run.about["machine"]["torch"].partition("+")[0].split(".")) for run in runs]
    assert versions == sorted(set(versions))
    assert len(versions) >= 2
    for name in ("settings", "models", "corpus", "commit"):
        assert len({str(run.about[name]) for run in runs}) == 1, name
    assert len({run.about["machine"]["processor"] for run in runs}) == 1
    assert f"torch {'.'.join(map(str, versions[0]))} and" in words.of_torch(runs)["caption"]


def test_each_version_of_torch_has_what_its_own_replay_found():
    def run(torch: str, *differing) -> Run:
        return run_of(replayed_rows(differing=differing), machine={"torch": f"{torch}+cpu"})

    same, other = run("2.6.0", ("last 1", 0, "proj")), run("2.13.0", ("real decode step", 1, "proj"))
    table = tables.by_torch([same, other]).set_index("torch")
    assert table.loc["2.6.0", "calls that differ locally"] == "linear, last 1: 17%"
    assert table.loc["2.6.0", "first operation"] == "none"
    assert table.loc["2.13.0", "first operation"] == "layer 1 proj"
    assert table.loc["2.13.0", "calls that differ locally"] == "none"
