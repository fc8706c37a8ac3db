"""The experiments on where drift begins: each finds what was injected, and finds nothing where nothing is."""

import functools
import itertools

import pandas as pd
import pytest
import torch
from made_up import run_of, with_rows
from refusing import refusal

from kvbook import lengths
from kvbook.atlas import configurations
from kvbook.exact import row_invariant
from kvbook.measuring import agreement, full_and_split
from kvreport.chapters.where_drift_begins import (
    WhereDriftBeginsSettings,
    attention_forms,
    cached_step,
    kernels,
    measures,
    operation_replay,
    products,
    rows,
    tables,
)
from kvreport.publishing.found import of_runs, published

pytestmark = pytest.mark.usefixtures("no_gradients")

PASSES = LAST, PREFILL, REAL, ALL = rows.LAST_ONE, rows.PREFILL, rows.REAL, rows.ALL


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return WhereDriftBeginsSettings.checked(
        model=str(llama_folder), families=[str(gpt2_folder)], corpus=str(text_folder), n_samples=4, n_tokens="9-14",
        max_rows=8, chunks="1,3", inner_sizes="16", threads="1", key_lengths="5,17", kernel_rows="1,2",
        dtypes="float32,bfloat16",
    )


def test_every_operation_is_in_every_pass_once_and_on_equal_inputs_where_it_is_replayed(results):
    replayed, text = results["operation_replay"], ["model", "attention", "dtype", "sample", "pass"]
    assert not replayed.duplicated([*text, "layer", "operation"]).any()
    assert set(replayed["pass"]) == {"last 1", "last 3", ALL, PREFILL, REAL}
    calls = replayed.groupby(text)["calls"].sum().groupby(["model", "attention"])
    assert (calls.min() == calls.max()).all()
    assert (replayed.loc[replayed["pass"] == ALL, "differing_calls"] == 0).all()
    assert (replayed.loc[replayed["pass"] != REAL, "inputs_equal"] == 1).all()


def test_a_difference_spreads_to_the_logits_in_the_real_step_and_in_no_replay(ids):
    model = configurations.build("llama", torch.float64)
    activation = model.model.layers[0].mlp.act_fn
    stock = activation.forward
    activation.forward = lambda x: stock(x) * (1.01 if x.shape[-2] == 1 else 1.0)
    compared = pd.DataFrame(operation_replay.compare(model, ids, [1]))
    assert set(compared.loc[compared["inputs_equal"] == 0, "pass"]) == {REAL}
    # In double precision what is propagated stands out from rounding by orders of magnitude.
    logits = compared.query("operation == 'lm_head'").set_index("pass")["relative_rms"]
    assert logits.pop(REAL) > 1e6 * max(logits.max(), 1e-15)


def test_every_text_has_its_own_length_and_the_factorial_one_token_more(results):
    drawn = [lengths.drawn("9-14", index) for index in range(4)]
    assert set(results["operation_replay"]["n_tokens"]) == {drawn[0]}
    by_text = results["cache_factorial"].groupby(["sample", "longer"])["n_tokens"].unique().unstack()
    assert by_text.to_numpy().tolist() == [[[n], [n + 1]] for n in drawn]
    assert results["length_sweep"].groupby("attention")["sample"].nunique().to_dict() == {"sdpa": 2, "eager": 1}


# What each experiment compares


@pytest.mark.parametrize("what", operation_replay.COMPARED)
def test_a_bit_that_a_cache_changes_in_a_prompt_is_counted_where_it_shows(llama, ids, monkeypatch, what):
    def compared() -> pd.DataFrame:
        return pd.DataFrame(operation_replay.compare_reads(llama, ids)).query("shapes == 'equal'").set_index("what")

    def nudged(model, ids, use_cache):
        found = read(model, ids, use_cache)
        if use_cache:
            found.compared[what][-1].view(-1)[0] += 1
        return found

    read, stock = operation_replay.read, compared()
    assert (stock["elements"] > 0).all()
    assert (stock["differing"] == 0).all()
    monkeypatch.setattr(operation_replay, "read", nudged)
    assert (compared()["differing"] == stock["differing"].where(stock.index != what, 1)).all()


