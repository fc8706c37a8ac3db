"""The chapter on exact caches: its rows are what the ways give, and its words follow the rows."""

import re

import pytest
import torch
from planted import changed
from quoted import quoted

from kvbook import paths as folders
from kvbook.errors import UserError
from kvbook.measuring import estimates as fits
from kvreport.chapters.exact_caches import cost as exact_cost
from kvreport.chapters.exact_caches import figures, paths, tables, words
from kvreport.chapters.exact_caches import ladder as exact_ladder
from kvreport.chapters.exact_caches.results import Results
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.publishing import citation, wording


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return ExactCachesSettings.checked(
        model=str(llama_folder), families=[str(llama_folder), str(gpt2_folder)], corpus=str(text_folder), n_samples=2,
        n_tokens=20, dtypes=["float32", "bfloat16"], n_prefill=12, n_context=6, n_steps=2,
    )  # fmt: skip


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
def results(ways, ladder, cost):
    return Results(ways, ladder, cost)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_way_is_measured_under_both_arithmetics(ways):
    assert not ways.rows.duplicated(["model", "dtype", "sample", "arithmetic", "way"]).any()
    assert len(ways.rows) == 2 * 2 * 2 * 2 * 7
    assert ways.rows.loc[ways.rows["way"] == "token by token", "rows"].eq(20).all()
    assert ways.rows.loc[ways.rows["way"] == "generate", "rows"].eq(10).all()


def test_under_the_switch_all_rows_of_all_ways_are_equal(ways):
    exact = ways.rows[ways.rows["arithmetic"] == paths.EXACT]
    assert (exact["equal_rows"] == exact["rows"]).all()
    assert (exact["max_abs"] == 0).all()


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


def test_every_rung_is_measured_and_the_last_one_is_exact(ladder):
    table = tables.ladder_table(ladder.rows)
    assert list(dict.fromkeys(table["rung"])) == list(exact_ladder.RUNGS)
    assert (table.loc[table["rung"] == "all", "share"] == 1).all()
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


def test_ratios_of_time_are_the_switch_over_stock(cost):
    halved = cost.rows.copy()
    halved.loc[halved["arithmetic"] == paths.STOCK, ["prefill_s", "decode_s"]] = 2.0
    halved.loc[halved["arithmetic"] == paths.EXACT, ["prefill_s", "decode_s"]] = 1.0
    assert tables.costs(halved)["decode"] == fits.Estimate(0.5, 0.5, 0.5)


def test_of_few_repeats_or_files_the_lowest_and_highest_are_given(cost, ladder):
    few, stock = cost.rows[cost.rows["repeat"] < 3].copy(), cost.rows["arithmetic"] == paths.STOCK
    few["decode_s"] = few["repeat"].map({0: 1.0, 1: 2.0, 2: 5.0}).where(~stock, 1.0)
    assert tables.costs(few)["decode"] == fits.Estimate(2.0, 1.0, 5.0, "range")
    assert wording.brackets(few, "repeat") == "lowest to highest of 3 repeats"
    assert wording.brackets(cost.rows, "repeat") == "95 % interval (bootstrap over 6 repeats)"
    rows = ladder.rows[ladder.rows["dtype"] == "float32"].copy()
    rows["source"], rows["error_rms"] = rows["sample"], 1.0
    rows.loc[rows["rung"] == "all", "error_rms"] = rows["sample"] + 1.0
    assert tables.error_ratios(rows, "error_rms")["ratio"].tolist() == [fits.Estimate(1.5, 1.0, 2.0, "range")]


def test_the_timed_prefill_scores_the_last_token_from_a_copy_of_its_row(llama, ids, monkeypatch):
    strides = []
    monkeypatch.setattr(
        llama.lm_head, "forward", lambda x, own=llama.lm_head.forward: strides.append(x.stride()) or own(x)
    )
    with torch.inference_mode():
        found = exact_cost.prefill(llama, ids)
        torch.testing.assert_close(found, llama(ids, logits_to_keep=1).logits)
    assert strides[0] == (32, 32, 1)


def verdicts(results):
    return dict(results.promises[["promise", "verdict"]].to_numpy())


def test_a_single_differing_bit_breaks_the_promise(results):
    lawful = results.ways.rows.copy()
    stock = lawful["arithmetic"] == paths.STOCK
    # Whether models this small drift depends on the processor.
    lawful.loc[stock, "equal_rows"] = 0
    first, control, *_ = verdicts(changed(results, ways=lawful)).values()
    assert (first, control) == ("kept", "kept")
    broken = lawful.copy()
    broken.loc[broken[~stock].index[-1], "equal_rows"] -= 1
    assert next(iter(verdicts(changed(results, ways=broken)).values())) == "broken"
    harmless = lawful.assign(equal_rows=lawful["rows"])
    assert list(verdicts(changed(results, ways=harmless)).values())[1] == "broken"


