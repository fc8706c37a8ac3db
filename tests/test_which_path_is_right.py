"""The chapter on which path is right: its reference is one, its statistics tell a side from none, its verdicts turn."""

import numpy as np
import pandas as pd
import pytest
import torch
from made_up import against_the_book, run_of
from torch.nn import functional
from transformers import cache_utils

from kvbook.atlas import configurations
from kvbook.measuring import fp64_reference as truth
from kvbook.measuring.in_fp64 import widened
from kvbook.models import corpus, loading
from kvreport.chapters.which_path_is_right import WhichPathSettings, measures, path_errors, rows, tables
from kvreport.publishing import found as found_in
from kvreport.publishing import verdicts

pytestmark = pytest.mark.usefixtures("no_gradients")

NAME = "which_path_is_right"


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return WhichPathSettings.checked(
        model=str(llama_folder), families=[str(gpt2_folder)], corpus=str(text_folder), n_samples=4, n_tokens=16,
        dtypes=["float32", "bfloat16"],
    )


def test_mkls_portable_code_gives_two_processors_equal_errors_to_15_digits_and_control_its_avx2_code_does_not():
    apart = {}
    for limit in ("COMPATIBLE", "AVX2"):
        both = [of["path_errors"] for name, of in found_in.published(NAME).items() if limit in name]
        one, other = (each[["error", "error_full"]] for each in both)
        apart[limit] = (one / other - 1).abs().max().max()
    assert apart["COMPATIBLE"] < 1e-15
    assert apart["AVX2"] > 0.1


# The reference


def test_the_reference_rounds_to_fp64_on_both_paths_and_control_a_llama_merely_loaded_so_rounds_to_fp32(llama, ids):
    reference = truth.in_double_precision(llama)
    as_loaded = path_errors.at_once(reference, ids, 8)
    with widened(torch.float64):
        full, (single, _) = path_errors.at_once(reference, ids, 8), path_errors.token_by_token(reference, ids, 8)
    for true, cached in zip(full, single, strict=True):
        assert true.dtype == torch.float64
        assert (truth.errors(true, cached, cached).first < 1e-13).all()
    assert (truth.errors(full.logits, as_loaded.logits, as_loaded.logits).first > 1e-9).all()


def answers_of(folder, dtypes):
    """Ask for the answer to one text in each dtype; return the answers and how often one was computed."""
    reference, computed = truth.Reference(dtypes), []

    def answer(model):
        computed.append(model)
        return (model.get_output_embeddings().weight.clone(),)

    found = []
    for dtype in dtypes:
        model = loading.load(str(folder), dtype=dtype).model
        reference.take(model)
        found.append(reference.of("text", answer)[0])
        # The weights are those of the model under test, which keeps its own.
        assert torch.equal(found[-1], model.lm_head.weight.double())
        assert model.lm_head.weight.dtype == getattr(torch, dtype)
    return found, len(computed)


def test_dtypes_that_hold_the_same_weights_share_an_answer_and_others_do_not(llama_folder, tmp_path, monkeypatch):
    dtypes = ["float64", "float32", "bfloat16"]
    # Its weights are numbers of fp32.
    found, computed = answers_of(llama_folder, dtypes)
    assert computed == 2
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    rounded = loading.load(str(llama_folder), dtype="bfloat16")
    for part in (rounded.model, rounded.tokenizer):
        part.save_pretrained(tmp_path)
    assert answers_of(tmp_path, dtypes)[1] == 1
    # What is beyond the limit is computed again.
    monkeypatch.setattr(truth.Reference, "LIMIT_BYTES", 10)
    assert answers_of(llama_folder, dtypes[:2])[1] == 2


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
    with widened(torch.float64):
        true = path_errors.at_once(truth.in_double_precision(llama), ids, 8)
    made = pd.DataFrame(path_errors.rows_of(true, true, true, ids[0, -8:], 16))
    errors = made[made["place"] != "vocabulary"]
    assert (errors[["error", "error_full", "drift"]] == 0).all(axis=None)
    assert errors["correlation"].isna().all()
    assert (made["kl"].dropna() == 0).all()
    assert (made["shift"].dropna() == 0).all()


# The paths


def test_a_model_without_positions_has_no_injected_fault(family_folders, ids):
    model = loading.load(str(family_folders["mpt"])).model
    _, cache = path_errors.token_by_token(model, ids, 8)
    assert path_errors.off_by_one(model, ids, cache) is None


def test_the_fault_is_injected_behind_a_window_too(ids):
    model = configurations.build("mistral")
    scored, cache = path_errors.token_by_token(model, ids, 8)
    assert not torch.allclose(path_errors.off_by_one(model, ids, cache).logits, scored.last().logits, rtol=1e-2)


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