def test_a_product_is_flagged_at_the_numbers_of_rows_that_change_it_and_at_no_other(results):
    def product(x, weight):
        # Each row by itself, but for few rows and for the last ones of six.
        result = torch.stack([(row * weight).sum(-1) for row in x])
        if len(x) < 4:
            return result * 1.001
        if len(x) == 6:
            result[-2:] *= 1.001
        return result

    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(12, 16, generator=generator), torch.randn(6, 16, generator=generator)
    mapped = with_rows(results, gemm_map=pd.DataFrame(products.compare(x, weight, product)))["products"]
    differing = mapped[mapped["state"] != rows.ALL_EQUAL].set_index("rows")["state"]
    assert mapped["rows"].tolist() == list(range(1, 13))
    assert differing.to_dict() == dict.fromkeys((1, 2, 3), rows.NONE_EQUAL) | {6: rows.FIRST_EQUAL}


REPORT = """\
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512,undef,src:f16::ab dst:f16::ab,,,2x576:576x64,0.13
MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture
MKL_VERBOSE SGEMM(T,N,576,1,64,0x7f,0x7f,576,0x56,576,0x7f,0x56,576) 157.73us CNR:OFF TID:0 NThr:1
a line of something else
"""


def test_a_call_is_read_from_what_libraries_report_and_nothing_from_what_else_they_print():
    assert list(kernels.kernels(REPORT)) == [("oneDNN brg_matmul:avx512", "2x576:576x64"), ("MKL SGEMM", "1x64x576")]


@pytest.mark.parametrize("inner", [16, 17])
def test_the_mapped_sums_are_zero_but_for_rounding(inner):
    x, weight = products.factors(12, inner, 6, seed=3)
    terms = x.double()[:, None] * weight.double()
    assert terms.sum(-1).abs().max() < 1e-13 * terms.abs().max()
    assert terms.abs().sum(-1).min() > 0


def added(parts):
    """Multiply by adding up parts of the terms and then these, each sum rounded to fp32."""
    def product(x, weight):
        terms = (x.float()[:, None] * weight.float()).unbind(-1)
        return functools.reduce(torch.add, [functools.reduce(torch.add, part) for part in parts(terms)]).to(x.dtype)

    return product


@pytest.mark.parametrize(("dtype", "of"), [("float32", 0), ("float16", 1), ("bfloat16", 1)])
def test_the_order_of_a_sum_is_read_from_it_and_whether_every_step_is_rounded(dtype, of):
    for parts, told in {
        lambda terms: [terms]: (24, 1), lambda terms: [terms[:9], terms[9:18], terms[18:]]: (9, 1),
        lambda terms: [terms[start::4] for start in range(4)]: (6, 4),
    }.items():
        assert products.in_turn(products.partial_sums(2, [5, 24], dtype, 0, added(parts))[0]) == told
    assert products.kept(2, [5, 24], dtype, added(lambda terms: [terms])) == pytest.approx(of, abs=0.1)


PROFILE = """40.00%  [JIT] tid 7          [.] 0x00007f1d      -      -
    45.00%  libtorch_cpu.so      [.] mkl_scopy       -      -
    21.50%  libtorch_cpu.so      [.] at::native::(anonymous namespace)::dot<float, 32l>(at::Tensor const&)   -      -"""


def test_a_profile_names_the_function_that_took_the_most_samples_and_no_copying():
    assert products.most_sampled(PROFILE) == rows.WRITTEN
    assert products.most_sampled(PROFILE.replace("40.00", "10.00")) == "at::native::dot"
    assert products.most_sampled("") == rows.UNREPORTED


