"""The chapter on exact caches: its rows are what the ways give, and its words follow the rows."""

import re

import pytest
import torch

from kvbook.errors import UserError
from kvbook.measuring import estimates as fits
from kvreport.chapters.exact_caches import cost as exact_cost
from kvreport.chapters.exact_caches import figures
from kvreport.chapters.exact_caches import ladder as exact_ladder
from kvreport.chapters.exact_caches import paths as exact_ways
from kvreport.chapters.exact_caches import tables as analysis
from kvreport.chapters.exact_caches import words as text
from kvreport.chapters.exact_caches.settings import ExactCachesSettings
from kvreport.publishing import citation


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return ExactCachesSettings.checked(
        model=str(llama_folder), families=[str(llama_folder), str(gpt2_folder)], corpus=str(text_folder), n_samples=2,
        n_tokens=20, dtypes=["float32", "bfloat16"], n_prefill=12, n_context=6, n_steps=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ways(settings):
    return exact_ways.run(settings)


@pytest.fixture(scope="module")
def ladder(settings):
    return exact_ladder.run(settings)


@pytest.fixture(scope="module")
def cost(settings, llama, monkeypatch_module):
    # The true shape takes seconds to build, and only its time is of interest.
    monkeypatch_module.setattr(exact_cost, "_blank", lambda _settings: llama)
    return exact_cost.run(settings)


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
    exact = ways.rows[ways.rows["arithmetic"] == exact_ways.EXACT]
    assert (exact["equal_rows"] == exact["rows"]).all()
    assert (exact["max_abs"] == 0).all()


def test_the_chunks_make_up_the_text_and_generate_writes_it(llama, ids):
    assert sum(exact_ways.chunks(ids.shape[1])) == ids.shape[1]
    with torch.inference_mode():
        full = llama(ids).logits[0]
        found = dict(exact_ways.ways(llama, ids))
    for way, logits in found.items():
        reference = full[:-1][-len(logits) :] if way == "generate" else full
        assert torch.allclose(logits, reference, atol=1e-4), way


def test_a_row_that_differs_in_one_bit_is_counted():
    reference = torch.randn(4, 9)
    other = reference.clone()
    other[2, 3] = torch.nextafter(other[2, 3], torch.tensor(9.0))
    found = exact_ways.against(reference, other)
    assert (found["rows"], found["equal_rows"]) == (4, 3)
    assert 0 < found["max_abs"] < 1e-6


def test_every_rung_is_measured_and_the_last_one_is_exact(ladder):
    table = analysis.ladder_table(ladder.rows)
    assert list(dict.fromkeys(table["rung"])) == list(exact_ladder.RUNGS)
    assert (table.loc[table["rung"] == "all", "share"] == 1).all()
    assert (table["error"] > 0).all()


def test_the_errors_of_the_full_pass_and_of_the_steps_are_told_apart(llama, ids, monkeypatch):
    with torch.inference_mode():
        true = llama(ids, use_cache=False).logits[0].double()
    sound = exact_ladder._score(llama, None, ids, true)
    fed = exact_ways.fed
    monkeypatch.setattr(exact_ways, "fed", lambda *arguments: fed(*arguments) + 1.0)
    harmed = exact_ladder._score(llama, None, ids, true)
    assert harmed["error_rms"] == sound["error_rms"] < 1e-3
    assert sound["step_error_rms"] < 1e-3 < harmed["step_error_rms"]


def test_ratios_of_time_are_the_switch_over_stock(cost):
    halved = cost.rows.copy()
    halved.loc[halved["arithmetic"] == exact_ways.STOCK, ["prefill_s", "decode_s"]] = 2.0
    halved.loc[halved["arithmetic"] == exact_ways.EXACT, ["prefill_s", "decode_s"]] = 1.0
    assert analysis.costs(halved)["decode"] == fits.Estimate(0.5, 0.5, 0.5)


def test_of_few_repeats_or_files_the_lowest_and_highest_are_given(cost, ladder):
    few, stock = cost.rows[cost.rows["repeat"] < 3].copy(), cost.rows["arithmetic"] == exact_ways.STOCK
    few["decode_s"] = few["repeat"].map({0: 1.0, 1: 2.0, 2: 5.0}).where(~stock, 1.0)
    assert analysis.costs(few)["decode"] == fits.Estimate(2.0, 1.0, 5.0)
    assert text.brackets(few, "repeat") == "lowest to highest of 3 repeats"
    assert text.brackets(cost.rows, "repeat") == "95 % interval (bootstrap over 6 repeats)"
    rows = ladder.rows[ladder.rows["dtype"] == "float32"].copy()
    rows["source"], rows["error_rms"] = rows["sample"], 1.0
    rows.loc[rows["rung"] == "all", "error_rms"] = rows["sample"] + 1.0
    assert analysis.error_ratios(rows)["ratio"].tolist() == [fits.Estimate(1.5, 1.0, 2.0)]


def test_the_timed_prefill_scores_the_last_token_from_a_copy_of_its_row(llama, ids, monkeypatch):
    strides = []
    monkeypatch.setattr(
        llama.lm_head, "forward", lambda x, own=llama.lm_head.forward: strides.append(x.stride()) or own(x)
    )
    with torch.inference_mode():
        found = exact_cost.prefill(llama, ids)
        torch.testing.assert_close(found, llama(ids, logits_to_keep=1).logits)
    assert strides[0] == (32, 32, 1)


def verdicts(ways, ladder, cost):
    return dict(analysis.promises(ways, ladder, cost, "bfloat16")[["promise", "verdict"]].to_numpy())


def test_a_single_differing_bit_breaks_the_promise(ways, ladder, cost):
    lawful = ways.rows.copy()
    stock = lawful["arithmetic"] == exact_ways.STOCK
    # Whether models this small drift depends on the processor.
    lawful.loc[stock, "equal_rows"] = 0
    first, control, *_ = verdicts(lawful, ladder.rows, cost.rows).values()
    assert (first, control) == ("kept", "kept")
    broken = lawful.copy()
    broken.loc[broken[~stock].index[-1], "equal_rows"] -= 1
    assert next(iter(verdicts(broken, ladder.rows, cost.rows).values())) == "broken"
    harmless = lawful.assign(equal_rows=lawful["rows"])
    assert list(verdicts(harmless, ladder.rows, cost.rows).values())[1] == "broken"


def test_slow_rows_break_the_promise_of_speed_and_fast_ones_keep_it(ways, ladder, cost):
    rows = cost.rows.copy()
    for seconds, word in ((1.0, "kept"), (3.0, "broken")):
        rows.loc[rows["arithmetic"] == exact_ways.STOCK, ["prefill_s", "decode_s"]] = 1.0
        rows.loc[rows["arithmetic"] == exact_ways.EXACT, ["prefill_s", "decode_s"]] = seconds
        assert list(verdicts(ways.rows, ladder.rows, rows).values())[-2:] == [word, word]


def test_words_and_figures_come_from_the_rows(ways, ladder, cost):
    said = text.numbers(ways.rows, ladder.rows, cost)
    assert said["models"] == "2"
    assert said["n_ways"] == "7"
    assert said["stop_in_short"] == "On a CPU, yes."
    assert text._stopped("cuda:1") == "On a GPU, yes."
    assert said["stock_steps"].endswith(f" of {2 * 2 * 2 * 20}")
    assert re.fullmatch(r"\d+\.\d", said["fp32_step_cost"])
    no_fp32 = ladder.rows[ladder.rows["dtype"] != "float32"]
    assert text.numbers(ways.rows, no_fp32, cost)["fp32_step_cost"] == "not measured"
    promised = analysis.promises(ways.rows, ladder.rows, cost.rows, "bfloat16")["promise"]
    assert promised.str.contains("decode in bf16 takes at most").any()
    assert text.numbers(ways.rows.assign(equal_rows=0), ladder.rows, cost)["stop_in_short"] == "Not everywhere."
    all_stock = ways.rows.assign(equal_rows=ways.rows["rows"])
    assert "generate" in text.numbers(all_stock, ladder.rows, cost)["stock_exact_ways"]
    assert text.numbers(ways.rows.assign(equal_rows=0), ladder.rows, cost)["stock_exact_ways"] == "none"
    assert said["exact_rows"].startswith("1,") or "of" in said["exact_rows"]
    captions = text.captions(ways, ladder, cost)
    assert all("torch" in caption["caption"] for caption in captions.values())
    assert len(figures.figure_ways(analysis.shares(ways.rows)).axes) == 2
    assert len(figures.figure_ladder(analysis.ladder_table(ladder.rows)).axes) == 2


@pytest.mark.parametrize(
    "change", [{"families": ["nosuch"]}, {"n_tokens": 60}, {"device": "cuda:99"}, {"n_samples": 9}]
)
def test_settings_that_cannot_be_run_are_refused_in_one_line(settings, change):
    with pytest.raises(UserError) as error:
        exact_ways.run(ExactCachesSettings.checked(**settings.model_dump() | change))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        ExactCachesSettings.checked(dtypes=["float64"])


def test_the_caption_says_all_rows_only_where_all_rows_are_equal(ways):
    stock = ways.rows["arithmetic"] == exact_ways.STOCK
    equal = ways.rows.assign(equal_rows=ways.rows["rows"].where(~stock, 0))
    assert re.match(
        r"Under the switch all [\d,]+ rows .* stock's steps, by model, 0% in fp32 and bf16\.$", text._ways_found(equal)
    )
    one = equal["model"] == equal["model"].iloc[0]
    by_model = equal.assign(equal_rows=equal["rows"].where(~stock | one, 0))
    assert text._ways_found(by_model).endswith("by model, 0% to 100% in fp32 and bf16.")
    broken = equal.copy()
    broken.loc[broken[~stock].index[-1], "equal_rows"] -= 1
    assert text._ways_found(broken).startswith("Under the switch not all, but ")


def test_the_caption_names_the_fewest_parts_that_make_all_rows_equal_or_none(ladder):
    all_equal = ladder.rows.assign(equal_rows=ladder.rows["rows"])
    assert "Equal bits take “stock” in fp32 and bf16. The switch" in text._ladder_found(all_equal)
    some = all_equal.assign(equal_rows=all_equal["rows"].where(all_equal["rung"].isin(["all", "attention"]), 0))
    assert "Equal bits take “attention” in fp32 and bf16. The switch" in text._ladder_found(some)
    eager = all_equal.assign(equal_rows=all_equal["rows"].where(all_equal["rung"].isin(["all", "stock, eager"]), 0))
    assert "take “all” in fp32 and bf16; “stock, eager” has them in fp32 and bf16 too. The" in text._ladder_found(eager)
    only_last = all_equal.assign(equal_rows=all_equal["rows"].where(all_equal["rung"] == "all", 0))
    assert "Equal bits take “all” in fp32 and bf16. The switch" in text._ladder_found(only_last)
    assert "nothing tried in fp32 and bf16. The switch" in text._ladder_found(all_equal.assign(equal_rows=0))
    worse = all_equal.assign(error_rms=all_equal["error_rms"].where(all_equal["rung"] != "stock", 1e-30))
    assert "error is 1.00 of stock's" not in text._ladder_found(worse)


def test_every_figure_begins_with_a_finding_that_a_title_can_hold(ways, ladder, cost):
    for name, said in text.captions(ways, ladder, cost).items():
        if name.startswith("fig-"):
            assert not citation.first_sentence(said["caption"]).endswith("…"), name
