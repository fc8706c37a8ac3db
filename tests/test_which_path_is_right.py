"""The chapter on which path is right: its reference is one, its statistics tell a side from none, its verdicts turn."""

import numpy as np
import pandas as pd
import pytest
import torch
from planted import run_of, with_rows

from kvbook.errors import UserError
from kvbook.measuring import estimates as fits
from kvbook.measuring import fp64_reference as truth
from kvbook.measuring.estimates import flat
from kvbook.measuring.in_fp64 import widened
from kvbook.models import loading
from kvreport.chapters.which_path_is_right import figures, measures, path_errors, rows, tables
from kvreport.chapters.which_path_is_right.settings import WhichPathSettings
from kvreport.publishing import found as found_in
from kvreport.publishing import statements
from kvreport.publishing import verdicts as ledger
from kvreport.publishing.found import Found
from kvreport.site import ledger as site_ledger

NAME = "which_path_is_right"
CHAPTER = f"03_{NAME}"


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return WhichPathSettings.checked(
        model=str(llama_folder), families=[str(gpt2_folder)], corpus=str(text_folder), n_samples=4, n_tokens=16,
        dtypes=["float32", "bfloat16"],
    )


@pytest.fixture(scope="module")
def run(settings):
    return path_errors.EXPERIMENT.run(settings)


@pytest.fixture(scope="module")
def results(run):
    """The run with its rows by name, each made once for all tests that only read."""
    return found_in.of_runs(NAME, {"path_errors": run})


# The reference


def test_the_references_two_paths_differ_by_fp64_rounding_alone(llama, ids):
    reference = truth.in_double_precision(llama)
    with torch.inference_mode(), widened(torch.float64):
        full = path_errors.at_once(reference, ids, 8)
        single, _ = path_errors.token_by_token(reference, ids, 8)
    assert full.hidden.dtype == torch.float64
    assert (truth.errors(full.logits, single.logits, single.logits).first < 1e-13).all()


def test_control_a_llama_that_is_merely_loaded_in_fp64_rounds_to_fp32_inside(llama, ids):
    reference = truth.in_double_precision(llama)
    with torch.inference_mode():
        as_loaded = path_errors.at_once(reference, ids, 8)
        with widened(torch.float64):
            true = path_errors.at_once(reference, ids, 8)
    assert (truth.errors(true.logits, as_loaded.logits, as_loaded.logits).first > 1e-9).all()


def test_the_reference_has_the_weights_of_the_dtype_under_test_and_leaves_the_model_alone(llama_folder):
    model = loading.load(str(llama_folder), dtype="bfloat16").model
    reference = truth.in_double_precision(model)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(reference.get_parameter(name), weight.double())


def answers_of(folder, dtypes):
    """Ask for the answer to one text in each dtype; gives the answers and how often one was computed."""
    reference, computed = truth.Reference(dtypes), []

    def answer(model):
        computed.append(model)
        return (model.get_output_embeddings().weight.clone(),)

    found = []
    for dtype in dtypes:
        reference.take(loading.load(str(folder), dtype=dtype).model)
        found.append(reference.of("text", answer)[0])
    return found, len(computed)


def test_dtypes_that_hold_the_same_weights_share_an_answer_and_others_do_not(llama_folder, tmp_path):
    dtypes = ["float64", "float32", "bfloat16"]
    # Its weights are numbers of fp32.
    found, computed = answers_of(llama_folder, dtypes)
    assert computed == 2
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    rounded = loading.load(str(llama_folder), dtype="bfloat16")
    for part in (rounded.model, rounded.tokenizer):
        part.save_pretrained(tmp_path)
    found, computed = answers_of(tmp_path, dtypes)
    assert computed == 1
    assert torch.equal(found[0], loading.load(str(tmp_path)).model.lm_head.weight.double())


def test_answers_beyond_the_limit_are_computed_again(llama_folder, monkeypatch):
    monkeypatch.setattr(truth.Reference, "LIMIT_BYTES", 10)
    assert answers_of(llama_folder, ["float64", "float32"])[1] == 2


