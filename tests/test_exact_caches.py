"""The chapter on exact caches: its rows are what the ways give, and its statements fail on rows that contradict them."""

import pandas as pd
import pytest
import torch
from planted import on_processor, with_rows
from transformers import DynamicCache

from kvbook import paths as folders
from kvbook.errors import UserError
from kvbook.exact.verification import fed
from kvbook.measuring import estimates as fits
from kvreport.chapters.exact_caches import cost as exact_cost
from kvreport.chapters.exact_caches import figures, lengths, measures, paths, tables
from kvreport.chapters.exact_caches import ladder as exact_ladder
from kvreport.chapters.exact_caches.rows import ALL, ATTENTION, BOTH, EXACT, PRODUCTS, RUNGS, SINGLE, STOCK
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.publishing import found as found_in
from kvreport.publishing import statements
from kvreport.publishing.measures import named, written


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return ExactCachesSettings.checked(
        model=str(llama_folder), families=[str(llama_folder), str(gpt2_folder)], corpus=str(text_folder), n_samples=2,
        n_tokens=20, lengths=[9, 40], threads=[1, 2], dtypes=["float32", "bfloat16"], n_prefill=12, n_context=6,
            n_steps=2,
    )


@pytest.fixture(scope="module")
def ways(settings):
    return paths.EXPERIMENT.run(settings)


@pytest.fixture(scope="module")
def ladder(settings):
    return exact_ladder.EXPERIMENT.run(settings)


@pytest.fixture(scope="module")
def cost(settings, llama, monkeypatch_module):
    # The true shape takes seconds to build, and only its time is of interest.
    monkeypatch_module.setattr(exact_cost, "_blank", lambda _settings: llama)
    return exact_cost.EXPERIMENT.run(settings)


@pytest.fixture(scope="module")
def long_texts(settings):
    return lengths.EXPERIMENT.run(settings.model_copy(update={"n_samples": 4}))


@pytest.fixture(scope="module")
def results(ways, ladder, cost, long_texts):
    runs = {"exact_ways": ways, "exact_ladder": ladder, "exact_cost": cost, "exact_lengths": long_texts}
    return found_in.of_runs("exact_caches", runs)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_way_is_measured_under_both_arithmetics(ways):
    assert not ways.rows.duplicated(["model", "dtype", "sample", "arithmetic", "way"]).any()
    assert len(ways.rows) == 2 * 2 * 2 * 2 * 7
    assert ways.rows.loc[ways.rows["way"] == SINGLE, "rows"].eq(20).all()
    assert ways.rows.loc[ways.rows["way"] == "generate", "rows"].eq(10).all()


def test_under_the_switch_all_rows_of_all_ways_are_equal(ways):
    exact = ways.rows[ways.rows["arithmetic"] == EXACT]
    assert (exact["equal_rows"] == exact["rows"]).all()
    assert (exact["max_abs"] == 0).all()


def test_published_rows_of_the_real_model_reach_from_17_to_2049_tokens_in_every_dtype_on_one_thread_and_on_two():
    rows = found_in.printed("exact_caches")["exact_lengths"]
    assert set(rows["model"]) == {"SmolLM2-135M-Instruct"}
    longest = rows[rows["n_tokens"] == 2049]
    assert rows["n_tokens"].min() == 17
    assert set(zip(longest["dtype"], longest["threads"], strict=True)) == {
        (dtype, threads) for dtype in ("float32", "float16", "bfloat16") for threads in (1, 2)
    }


def test_the_chunks_make_up_the_text_and_generate_writes_it(llama, ids):
    assert sum(paths.chunks(ids.shape[1])) == ids.shape[1]
    with torch.inference_mode():
        full = llama(ids).logits[0]
        found = dict(paths.ways(llama, ids))
    for way, logits in found.items():
        reference = full[:-1][-len(logits) :] if way == "generate" else full
        assert torch.allclose(logits, reference, atol=1e-4), way


def test_a_row_that_differs_in_one_bit_is_counted():
    reference = torch.randn(4, 9)
    other = reference.clone()
    other[2, 3] = torch.nextafter(other[2, 3], torch.tensor(9.0))
    found = paths.against(reference, other)
    assert (found["rows"], found["equal_rows"]) == (4, 3)
    assert 0 < found["max_abs"] < 1e-6