def test_every_path_is_held_against_the_reference_at_every_place_once(results):
    keys = ["model", "dtype", "sample", "path", "place", "layer", "position", "token"]
    assert not results["path_errors"].duplicated(keys).any()
    series = results["path_errors"].query(f"path == {rows.CACHED!r}").groupby(["model", "dtype", "sample"])
    assert len(series) == 2 * 2 * 4
    for _, own in series:
        assert own.loc[own["place"] == "hidden", "layer"].tolist() == list(range(7))
        assert own.loc[own["place"] == "logits", "position"].tolist() == list(range(8, 16))


def test_the_next_tokens_are_those_of_the_text(results, settings):
    loaded = loading.load(settings.model)
    sample = next(corpus.samples(settings.corpus, loaded.tokenizer, 1, settings.n_tokens + 1))
    logits = loaded.model(torch.tensor([sample.ids])).logits[0]
    where = f"model == 'small-llama' and dtype == 'float32' and place == 'logits' and path == {rows.CACHED!r}"
    last = results["path_errors"].query(f"{where} and sample == 0").iloc[-1]
    expected = -torch.log_softmax(logits.double(), -1)[int(last["position"]), sample.ids[int(last["position"]) + 1]]
    assert last["nats"] == pytest.approx(expected.item(), abs=1e-5)
    assert last["nats_reference"] == pytest.approx(expected.item(), abs=1e-5)


# The statistics


def test_a_position_off_by_one_is_significantly_worse_in_every_dtype(results):
    series = tables.series(results).query(f"path == {rows.OFF_BY_ONE!r}")
    assert len(series) == 4
    assert series["ratio"].map(lambda e: e.low > 2).all()
    assert series["closer"].map(lambda e: e.value == 0).all()


def test_ties_are_no_ones_success(results):
    equal = run_of(results["path_errors"].eval("error = error_full"), models=[{"weights": "stand-in", "parameters": 1}])
    series = tables.series(found_in.of_runs(NAME, {"path_errors": equal}))
    assert series["closer"].isna().all()
    assert (series["ties"] == series["n"]).all()
    assert series["ratio"].map(lambda e: e.value == pytest.approx(1)).all()


def test_noise_about_zero_has_nothing_in_common_and_a_shift_has():
    noise = np.random.default_rng(1).normal(size=(12, 50))
    for means, low, high in ((noise, -0.1, 0.1), (noise + 1, 0.4, 0.6)):
        found = measures.common_share(means, np.square(means).mean(1))
        assert low < found.low < found.value < found.high < high


# The claim and the ledger


def test_a_second_chapter_judges_the_claims_that_name_it_in_a_table_of_its_own(results):
    assert len(measures.CLAIMS.judged(results)) == 1
    assert measures.CLAIMS.table == "tab-claims-issue-25420-which-path"
    with pytest.raises(ValueError, match="caching-loses-precision"):
        verdicts.Claims("issue-25420", {}, f"03_{NAME}").judged(results)


# A default build can disagree with the book: what harms the model changes statements that are named here beforehand.
# The comparison is the page's, and the run that of a default build but for its texts and its dtypes: short ones in fp32
# show a harm too, and sound arithmetic is run on the same.


def keys_in_8_bits(monkeypatch):
    stock = cache_utils.DynamicLayer.update

    def update(self, keys, values, *args, **options):
        scale = keys.abs().amax(-1, keepdim=True) / 127
        return stock(self, (keys / scale).round() * scale, values, *args, **options)

    monkeypatch.setattr(cache_utils.DynamicLayer, "update", update)


def sums_in_16_bits(monkeypatch):
    def forward(self, inputs):
        if inputs.dtype != torch.float32:
            return functional.linear(inputs, self.weight, self.bias)
        total = torch.zeros((), dtype=torch.bfloat16)
        for part, weight in zip(inputs.split(192, -1), self.weight.split(192, -1), strict=True):
            total = (total.float() + functional.linear(part, weight)).bfloat16()
        return total.float()

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)


@pytest.mark.parametrize(("harm", "differ"), [
    (None, set()), (keys_in_8_bits, {"cached-no-worse", "reference-is-finer"}),
    (sums_in_16_bits, {"loading-in-fp64-is-not"}),
])
def test_harmed_arithmetic_changes_the_statements_named_and_sound_arithmetic_changes_none(
    harm, differ, monkeypatch, runs, real_model
):
    if harm:
        harm(monkeypatch)
    compared = against_the_book(NAME, path_errors.EXPERIMENT, n_tokens=8, dtypes=["float32"])
    found = {name for name, word in compared.items() if word == "differs"}
    # On some processors the harm shows in further ones.
    assert found >= differ
    assert bool(found) == bool(harm)
    assert list(compared.values()).count("agrees") >= (1 if harm else 3)