def test_two_errors_and_their_angle_give_the_distance_of_the_paths():
    generator = torch.Generator().manual_seed(0)
    true, e, f = (torch.randn(5, 400, dtype=torch.float64, generator=generator) for _ in range(3))
    found = truth.errors(true, true + e, true + 0.5 * f)
    squares = found.first**2 + found.second**2 - 2 * found.correlation * found.first * found.second
    assert torch.allclose(found.apart**2, squares)
    assert found.correlation.abs().max() < 0.2
    pooled = truth.errors(true, true + e, true + 0.5 * f, pooled=True)
    assert pooled.first.item() == pytest.approx(found.first.square().mean().sqrt().item())
    shared = truth.errors(true, true + e, true + 2 * e)
    assert torch.allclose(shared.correlation, torch.ones(5, dtype=torch.float64))
    assert torch.allclose(shared.apart, shared.first)


def test_the_truth_against_itself_is_zero_and_has_no_correlation(llama, ids):
    with torch.inference_mode(), widened(torch.float64):
        true = path_errors.at_once(truth.in_double_precision(llama), ids, 8)
    made = pd.DataFrame(path_errors.rows_of(true, true, true, ids[0, -8:], 16))
    errors = made[made["place"] != "vocabulary"]
    assert (errors[["error", "error_full", "drift"]] == 0).all(axis=None)
    assert errors["correlation"].isna().all()
    assert (made["kl"].dropna() == 0).all()
    assert (made["shift"].dropna() == 0).all()


# The paths


def test_the_cached_path_is_the_uncached_one_but_for_rounding_and_the_planted_fault_is_not(llama, ids):
    with torch.inference_mode():
        full = path_errors.at_once(llama, ids, 8)
        single, cache = path_errors.token_by_token(llama, ids, 8)
        early = path_errors.off_by_one(llama, ids, cache)
    assert torch.allclose(full.hidden, single.hidden, atol=1e-4)
    assert torch.allclose(full.logits, single.logits, atol=1e-4)
    assert (full.last().logits - early.logits).abs().max() > 1e-2


def test_a_model_without_positions_has_no_planted_fault(family_folders, ids):
    model = loading.load(str(family_folders["mpt"])).model
    with torch.inference_mode():
        _, cache = path_errors.token_by_token(model, ids, 8)
        assert path_errors.off_by_one(model, ids, cache) is None


def test_the_attention_of_a_model_is_put_back(llama, ids):
    before = llama.config._attn_implementation
    with path_errors._attention(llama, "eager"):
        assert llama.config._attn_implementation == "eager"
    assert llama.config._attn_implementation == before != "eager"


def test_what_logits_mean_is_what_it_is_written_out():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    reference = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    found = path_errors.outcome(logits, reference, torch.tensor([0, 2]))
    p, q = np.exp([2, 1, 0]) / np.exp([2, 1, 0]).sum(), np.exp([1, 2, 0]) / np.exp([1, 2, 0]).sum()
    assert found["nats"][0].item() == pytest.approx(-np.log(p[0]))
    assert found["kl"].tolist() == pytest.approx([(q * np.log(q / p)).sum(), 0])
    assert found["top1"].tolist() == [0, 1]
    assert found["entropy"][0].item() == pytest.approx(-(p * np.log(p)).sum())


# The rows


def test_every_path_is_held_against_the_reference_at_every_place_once(run):
    keys = ["model", "dtype", "sample", "path", "place", "layer", "position", "token"]
    assert not run.rows.duplicated(keys).any()
    cached = run.rows[run.rows["path"] == rows.CACHED]
    series = cached.groupby(["model", "dtype", "sample"])
    assert len(series) == 2 * 2 * 4
    for _, own in series:
        assert own.loc[own["place"] == "hidden", "layer"].tolist() == list(range(7))
        assert own.loc[own["place"] == "logits", "position"].tolist() == list(range(8, 16))
        assert own.loc[own["place"] == "vocabulary", "token"].is_unique