@pytest.mark.parametrize("length", [2, 17, 300, 2049])
def test_uneven_chunks_make_up_a_text_of_any_length_wherever_they_begin(length):
    cuts = [lengths.uneven(length, first) for first in range(len(lengths.CHUNKS))]
    assert {sum(sizes) for sizes in cuts} == {length}
    assert all(max(sizes) < length for sizes in cuts)
    assert set(lengths.CHUNKS) <= set().union(*cuts) or length < max(lengths.CHUNKS)


def test_every_length_is_fed_on_every_number_of_threads_and_no_row_differs_under_the_switch(long_texts):
    rows = long_texts.rows
    assert set(zip(rows["n_tokens"], rows["threads"], strict=True)) == {(9, 1), (40, 1), (9, 2), (40, 2)}
    assert (rows["rows"] == rows["n_tokens"]).all()
    exact = rows[rows["arithmetic"] == EXACT]
    assert len(exact) == 2 * 4 * 3
    assert (exact["equal_rows"] == exact["rows"]).all()


def test_one_row_of_one_chunk_that_differs_in_one_bit_is_counted(llama, ids):
    sizes = lengths.uneven(ids.shape[1], 0)
    cache = lambda: DynamicCache(config=llama.config)  # noqa: E731
    with torch.inference_mode():
        full = fed(llama, ids, sizes, cache())
        assert lengths._fed_against(full, llama, ids, sizes, cache())["equal_rows"] == ids.shape[1]
        full[-2, 3] = torch.nextafter(full[-2, 3], torch.tensor(99.0))
        found = lengths._fed_against(full, llama, ids, sizes, cache())
    assert (found["rows"], found["equal_rows"]) == (ids.shape[1], ids.shape[1] - 1)
    assert 0 < found["max_abs"] < 1e-6


def test_every_rung_is_measured_and_the_last_one_is_exact(results):
    table = results["rungs"]
    assert tuple(dict.fromkeys(table["rung"])) == tuple(exact_ladder.RUNGS) == RUNGS
    assert (table.loc[table["rung"] == ALL, "share"] == 1).all()
    assert (table["error"] > 0).all()


def test_the_errors_of_the_full_pass_and_of_the_steps_are_told_apart(llama, ids, monkeypatch):
    with torch.inference_mode():
        true = llama(ids, use_cache=False).logits[0].double()
    sound = exact_ladder._score(llama, None, ids, true)
    fed = exact_ladder.fed
    monkeypatch.setattr(exact_ladder, "fed", lambda *arguments: fed(*arguments) + 1.0)
    harmed = exact_ladder._score(llama, None, ids, true)
    assert harmed["error_rms"] == sound["error_rms"] < 1e-3
    assert sound["step_error_rms"] < 1e-3 < harmed["step_error_rms"]


def of_decode(results, rows):
    price = measures.PRICE.where(phase="decode")
    return [one.estimate for one in price(with_rows(results, exact_cost=rows))]


def test_ratios_of_time_are_the_switch_over_stock(results, cost):
    halved = cost.rows.copy()
    halved.loc[halved["arithmetic"] == STOCK, ["prefill_s", "decode_s"]] = 2.0
    halved.loc[halved["arithmetic"] == EXACT, ["prefill_s", "decode_s"]] = 1.0
    assert of_decode(results, halved) == [fits.Estimate(0.5, 0.5, 0.5)]


def test_of_few_repeats_or_files_the_lowest_and_highest_are_given(results, cost, ladder):
    few, stock = cost.rows[cost.rows["repeat"] < 3].copy(), cost.rows["arithmetic"] == STOCK
    few["decode_s"] = few["repeat"].map({0: 1.0, 1: 2.0, 2: 5.0}).where(~stock, 1.0)
    assert of_decode(results, few) == [fits.Estimate(2.0, 1.0, 5.0, "range")]
    rows = ladder.rows[ladder.rows["dtype"] == "float32"].copy()
    rows["source"], rows["error_rms"] = rows["sample"], 1.0
    rows.loc[rows["rung"] == ALL, "error_rms"] = rows["sample"] + 1.0
    (error,) = measures.ERROR(with_rows(results, exact_ladder=rows))
    assert error.estimate == fits.Estimate(1.5, 1.0, 2.0, "range")