def test_slow_rows_break_the_promise_of_speed_and_fast_ones_keep_it(results):
    rows = results.cost.rows.copy()
    for seconds, word in ((1.0, "kept"), (3.0, "broken")):
        rows.loc[rows["arithmetic"] == paths.STOCK, ["prefill_s", "decode_s"]] = 1.0
        rows.loc[rows["arithmetic"] == paths.EXACT, ["prefill_s", "decode_s"]] = seconds
        assert list(verdicts(changed(results, cost=rows)).values())[-2:] == [word, word]


def test_words_and_figures_come_from_the_rows(results):
    said, rows = words.numbers(results), results.ways.rows
    assert said["models"] == "2"
    assert said["n_ways"] == "7"
    assert said["stop_in_short"] == "On a CPU, yes."
    assert words._stopped("cuda:1") == "On a GPU, yes."
    assert said["stock_steps"].endswith(f" of {2 * 2 * 2 * 20}")
    assert results.promises["promise"].str.contains("decode in bf16 takes at most").any()
    none_equal = words.numbers(changed(results, ways=rows.assign(equal_rows=0)))
    assert none_equal["stop_in_short"] == "Not everywhere."
    assert none_equal["stock_exact_ways"] == "none"
    all_stock = words.numbers(changed(results, ways=rows.assign(equal_rows=rows["rows"])))
    assert "generate" in all_stock["stock_exact_ways"]
    assert said["exact_rows"].startswith("1,") or "of" in said["exact_rows"]
    captions = words.captions(results)
    assert all("torch" in caption["caption"] for caption in captions.values())
    assert len(figures.figure_ways(results.shares).axes) == 2
    assert len(figures.figure_ladder(results.rungs).axes) == 2
    assert tables.ways_table(results.shares)["largest difference"].max() == rows["max_abs"].max()


def test_every_computed_number_is_quoted_and_every_quoted_one_computed(results):
    assert set(words.numbers(results)) == quoted("07_exact_caches")


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


def test_the_caption_says_all_rows_only_where_all_rows_are_equal(results):
    rows = results.ways.rows
    stock = rows["arithmetic"] == paths.STOCK
    equal = rows.assign(equal_rows=rows["rows"].where(~stock, 0))

    def found(rows):
        return words._ways_found(changed(results, ways=rows))

    assert re.match(
        r"Under the switch all [\d,]+ rows .* stock's steps, by model, 0% in fp32 and bf16\.$", found(equal)
    )
    one = equal["model"] == equal["model"].iloc[0]
    by_model = equal.assign(equal_rows=equal["rows"].where(~stock | one, 0))
    assert found(by_model).endswith("by model, 0% to 100% in fp32 and bf16.")
    broken = equal.copy()
    broken.loc[broken[~stock].index[-1], "equal_rows"] -= 1
    assert found(broken).startswith("Under the switch not all, but ")


def test_the_caption_names_the_fewest_parts_that_make_all_rows_equal_or_none(results):
    all_equal = results.ladder.rows.assign(equal_rows=results.ladder.rows["rows"])

    def found(*equal):
        rows = all_equal["rows"].where(all_equal["rung"].isin(equal), 0)
        return words._ladder_found(changed(results, ladder=all_equal.assign(equal_rows=rows)))

    assert "Equal bits take “stock” in fp32 and bf16. The switch" in found(*exact_ladder.RUNGS)
    assert "Equal bits take “attention” in fp32 and bf16. The switch" in found("all", "attention")
    assert "take “all” in fp32 and bf16; “stock, eager” has them in fp32 and bf16 too. The" in found(
        "all", "stock, eager"
    )
    assert "Equal bits take “all” in fp32 and bf16. The switch" in found("all")
    assert "nothing tried in fp32 and bf16. The switch" in found()
    worse = all_equal.assign(error_rms=all_equal["error_rms"].where(all_equal["rung"] != "stock", 1e-30))
    assert "error is 1.00 of stock's" not in words._ladder_found(changed(results, ladder=worse))


def test_every_figure_begins_with_a_finding_that_a_title_can_hold(results):
    for name, said in words.captions(results).items():
        if name.startswith("fig-"):
            assert not citation.first_sentence(said["caption"]).endswith("…"), name