def test_the_next_tokens_are_those_of_the_text(run, settings):
    from kvbook.models import corpus

    loaded = loading.load(settings.model)
    sample = next(corpus.samples(settings.corpus, loaded.tokenizer, 1, settings.n_tokens + 1))
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([sample.ids])).logits[0]
    own = run.rows.query(
        "model == 'small-llama' and dtype == 'float32' and sample == 0 and place == 'logits' and path == @rows.CACHED"
    )
    last = own.iloc[-1]
    expected = -torch.log_softmax(logits.double(), -1)[int(last["position"]), sample.ids[int(last["position"]) + 1]]
    assert last["nats"] == pytest.approx(expected.item(), abs=1e-5)
    assert last["nats_reference"] == pytest.approx(expected.item(), abs=1e-5)


def test_the_reference_is_far_finer_than_what_it_measures(results):
    table = results["reference"].set_index(["model", "compared with the reference"])["logits"]
    assert len(table) == 8
    for model in table.index.unique("model"):
        assert table[model, rows.CHECK] < 1e-6 * table[model, rows.CACHED]


# The statistics


def results_of(made: pd.DataFrame) -> Found:
    return found_in.of_runs(NAME, {"path_errors": run_of(made, models=STANDINS)})


def series_of(made: pd.DataFrame) -> pd.DataFrame:
    return tables.series(results_of(made))


STANDINS = [{"weights": "stand-in", "parameters": 1}]


def test_a_position_off_by_one_is_significantly_worse_in_every_dtype(results):
    series = tables.series(results)
    planted = series[series["path"] == rows.OFF_BY_ONE]
    assert len(planted) == 4
    assert planted["ratio"].map(lambda e: e.low > 2).all()
    assert planted["closer"].map(lambda e: e.value == 0).all()


def test_swapping_the_two_paths_inverts_the_ratio_and_the_share(results):
    swapped = series_of(results["path_errors"].rename(columns={"error": "error_full", "error_full": "error"}))
    for (_, row), (_, other) in zip(tables.series(results).iterrows(), swapped.iterrows(), strict=True):
        assert other["ratio"].value == pytest.approx(1 / row["ratio"].value)
        assert other["ratio"].low == pytest.approx(1 / row["ratio"].high)
        assert other["closer"].value == pytest.approx(1 - row["closer"].value)
        assert other["apart"].value == pytest.approx(row["apart"].value)


def test_ties_are_no_ones_success(run):
    tied = run.rows.assign(error=run.rows["error_full"])
    series = series_of(tied)
    assert series["closer"].isna().all()
    assert (series["ties"] == series["n"]).all()
    assert series["ratio"].map(lambda e: e.value == pytest.approx(1)).all()
    half = tied[tied["model"] == "small-gpt2"]
    mixed = flat(series_of(pd.concat([run.rows[run.rows["model"] == "small-llama"], half])))
    assert mixed["closer"].isna().sum() == mixed["closer_low"].isna().sum() == 6


def test_the_identity_of_error_and_drift_holds_in_the_pooled_rows(results):
    for table in (results["texts"], results["layers"]):
        known = table[table["correlation"].notna()]
        squares = known["error"] ** 2 + known["error_full"] ** 2
        squares -= 2 * known["correlation"] * known["error"] * known["error_full"]
        assert np.allclose(known["drift"] ** 2, squares, rtol=1e-6, atol=0)


def test_noise_about_zero_has_nothing_in_common_and_a_shift_has():
    generator = np.random.default_rng(1)
    noise = generator.normal(size=(12, 50))
    for means, low, high in ((noise, -0.1, 0.1), (noise + 1, 0.4, 0.6)):
        found = fits.common_share(means, np.square(means).mean(1))
        assert low < found.low < found.value < found.high < high


def test_means_over_files_are_means_and_their_intervals_hold_them():
    four = pd.DataFrame({"sample": [0, 1, 2, 3], "source": list("abcd"), "x": [1.0, 2.0, 4.0, 8.0]})
    found = fits.mean_resampled(four, "x")
    assert found.value == 3.75
    assert found.low < 3.75 < found.high
    assert fits.log_mean_resampled(four, "x").value == pytest.approx(64**0.25)