def test_the_timed_prefill_scores_the_last_token_from_a_copy_of_its_row(llama, ids, monkeypatch):
    strides = []
    monkeypatch.setattr(
        llama.lm_head, "forward", lambda x, own=llama.lm_head.forward: strides.append(x.stride()) or own(x)
    )
    with torch.inference_mode():
        found = exact_cost.prefill(llama, ids)
        torch.testing.assert_close(found, llama(ids, logits_to_keep=1).logits)
    assert strides[0] == (32, 32, 1)


@pytest.mark.parametrize(
    "change", [{"families": ["nosuch"]}, {"n_tokens": 60}, {"device": "cuda:99"}, {"n_samples": 9}]
)
def test_settings_that_cannot_be_run_are_refused_in_one_line_and_leave_nothing(settings, change, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    refused = ExactCachesSettings.checked(**settings.model_dump() | change)
    for experiment in (paths.EXPERIMENT, *([] if "families" in change else [exact_ladder.EXPERIMENT])):
        with pytest.raises(UserError) as error:
            experiment.run(refused)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError):
        ExactCachesSettings.checked(dtypes=["float64"])


def test_figures_and_tables_are_made_of_the_rows(results):
    shares, rungs = results["shares"], results["rungs"]
    assert len(figures.figure_ways(shares).axes) == 2
    assert len(figures.figure_ways(shares, book=shares).axes) == 2
    assert len(figures.figure_ladder(rungs).axes) == 2
    shown = tables.ways(shares)
    assert list(shown["fed"]) == list(dict.fromkeys(shares["way"]))
    assert (shown["row-invariant, fp32"].iloc[0], shown["row-invariant, fp32"].iloc[-1]) == ("40 of 40", "20 of 20")
    assert tables.cost(results)["phase"].tolist() == ["prefill", "decode"]
    assert tables.ladder(rungs)["identical rows"].iloc[5] == "40 of 40"
    by_length = tables.lengths(results["lengths"])
    assert by_length["tokens"].tolist() == [9, 40]
    # Two texts in two dtypes, each fed in three ways.
    assert by_length["row-invariant, all dtypes"].tolist() == ["108 of 108", "480 of 480"]
    assert by_length["texts"].tolist() == [2, 2]


@pytest.mark.parametrize(("share", "written"), [(0.0, "0"), (0.1, "<1"), (99.9, ">99"), (100.0, "100"), (40.4, "40")])
def test_some_rows_are_not_rounded_to_none_and_most_not_to_all(share, written):
    assert figures._whole(share) == written


# Statements


@pytest.fixture(scope="module")
def lawful(results):
    """Rows that bear out every statement, of forty files."""
    ways, rungs, long_texts = (
        pd.concat(
            [results[name].assign(source=lambda r, k=k: r["source"] + str(k)) for k in range(20)], ignore_index=True
        )
        for name in ("exact_ways", "exact_ladder", "exact_lengths")
    )
    long_texts = long_texts.assign(sample=long_texts["source"] + long_texts["sample"].astype(str))
    of_stock = long_texts["arithmetic"] == STOCK
    long_texts = long_texts.assign(equal_rows=long_texts["rows"].where(~of_stock, 0))
    stock = (ways["arithmetic"] == STOCK) & (ways["dtype"] == "float32")
    ways = ways.assign(equal_rows=ways["rows"].where(~stock, 0))
    alone = rungs["rung"].isin([ATTENTION, PRODUCTS])
    rungs = rungs.assign(equal_rows=rungs["rows"].where(~alone, 0), error_rms=1.0, step_error_rms=1.0)
    fp32 = (rungs["rung"] == ALL) & (rungs["dtype"] == "float32")
    rungs.loc[fp32, "error_rms"] = 0.8
    first = results["exact_cost"].query("repeat == repeat.min()")
    seconds = first["arithmetic"].map({STOCK: 1.0, EXACT: 1.1})
    cost = pd.concat(
        [first.assign(repeat=k, source=k, sample=k, prefill_s=seconds, decode_s=seconds) for k in range(6)]
    )
    return with_rows(results, exact_ways=ways, exact_ladder=rungs, exact_cost=cost, exact_lengths=long_texts)


def outcome(results, name):
    return statements.check(measures.STATEMENTS[name], results).outcome