def attended(attend) -> dict[str, dict]:
    generator = torch.Generator().manual_seed(6)
    qkv = (torch.randn(2, 2, 20, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return {row["form"]: row for row in attention_forms.compare(attend, *qkv)}


@pytest.mark.parametrize("kernel", ["SDPA math", "eager"])
def test_every_form_of_the_attention_computes_the_same_up_to_rounding(kernel):
    found = attended(attention_forms.KERNELS[kernel])
    assert tuple(found) == rows.FORMS
    assert all(row["relative_rms"] < 1e-13 and row["form_error"] < 1e-13 for row in found.values())


def test_control_a_causal_mask_on_one_query_is_flagged():
    def upper_left(q, k, v, mask=None, is_causal=False):
        # What one-query SDPA does with is_causal: the query sees the first key alone.
        one = q.shape[-2] == 1 and mask is None
        return attention_forms.KERNELS["SDPA math"](q, k, v, mask, is_causal or one)

    found = attended(upper_left)
    assert found[rows.ALONE]["equal_rows"] == 0
    assert found[rows.ALONE]["relative_rms"] > 0.1
    assert found[rows.ALONE_MASKED]["relative_rms"] < 1e-13


def test_a_kernel_without_masks_leaves_these_forms_out():
    def no_masks(q, k, v, mask=None, is_causal=False):
        if mask is not None:
            raise RuntimeError("no masks here")
        return attention_forms.KERNELS["eager"](q, k, v, mask, is_causal)

    assert set(attended(no_masks)) == {rows.ALONE, rows.LONGER}


def test_the_sweep_sees_what_two_passes_give(llama, ids):
    swept = {row["n_tokens"]: row for row in cached_step.sweep(llama, ids)}
    full, split = full_and_split.full_pass(llama, ids[:, :9]), full_and_split.split_pass(llama, ids[:, :9])
    assert list(swept) == list(range(2, ids.shape[1] + 1))
    assert swept[9]["logits_equal"] == int(agreement.bits_equal(full.logits, split.logits).all())
    assert swept[9]["relative_rms"] == agreement.drift(full.logits, split.logits).relative_rms.item()


def test_the_keys_of_a_window_are_compared_at_equal_places(ids):
    model = configurations.build("mistral")
    with row_invariant():
        swept = pd.DataFrame(cached_step.sweep(model, ids))
        assert (swept[["cache_equal", "logits_equal"]] == 1).all(axis=None)
        assert {row["differing"] for row in operation_replay.compare_reads(model, ids)} == {0}


def test_a_recurrent_model_is_refused_before_anything_runs(settings, save):
    asked = settings.model_copy(update={"model": str(save(configurations.build("mamba"), "mamba"))})
    assert "a recurrent state cannot be cut back" in refusal(operation_replay.inputs, asked)


def test_control_a_changed_key_is_a_changed_cache(llama, ids):
    one, other = full_and_split.prefill(llama, ids), full_and_split.prefill(llama, ids)
    assert cached_step.cache_equal(one, other)
    other.layers[3].keys[0, 1, 5, 2] += 1e-6
    assert not cached_step.cache_equal(one, other)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_all_rows_on_the_full_passes_own_cache_are_the_full_pass(llama, gpt2, ids, family):
    model = {"llama": llama, "gpt2": gpt2, "mistral": configurations.build("mistral")}[family]
    reference, written = full_and_split.full_pass(model, ids), cached_step.written(model, ids)
    found = cached_step.query(model, ids, written[rows.FROM_FULL], rows.ALL_ROWS)
    assert agreement.bits_equal(reference.logits, found.logits).all()
    assert {cache.get_seq_length() for cache in written.values()} == {ids.shape[1] - 1}


def test_control_all_rows_read_the_cache_that_they_are_given(llama, ids):
    wrong = ids.clone()
    wrong[0, 3] += 1
    reference, cache = full_and_split.full_pass(llama, ids), cached_step.written(llama, wrong)[rows.FROM_PREFILL]
    among, alone = (cached_step.query(llama, ids, cache, how) for how in (rows.ALL_ROWS, rows.ONE_ROW))
    assert agreement.drift(reference.logits, among.logits).relative_rms > 1e-3
    assert agreement.drift(alone.logits, among.logits).relative_rms < 1e-5


# What is said of rows that are made up

DTYPES = ("float32", "bfloat16")
KINDS = {"embed": "embedding", "q_proj": "linear", "act": "elementwise", "down_proj": "linear"}
PLACES = ((None, "embed"), (0, "q_proj"), (0, "act"), (1, "q_proj"), (1, "act"), (None, "down_proj"))


def replayed(*differing, unequal=(), texts=(0,)) -> pd.DataFrame:
    """Replay texts; (pass, layer, operation) names what differs, and what is given other inputs."""
    every = itertools.product(DTYPES, texts, range(6), PASSES)
    made = pd.DataFrame(every, columns=["dtype", "sample", "order", "name"]).assign(model="m", attention="sdpa")
    calls = [(name, *PLACES[order]) for order, name in zip(made["order"], made["name"], strict=True)]
    differs = pd.Series([call in differing for call in calls])
    made[["layer", "operation"]] = [call[1:] for call in calls]
    return made.rename(columns={"name": "pass"}).assign(
        source=made["sample"], kind=made["operation"].map(KINDS), calls=1, differing_calls=differs * 1,
        first_differing=made["order"].where(differs), inputs_equal=[int(call not in unequal) for call in calls],
    )


def test_an_operation_is_blamed_where_it_differs_on_equal_inputs_and_nowhere_else(results):
    differing = (LAST, 0, "q_proj"), (PREFILL, 1, "q_proj"), (LAST, 1, "act"), (LAST, None, "down_proj")
    one = replayed(*differing, unequal=differing[3:])
    table = with_rows(results, operation_replay=pd.concat([one, replayed(texts=[1])]))["operations"]
    assert table.set_index(["layer", "operation"])["share"].to_dict() == {
        (-1, "embed"): 0, (0, "q_proj"): 0.5, (0, "act"): 0, (1, "q_proj"): 0, (1, "act"): 0.5, (2, "down_proj"): 0,
    }


@pytest.mark.parametrize(("differing", "unequal", "told"), [
    ([(1, "q_proj"), (1, "act")], [(1, "q_proj")], ["1 of 1", "0 of 1", "layer 1 q_proj (1)"]),
    ([(None, "embed")], [], ["1 of 1", "1 of 1", "embed (1)"]), ([], [], ["0 of 1", "", ""]),
])
def test_the_first_difference_is_the_earliest_and_says_whether_the_step_began_it(results, differing, unequal, told):
    differing, unequal = ([(REAL, *place) for place in places] for places in (differing, unequal))
    found = with_rows(results, operation_replay=replayed(*differing, unequal=unequal))
    assert tables.first_differences(found["beginnings"]).iloc[0, 3:].tolist() == told


def test_shares_of_calls_are_means_over_texts_in_figures_and_in_sentences(results):
    one = replayed((LAST, 0, "q_proj"), (LAST, 1, "q_proj"), (LAST, 1, "act"))
    # One file has two texts that differ, the other one text that does not.
    found = with_rows(results, operation_replay=pd.concat([one, one.assign(sample=1), replayed(texts=[2])]))
    shares = found["kinds"].set_index(["dtype", "pass", "kind"])["share"]
    (sentence,) = measures.LINEAR.where(dtype="float32")(found)
    assert shares["float32", LAST, "linear"] == sentence.estimate.value == pytest.approx(2 / 3 * 2 / 3)
    # A run in a dtype that the book lacks stands alone.
    assert len(tables.beside(found["kinds"].assign(dtype="float64"), found["kinds"])) == len(shares)


def test_products_of_a_step_are_listed_by_the_kernel_that_runs_them():
    ran = pd.DataFrame({"operation": ["q_proj", "o_proj", rows.ATTENTION], "kernel": ["a", "a", "b"]})
    ran = ran.assign(dtype="bfloat16", rows=1, shape="1x2x3", calls=1)
    replay = replayed((LAST, 0, "q_proj"), texts=[0, 1, 2, 3]).assign(dtype="bfloat16")
    about = {"machine": {"processor": "Maker One", "cpu": {"instructions": []}}, "settings": {"n_tokens": "33-190"}}
    whole = {"operation_replay": run_of(replay, **about), "kernels": run_of(ran, **about)}
    everywhere = {"one": whole, "no kernels": whole | {"kernels": None}}
    everywhere = {name: of_runs("where_drift_begins", runs) for name, runs in everywhere.items()}
    (line,) = tables.by_kernel(tables.replayed(everywhere)).to_dict("records")
    assert (line["processor"], line["kernel of linear layers"], line["in"]) == ("Maker One", "a", "q_proj")
    # All layers of one kernel share a line; what was held back has none.
    everywhere["Maker One, LIBRARY_MAX=OLD"] = everywhere.pop("no kernels")
    everywhere["Maker One, LIBRARY_MAX=OLD"].runs["kernels"] = whole["kernels"]
    listed = tables.kernels(tables.free(everywhere))[["operation", "rows", "kernel"]]
    assert listed.to_numpy().tolist() == [["all linear layers", "1", "a"], [rows.ATTENTION, "1", "b"]]
    # Where the order was taken apart, a function and an order for each number of rows, but not what was not caught.
    apart = pd.DataFrame({"operations": "q_proj, o_proj", "rows": [1, 2, 4], "in_a_row": [9, 9, 4], "sums": [4, 4, 1]})
    apart = apart.assign(dtype="bfloat16", threads=1, inner_size=36, kernel="a", function=["mkl_f", "mkl_f", "c10::g"])
    everywhere["one"] = of_runs("where_drift_begins", whole | {"summation": run_of(apart, **about)})
    assert tables.kernels(tables.free(everywhere)).iloc[:, 2:].to_numpy().tolist() == [
        ["all linear layers", "36", "1 to 2", "mkl_f", "4 sums in turn"],
        ["all linear layers", "36", "4", "a", "pieces of 4"],
    ]


def test_under_one_limit_two_processors_have_one_kernel_and_one_pattern_and_control_without_one_they_do_not():
    told = tables.by_kernel(tables.replayed(published("where_drift_begins"))).drop(columns="calls that differ")
    limits = told.pop("processor").str.partition("ONEDNN_MAX_CPU_ISA=")[2]
    patterns = {limit: (len(of), len(of.drop_duplicates())) for limit, of in told.groupby(limits)}
    assert patterns == {"": (2, 2), "AVX2": (2, 1), "AVX512_CORE": (2, 1)}


def test_each_version_of_torch_has_what_its_own_replay_found():
    runs = [
        run_of(replayed(place), machine={"torch": f"{torch}+cpu"}, settings={"n_tokens": "33-190"})
        for torch, place in (("2.6.0", (LAST, 0, "q_proj")), ("2.13.0", (REAL, 1, "q_proj")))
    ]
    assert tables.by_torch(runs).iloc[::2, [0, 4, 5]].to_numpy().tolist() == [
        ["2.6.0", "none", "linear, last 1: 33%"], ["2.13.0", "layer 1 q_proj", "none"]
    ]


def test_the_recorded_versions_of_torch_replay_equal_texts_and_the_oldest_comes_first():
    abouts = [run.about for run in rows.older_torch()]
    versions = [tuple(map(int, about["machine"]["torch"].partition("+")[0].split("."))) for about in abouts]
    assert versions == sorted(set(versions))
    assert len(versions) >= 2
    first, *others = ([about[key] for key in ("settings", "models", "corpus", "commit")] for about in abouts)
    assert others == [first] * len(others)
    assert len({about["machine"]["processor"] for about in abouts}) == 1