def planted(likelihood: float = 0.0, common: float = 0.0, ratio: float = 1.0, scatter: float = 1.0) -> pd.DataFrame:
    """Make the rows of a cached path whose differences scatter about what is planted, in units of the scatter."""
    generator = np.random.default_rng(2)
    made = []
    for model in ("small-llama", "small-gpt2"):
        for dtype in ("float16", "bfloat16"):
            for sample in range(12):
                about = path_errors._EMPTY | {
                    "model": model, "dtype": dtype, "sample": sample, "source": f"{sample}.py", "path": rows.CACHED,
                }
                for position in range(40):
                    nats, sharper = generator.normal(size=2)
                    made.append(about | {
                        "place": "logits", "layer": 7, "position": position, "error_full": 1.0, "drift": 1.0,
                        "error": ratio * np.exp(0.1 * generator.normal()), "correlation": 0.5, "nats_reference": 3.0,
                        "nats_full": 3.0, "nats": 3.0 - scatter * (nats + likelihood), "entropy_full": 2.0,
                        "entropy": 2.0 + sharper, "kl": 1e-5, "kl_full": 1e-5, "top1": 1.0, "top1_full": 1.0,
                    })
                shifts = generator.normal(size=30) / 40**0.5 + common
                made += [
                    about | {"place": "vocabulary", "token": t, "shift": s, "shift_rms": (1 + common**2) ** 0.5}
                    for t, s in enumerate(shifts)
                ]
    return pd.DataFrame(made)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({}, "refuted in kind"), ({"ratio": 1.3}, "reproduced in kind"), ({"ratio": 1.1}, "undecided")],
)
def test_a_verdict_turns_when_its_rows_do(change, verdict):
    found = measures.CHECKS["caching-loses-precision"](results_of(planted(**change)))
    assert found.verdict == verdict
    assert found.n == f"{planted()['source'].nunique()} files (few)"


def test_without_bf16_nothing_is_run_and_of_too_few_files_nothing_judged():
    check = measures.CHECKS["caching-loses-precision"]
    assert check(results_of(planted().assign(dtype="float32"))).verdict == "not run"
    few = check(results_of(planted(ratio=1.3).query("sample < 2")))
    assert (few.verdict, few.n) == ("undecided", "2 files (too few)")


# The ledger, to which a second chapter on one document adds


def test_a_second_chapter_judges_the_claims_that_name_it_in_a_table_of_its_own(results):
    assert len(measures.CLAIMS.judged(results)) == 1
    assert measures.CLAIMS.table == "tab-claims-issue-25420-which-path"
    with pytest.raises(ValueError, match="caching-loses-precision"):
        ledger.Claims("issue-25420", {}, CHAPTER).judged(results)


def test_the_table_of_a_second_chapter_belongs_to_its_document():
    assert site_ledger._document("tab-claims-issue-25420-which-path") == "issue-25420"
    assert site_ledger._document("tab-claims-issue-25420") == "issue-25420"
    assert site_ledger._document("tab-claims-issue-2542") == "issue-2542"
    rows = [
        dict.fromkeys(ledger.SHOWN, "") | {"document": "a", "table": table, "claim": claim, "verdict": "refuted"}
        for table, claim in (("tab-claims-a", "first"), ("tab-claims-a-more", "second"))
    ]
    said = site_ledger.markdown(rows)
    assert said.index("[a](#tab-claims-a),,first") < said.index("[a](#tab-claims-a-more),,second")


# Statements


def outcome(name: str, made: pd.DataFrame) -> str:
    return statements.check(measures.STATEMENTS[name], results_of(made)).outcome