# Which run, which rows of it, and what is planted there.
CONTRARY = {
    "no-row-differs": ("exact_ways", lambda r: r["arithmetic"] == EXACT, {"equal_rows": 0}),
    "no-row-differs-at-length": ("exact_lengths", lambda r: r["arithmetic"] == EXACT, {"equal_rows": 0}),
    "stock-differs-at-length": ("exact_lengths", lambda r: r["n_tokens"] > 0, {"equal_rows": 40, "rows": 40}),
    "stock-differs-in-fp32": ("exact_ways", lambda r: r["arithmetic"] == STOCK, {"equal_rows": 20}),
    "products-alone-are-not-enough": ("exact_ladder", lambda r: r["rung"] == PRODUCTS, {"equal_rows": 20}),
    "attention-alone-is-not-enough-in-fp32": ("exact_ladder", lambda r: r["rung"] == ATTENTION, {"equal_rows": 20}),
    "attention-alone-is-enough-in-bf16": ("exact_ladder", lambda r: r["rung"] == ATTENTION, {"equal_rows": 0}),
    "attention-alone-is-not-enough-on-amd": ("exact_ladder", lambda r: r["rung"] == ATTENTION, {"equal_rows": 20}),
    "products-and-attention-are-enough": ("exact_ladder", lambda r: r["rung"] == BOTH, {"equal_rows": 0}),
    "price-is-small": ("exact_cost", lambda r: r["arithmetic"] == EXACT, {"decode_s": 3.0}),
    "error-is-no-larger": ("exact_ladder", lambda r: r["rung"] == ALL, {"error_rms": 1.2}),
    "error-of-steps-is-no-larger": ("exact_ladder", lambda r: r["rung"] == ALL, {"step_error_rms": 1.2}),
    "error-in-fp32-is-smaller": ("exact_ladder", lambda r: r["rung"] == ALL, {"error_rms": 1.2}),
}
# Of statements on one processor: which, and rows of the ladder that bear them out.
ON_ONE = {
    "attention-alone-is-enough-in-bf16": ("Intel Xeon", lambda r: r["rung"] == ATTENTION, {"equal_rows": 20}),
    "attention-alone-is-not-enough-on-amd": ("AMD EPYC", lambda r: r["rung"] == ATTENTION, {"equal_rows": 0}),
}


def planted(found, which, where, values):
    """Give what was found with other values in some rows of a run."""
    rows = found[which].copy()
    rows.loc[where(rows), list(values)] = list(values.values())
    return with_rows(found, **{which: rows})


def lawful_for(name, lawful, processor=None):
    """Change the lawful rows to those of the processor that a statement speaks of, and to what it says of it."""
    if name not in ON_ONE:
        return lawful
    its_own, where, values = ON_ONE[name]
    return on_processor(processor or its_own, planted(lawful, "exact_ladder", where, values))


@pytest.mark.parametrize("name", measures.STATEMENTS)
def test_a_statement_holds_on_rows_that_follow_it_and_fails_on_those_that_do_not(lawful, name):
    lawful = lawful_for(name, lawful)
    assert outcome(lawful, name) == "holds"
    assert outcome(planted(lawful, *CONTRARY[name]), name) == "fails"


@pytest.mark.parametrize("name", ON_ONE)
def test_a_statement_on_one_processor_says_nothing_of_another(lawful, name):
    assert outcome(lawful_for(name, lawful, "another"), name) == "not run"


@pytest.mark.parametrize(
    ("which", "name"), [("exact_ways", "no-row-differs"), ("exact_lengths", "no-row-differs-at-length")]
)
def test_a_single_differing_row_is_seen(lawful, which, name):
    rows = lawful[which].copy()
    rows.loc[rows[rows["arithmetic"] == EXACT].index[-1], "equal_rows"] -= 1
    assert outcome(with_rows(lawful, **{which: rows}), name) == "fails"


def number(role, found):
    return written(role, named(measures), found)


def test_rows_of_the_real_model_are_counted_apart_from_the_stand_ins(results):
    # Two texts of 20 tokens in two dtypes; six ways score all rows, and `generate` half of them.
    assert number("EXACT_ROWS count", results) == number("EXACT_ROWS_OF_OTHERS count", results) == "520 of 520"
    assert number("EXACT_ROWS_AT_LENGTH count", results) == "588 of 588"
    # Control: a row of a stand-in that differs is no row of the real model.
    rows = results["exact_ways"].copy()
    rows.loc[rows[rows["arithmetic"] == EXACT].index[-1], "equal_rows"] -= 1
    fewer = with_rows(results, exact_ways=rows)
    assert number("EXACT_ROWS count", fewer) == "520 of 520"
    assert number("EXACT_ROWS_OF_OTHERS count", fewer) == "519 of 520"