@pytest.mark.parametrize(
    ("name", "change", "contrary"),
    [
        ("cached-no-worse", {"ratio": 0.6}, {"ratio": 1.5}),
        ("as-close-in-16-bits", {}, {"ratio": 1.5}),
        ("as-close-in-16-bits", {"ratio": 1.1}, {"ratio": 0.6}),
        ("either-may-be-closer", {"ratio": 0.8}, {"ratio": 3.0}),
        ("no-worse-prediction", {}, {"likelihood": -0.8}),
        ("no-worse-prediction", {"likelihood": 0.1}, {"likelihood": 0.8}),
        ("nothing-in-common", {}, {"common": 1.0}),
        ("loss-unchanged", {"scatter": 0.01}, {"likelihood": -0.8}),
    ],
)
def test_a_statement_holds_on_noise_and_fails_on_what_is_planted(name, change, contrary):
    assert outcome(name, planted(**change)) == "holds"
    assert outcome(name, planted(**contrary)) == "fails"


def test_a_cached_pass_that_is_closer_in_fp32_is_told_from_one_that_is_not():
    closer, alike = (planted(ratio=ratio).assign(dtype="float32") for ratio in (0.6, 1.0))
    assert outcome("closer-in-fp32-here", closer) == "holds"
    assert outcome("closer-in-fp32-here", alike) == "fails"
    # In 16 bits it says nothing.
    assert outcome("closer-in-fp32-here", planted(ratio=0.6)) == "not run"


def test_errors_share_a_part_only_where_their_correlation_is_told_from_nothing():
    made = planted()
    assert outcome("errors-share-a-part", made) == "holds"
    apart = made.assign(correlation=made["correlation"].where(made["model"] != "small-gpt2", -0.1))
    assert outcome("errors-share-a-part", apart) == "fails"


def test_an_error_that_grows_along_the_text_is_found():
    made = planted()
    assert outcome("no-growth-along-the-text", made) == "holds"
    grown = made.assign(error=made["error"] * np.exp(0.05 * made["position"]))
    assert outcome("no-growth-along-the-text", grown) == "fails"


def test_the_planted_fault_and_the_dtype_are_told_from_the_path(results):
    def said(name: str, found: Found) -> str:
        return statements.check(measures.STATEMENTS[name], found).outcome

    assert said("reference-is-finer", results) == said("dtype-decides", results) == "holds"
    # Control: a coarser reference, and a bf16 whose error is that of fp32.
    made = results["path_errors"]
    coarser = made.assign(error=made["error"].where(made["path"] != rows.CHECK, 1e-3))
    assert said("reference-is-finer", with_rows(results, path_errors=coarser)) == "fails"
    assert said("dtype-decides", with_rows(results, path_errors=made.assign(error_full=1e-3))) == "fails"


def test_a_run_without_a_dtype_or_a_control_says_nothing_of_it():
    assert outcome("dtype-decides", planted()) == "not run"
    assert outcome("control-is-seen", planted()) == "not run"


def test_figures_draw_what_the_tables_hold(results):
    layers, series, texts = results["layers"], tables.series(results), results["texts"]
    assert len(figures.figure_layers(layers).axes) == 1
    ratios = figures.figure_ratios(series, texts).axes[0]
    # Two paths in four pairs of model and dtype; the control is off the scale and stays in the table.
    assert len(ratios.containers) == 8
    # The book's estimates lie behind, one bar to each of them that it has.
    book = series[(series["model"] == "small-llama") & (series["dtype"] == "bfloat16")]
    both = figures.figure_ratios(series, texts, book).axes[0]
    assert len(both.lines) - len(ratios.lines) == 4
    assert len(figures.figure_shared(layers).axes) == 2
    assert len(figures.figure_positions(results["positions"]).axes[0].lines) == 4
    assert len(figures.figure_shift(tables.shift(results)).axes) == 3
    assert len(tables.errors_shown(series)) == 12
    assert len(tables.quality(results)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_tokens": 80}, "more than the context"),
        ({"n_tokens": 7}, "n_tokens"),
        ({"n_samples": 9}, "gives 6 samples"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"families": ["nosuch"]}, "neither a family"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_in_one_line(settings, change, message):
    with pytest.raises(UserError, match=message) as error:
        path_errors.EXPERIMENT.run(WhichPathSettings.checked(**settings.model_dump() | change))
    assert "\n" not in str(error.value)
