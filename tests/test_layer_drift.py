"""The experiments of issue 25420 on small checkpoints in a local folder."""

import numpy as np
import pandas as pd
import pytest
import torch
from planted import Judged, on_processor, run_of, with_rows, with_runs

from kvbook import lengths as kvbook_lengths
from kvbook import paths
from kvbook.errors import UserError
from kvbook.measuring import full_and_split
from kvbook.measuring.roundoff import UNIT_ROUNDOFF
from kvreport.chapters.layer_drift import by_layer, greedy_paths, measures, mitigations, tables
from kvreport.chapters.layer_drift.rows import GENERATE, LOOPS, TIES, UNCACHED
from kvreport.chapters.layer_drift.settings import LayerDriftSettings
from kvreport.publishing import found as found_in
from kvreport.publishing import statements
from kvreport.publishing.found import Found


@pytest.fixture(scope="module")
def settings(llama_folder, gpt2_folder, text_folder):
    return LayerDriftSettings.checked(
        model=str(llama_folder), reference_model=str(gpt2_folder), corpus=str(text_folder), n_samples=5, n_tokens=20,
        n_new_tokens=10, prompt="def f(x",
    )


@pytest.fixture(scope="module")
def results(settings):
    return found_in.measured("layer_drift", settings)


@pytest.fixture(scope="module")
def drift(results):
    return results.runs["layer_drift"]


@pytest.fixture(scope="module")
def greedy(results):
    return results.runs["greedy_paths"]


@pytest.fixture(scope="module")
def mitigated(results):
    return results.runs["mitigations"]


def test_rows_hold_every_sample_layer_and_dtype_once(drift):
    keys = ["model", "dtype", "sample", "layer"]
    assert not drift.rows.duplicated(keys).any()
    # 2 models, 3 dtypes, 5 samples, embedding + 6 layers + logits.
    assert len(drift.rows) == 2 * 3 * 5 * 8
    assert set(drift.rows["weights"]) == {"local"}


def test_rows_are_what_the_passes_give(drift, settings, llama, bpe):
    from kvbook.models import corpus, loading

    loaded = loading.load(settings.model)
    sample = next(corpus.samples(settings.corpus, loaded.tokenizer, 1, settings.n_tokens))
    ids = torch.tensor([sample.ids])
    with torch.inference_mode():
        full, split = full_and_split.full_pass(loaded.model, ids), full_and_split.split_pass(loaded.model, ids)
    row = drift.rows.query("model == 'small-llama' and dtype == 'float32' and sample == 0 and layer == 3").iloc[0]
    assert row["max_abs"] == (full.hidden[3] - split.hidden[3]).abs().max().item()


def test_means_equal_an_average_written_out(results, drift):
    means = results["means"]
    expected = drift.rows.query("model == 'small-gpt2' and dtype == 'bfloat16' and layer == 2")["max_abs"].mean()
    found = means.query("model == 'small-gpt2' and dtype == 'bfloat16' and layer == 2").iloc[0]
    assert found["max_abs"] == pytest.approx(expected)
    assert found["low"] <= found["max_abs"] <= found["high"]


def test_the_posted_loop_feeds_the_whole_sequence_again(greedy):
    lengths = greedy.rows.query("method == 'cache, as posted' and model == 'small-llama' and dtype == 'float32'")
    found = lengths.sort_values("step")["cache_length"].tolist()
    prompt = found[0]
    assert found == [sum(prompt + k for k in range(step + 1)) for step in range(len(found))]
    assert len(found) < 10, "a context of 64 ends the posted loop early"


def test_the_right_loop_grows_by_one_and_gives_the_uncached_tokens_in_fp32(greedy):
    rows = greedy.rows.query("model == 'small-llama' and dtype == 'float32'")
    right = rows[rows["method"] == "cache, last token"].sort_values("step")
    uncached = rows[rows["method"] == UNCACHED].sort_values("step")
    generated = rows[rows["method"] == GENERATE].sort_values("step")
    assert right["token"].tolist() == uncached["token"].tolist() == generated["token"].tolist()
    assert right["cache_length"].diff().dropna().eq(1).all()


def test_positions_alone_do_not_mend_the_posted_loop(llama, ids):
    def tokens(steps):
        return [step.token for step in steps]

    with torch.inference_mode():
        uncached = tokens(greedy_paths.decode_uncached(llama, ids, 5))
        found = {
            name: tokens(greedy_paths.decode_cached(llama, ids, 5, loop)) for name, loop in greedy_paths.LOOPS.items()
        }
    assert found["cache, last token"] == found["cache, last token + position ids"] == uncached
    assert found["cache, as posted"] != uncached
    assert found["cache, as posted + position ids"] != uncached


def test_every_mitigation_is_measured_beside_stock(mitigated):
    counts = mitigated.rows.groupby(["dtype", "variant"]).size()
    assert set(counts.index.get_level_values("dtype")) == {"float16", "bfloat16"}
    assert (counts == 5 // 2).all()
    assert len(counts) == 12


def test_mitigations_are_left_out_where_no_upcast_exists(settings):
    assert mitigations.EXPERIMENT.run(settings.model_copy(update={"dtypes": ("float32",)})) is None


@pytest.fixture(scope="module")
def lawful(results, drift, mitigated):
    """Rows as the document describes them: drift in every sample, 10 % a layer, in proportion to the unit roundoff.

    Whether models this small drift at all depends on the processor, so a test of the verdicts makes its own rows.
    """
    roundoff = drift.rows["dtype"].map(UNIT_ROUNDOFF)
    rows = drift.rows.assign(
        differing_share=0.5,
        max_abs=roundoff * 1.1 ** drift.rows["layer"] * (1 + 0.1 * drift.rows["sample"]),
        relative_rms=roundoff * 1.05 ** drift.rows["layer"] * (1 + 0.1 * drift.rows["sample"]),
        top1_flip=drift.rows["top1_flip"].where(drift.rows["top1_flip"].isna(), 0.0),
        kl_nats=drift.rows["kl_nats"].where(drift.rows["kl_nats"].isna(), 1e4 * roundoff**2),
    )
    # More files, so that intervals are narrow enough to decide.
    rows = pd.concat(
        [rows.assign(sample=rows["sample"] + 5 * k, source=rows["source"] + str(k)) for k in range(8)]
    ).reset_index(drop=True)
    whole = mitigated.rows["variant"] == "whole attention"
    measured = pd.concat(
        [
            mitigated.rows.assign(
                logits_relative_rms=1e-3 * (2 + k % 3) * np.where(whole, 0.5, 1), full_s=np.where(whole, 2.0, 1.0),
                decode_s=np.where(whole, 2.0, 1.0), sample=mitigated.rows["sample"] + 5 * k,
                source=mitigated.rows["source"] + str(k),
            )
            for k in range(10)
        ]
    )
    # Whoever feeds the whole sequence on top of its cache leaves the uncached tokens at step 2, and nobody else ever
    # does.
    keys = ["model", "dtype", "step"]
    greedy = results["greedy_paths"]
    uncached = greedy[greedy["method"] == UNCACHED].set_index(keys)["token"].rename("uncached")
    whole = greedy["method"].map(lambda name: name in LOOPS and greedy_paths.LOOPS[name].feeds_whole)
    tokens = greedy.join(uncached, on=keys)["uncached"] + (whole & (greedy["step"] >= 2))
    published = [about | {"weights": "hub", "hub_id": "openai-community/gpt2"} for about in drift.about["models"]]
    lengths = results["layer_drift_lengths"].assign(differing_share=0.5)
    lengths = pd.concat([lengths.assign(source=lengths["source"] + str(k)) for k in range(20)])
    planted = with_rows(
        results, layer_drift=rows, mitigations=measured, greedy_paths=greedy.assign(token=tokens.astype(int)),
        layer_drift_lengths=lengths,
    )
    return with_models(planted, published)


def with_models(found: Found, models: list[dict]) -> Found:
    """Give what was found of other models."""
    runs = {name: run_of(run.rows, **run.about | {"models": models}) for name, run in found.runs.items() if run}
    return with_runs(found, **runs)


def judged(results: Found) -> Judged:
    return Judged(measures.CHECKS, results)


def of_six_models(results: Found) -> Found:
    """Give what was found of six models that differ in their names."""

    def copied(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows[rows["model"] == rows["model"].iloc[0]]
        return pd.concat([rows.assign(model=rows["model"] + str(k)) for k in range(6)], ignore_index=True)

    return with_rows(results, **{name: copied(results[name]) for name in ("layer_drift", "layer_drift_lengths")})


def test_every_claim_gets_a_verdict_and_each_verdict_its_numbers(lawful):
    table = measures.CLAIMS.judged(lawful)
    assert len(table) == len(measures.CHECKS)
    assert table["here"].str.contains(r"\d").all()
    shown = measures.CLAIMS.shown({"": lawful})
    assert list(shown) == ["verdict", "claim", "n", "here", "published", "rule"]
    assert shown["claim"].str.contains("“This happens in most, if not all models", regex=False).any()
    assert (shown["rule"] == [check.rule.text() for check in measures.CHECKS.values()]).all()


def test_rows_as_the_document_describes_them_bear_it_out(lawful):
    said = {claim: verdict.verdict for claim, verdict in judged(lawful).items()}
    # Two models say nothing of most models, and without a flip nothing is known to be noticed.
    assert said.pop("drift-everywhere") == said.pop("sixteen-bits-matter") == "undecided"
    # Costs are those of a GPU, and the loop's cause is another one.
    assert said.pop("mitigations-cost") == "not run"
    assert said.pop("positions-missing") == "refuted"
    assert set(said.values()) == {"reproduced"}


@pytest.mark.parametrize(
    ("claim", "changes"),
    [
        ("grows-with-depth", {"max_abs": lambda r: r["max_abs"] * 1.2 ** -r["layer"]}),
        ("grows-with-depth", {"relative_rms": lambda r: r["relative_rms"] * 1.2 ** -r["layer"]}),
        ("coarser-is-worse", {"max_abs": lambda r: r["max_abs"] / r["dtype"].map(UNIT_ROUNDOFF) ** 2}),
        ("coarser-is-worse", {"max_abs": lambda r: r["max_abs"].where(r["dtype"] != "bfloat16", r["max_abs"] / 20)}),
        ("fp32-imperceptible", {"kl_nats": lambda r: 1e-3, "top1_flip": lambda r: r["sample"] % 3 == 0}),
        ("sixteen-bits-matter", {"kl_nats": lambda r: 1e-9}),
        ("greedy-keeps-its-choice", {"top1_flip": lambda r: 1.0}),
    ],
)
def test_a_verdict_turns_when_the_drift_does(lawful, claim, changes):
    rows = lawful["layer_drift"].assign(**{column: change(lawful["layer_drift"]) for column, change in changes.items()})
    assert judged(with_rows(lawful, layer_drift=rows))[claim].verdict == "refuted"


def test_most_models_are_not_one_however_many_texts_it_reads(lawful):
    said = judged(lawful)["drift-everywhere"]
    assert (said.verdict, said.n) == ("undecided", "2 models (too few)")
    said = judged(of_six_models(lawful))["drift-everywhere"]
    assert (said.verdict, said.n) == ("reproduced", "6 models (few)")


def test_equal_bits_at_drawn_lengths_in_one_dtype_contradict_drift_at_a_fixed_one(lawful):
    models = of_six_models(lawful)
    rows = models["layer_drift_lengths"]
    equal = rows["dtype"] == "bfloat16"
    said = judged(with_rows(models, layer_drift_lengths=rows.assign(differing_share=~equal * 0.5)))["drift-everywhere"]
    assert said.verdict == "refuted"
    assert "small-llama0 bf16 0% at 11 to 58" in said.here
    assert "small-llama0 bf16 100% at 20" in said.here
    # In some of the models only, it decides nothing.
    some = equal & rows["model"].str.endswith(("0", "1", "2"))
    said = judged(with_rows(models, layer_drift_lengths=rows.assign(differing_share=~some * 0.5)))["drift-everywhere"]
    assert said.verdict == "undecided"
    # Control: where no lengths were drawn, the fixed length decides.
    assert judged(with_runs(models, layer_drift_lengths=None))["drift-everywhere"].verdict == "reproduced"


def test_sixteen_bits_matter_where_tokens_change_and_not_where_a_divergence_passes_a_bound_of_ours(lawful):
    rows = lawful["layer_drift"].assign(kl_nats=1.0)
    assert judged(with_rows(lawful, layer_drift=rows))["sixteen-bits-matter"].verdict == "undecided"
    flips = rows.assign(top1_flip=(rows["sample"] % 3 == 0) & (rows["dtype"] != "float32"))
    assert judged(with_rows(lawful, layer_drift=flips))["sixteen-bits-matter"].verdict == "reproduced"
    # In one of the two dtypes alone, as here in bf16, it stays open.
    bf16 = rows.assign(top1_flip=flips["top1_flip"] & (rows["dtype"] == "bfloat16"))
    assert judged(with_rows(lawful, layer_drift=bf16))["sixteen-bits-matter"].verdict == "undecided"


def test_the_table_of_lengths_counts_texts_with_equal_bits_and_gives_few_files_no_interval(lawful):
    table = tables.by_length(lawful)
    assert set(table["tokens"]) == {"20", "11 to 58"}
    assert table["bitwise identical"].str.startswith("0 of ").all()
    rows = lawful["layer_drift_lengths"]
    equal = rows.assign(differing_share=(rows["sample"] > 0) * 0.5)
    found = tables.by_length(with_rows(lawful, layer_drift_lengths=equal)).query("tokens == '11 to 58'")
    assert found["share"].str.startswith("0.20 [").all()
    few = with_rows(lawful, layer_drift=lawful["layer_drift"].assign(source="one.py"))
    assert tables.by_length(few).query("tokens == '20'")["share"].str.contains(" to ").all()
    assert not table["share"].str.contains(" to ").any()


def test_lengths_beside_a_fixed_one_go_from_half_of_it_to_three_times(settings, results):
    assert LayerDriftSettings().other_lengths == "33-190"
    drawn = results["layer_drift_lengths"].groupby("sample")["n_tokens"].first()
    assert list(drawn) == [kvbook_lengths.drawn("11-58", index) for index in drawn.index]
    assert set(results["layer_drift_lengths"]["model"]) == {results.runs["layer_drift"].about["models"][0]["name"]}
    # Control: where the main run draws them, there is nothing beside.
    assert by_layer.LENGTHS.run(settings.model_copy(update={"n_tokens": "8-16"})) is None


THEIRS = {"weights": "hub", "hub_id": "openai-community/gpt2"}
ANOTHER = {"parameters": 200_000_000, "hub_id": "somebody/elses"}
OF_THEIR_SIZE = {"weights": "local", "parameters": 6_738_546_688}
REAL = [{"weights": weights} for weights in ("package", "gguf", "local", "hub")]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (THEIRS, THEIRS, "reproduced"), (THEIRS, {"weights": "stand-in"}, "reproduced in kind"),
        ({"weights": "local"}, {"weights": "local"}, "reproduced in kind"),
        # A folder with the real checkpoint.
        (OF_THEIR_SIZE, OF_THEIR_SIZE, "reproduced"),
        *((ANOTHER | of, ANOTHER | of, "reproduced on another real model") for of in REAL),
        (THEIRS, ANOTHER | {"weights": "hub"}, "reproduced on another real model"),
        # A toy in the same kind of file, and a stand-in beside the real model.
        (ANOTHER | {"weights": "gguf", "parameters": 2_800_000}, THEIRS, "reproduced in kind"),
        (ANOTHER | {"weights": "gguf"}, {"weights": "stand-in"}, "reproduced in kind"),
    ],
)
def test_a_claim_is_judged_by_whose_weights_its_models_have(lawful, first, second, verdict):
    models = [about | of for about, of in zip(lawful.runs["layer_drift"].about["models"], (first, second), strict=True)]
    assert judged(with_models(lawful, models))["coarser-is-worse"].verdict == verdict


def test_verdicts_on_the_mitigations_turn_with_their_rows(lawful):
    rows = lawful["mitigations"]
    idle = judged(with_rows(lawful, mitigations=rows.assign(logits_relative_rms=1e-3)))
    assert idle["most-mitigations-idle"].verdict == "reproduced"
    active = rows.assign(logits_relative_rms=rows["logits_relative_rms"].mask(rows["variant"] != "stock", 1e-4))
    assert judged(with_rows(lawful, mitigations=active))["most-mitigations-idle"].verdict == "refuted"
    # Scatter so wide that an interval holds 1 is no evidence of no effect.
    wide = rows.assign(logits_relative_rms=np.random.default_rng(0).lognormal(sigma=1.0, size=len(rows)))
    assert judged(with_rows(lawful, mitigations=wide))["most-mitigations-idle"].verdict == "undecided"
    none = judged(with_runs(lawful, mitigations=None))
    assert {none[c].verdict for c in ("most-mitigations-idle", "mitigations-cost")} == {"not run"}


def test_where_stock_does_not_drift_no_mitigation_is_judged_and_nothing_is_drawn(lawful):
    still = with_rows(lawful, mitigations=lawful["mitigations"].assign(logits_relative_rms=0.0))
    for claim in ("most-mitigations-idle", "mitigations-cost"):
        said = judged(still)[claim]
        assert (said.verdict, said.here) == ("not run", "stock shows 0 drift in these dtypes: there is none to remove")
    assert len(tables.effects(still)) == 0


def test_what_an_upcast_costs_is_judged_on_a_gpu_alone(lawful):
    def on(device: str, **times: float) -> str:
        run = lawful.runs["mitigations"]
        rows = run.rows.assign(**times) if times else run.rows
        machine = run.about["machine"] | {"device": device}
        moved = run_of(rows, **run.about | {"machine": machine})
        return judged(with_runs(lawful, mitigations=moved))["mitigations-cost"].verdict

    assert on("cpu") == "not run"
    assert on("cuda") == "reproduced"
    assert on("cuda", full_s=1.0, decode_s=1.0) == "refuted"


def test_position_ids_and_the_last_token_are_told_apart_with_prompts_enough(lawful):
    def verdict(greedy: pd.DataFrame) -> str:
        four = pd.concat([greedy.assign(prompt=f"prompt {k}") for k in range(4)], ignore_index=True)
        return judged(with_rows(lawful, greedy_paths=four))["positions-missing"].verdict

    greedy = lawful["greedy_paths"]
    assert verdict(greedy) == "other cause"
    healed = greedy[greedy["method"] == UNCACHED].assign(method=measures.POSITIONS)
    assert verdict(pd.concat([greedy[greedy["method"] != measures.POSITIONS], healed])) == "reproduced"


def of_greedy(rows: pd.DataFrame) -> Found:
    return found_in.of_runs("layer_drift", {"greedy_paths": run_of(rows)})


def test_a_divergence_is_tied_where_its_two_tokens_have_equal_logits_on_either_side(greedy):
    rows = greedy.rows.query("model == 'small-llama' and dtype == 'float32'")
    posted = of_greedy(rows)["divergence"].set_index("method").loc["cache, as posted"]
    assert posted["first_divergence"] > 0
    assert not posted["tied"]
    here = (rows["method"] == "cache, as posted") & (rows["step"] == posted["first_divergence"])
    for column in TIES:
        tied = rows.assign(**{column: rows[column].mask(here, 1.0)})
        assert of_greedy(tied)["divergence"].set_index("method").loc["cache, as posted", "tied"]


def test_generate_writes_and_computes_as_the_loop_and_control_another_token_or_logit_is_seen(greedy):
    def equal(**changed) -> list[bool]:
        return of_greedy(greedy.rows.assign(**changed))["generate and the loop"][["token", "logits"]].all().tolist()

    rows = greedy.rows
    assert equal() == [True, True]
    for step, seen in ((0, True), (1, False)):
        here = (rows["method"] == GENERATE) & (rows["step"] == step)
        assert equal(logits_sha256=rows["logits_sha256"].mask(here, "other")) == [True, seen]
        assert equal(token=rows["token"].mask(here, 999)) == [False, True]


def test_a_prompt_that_two_seeds_drew_is_one_unit(greedy):
    rows = greedy.rows
    twice = pd.concat([rows, rows], ignore_index=True)
    for name in ("divergence", "generate and the loop"):
        once = of_greedy(rows)[name]
        pd.testing.assert_frame_equal(of_greedy(twice)[name], once)
        # Control: another prompt is a unit of its own.
        assert len(of_greedy(pd.concat([rows, rows.assign(prompt="another")]))[name]) == 2 * len(once)


@pytest.mark.parametrize(
    ("experiment", "change"),
    [
        (by_layer, {"n_tokens": 65}),
        (by_layer, {"n_samples": 7}),
        (by_layer, {"model": "nosuch"}),
        (by_layer, {"device": "cuda:99"}),
        (by_layer, {"corpus": "/nowhere"}),
        # A prompt, and what is written behind it, that is longer than the context.
        (greedy_paths, {"n_new_tokens": 64}),
        (greedy_paths, {"reference_model": "nosuch"}),
        # Half of the samples go through the mitigations.
        (mitigations, {"n_samples": 14}),
        (mitigations, {"n_tokens": 65}),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing_behind(settings, tmp_path, monkeypatch, experiment, change):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    with pytest.raises(UserError) as error:
        experiment.EXPERIMENT.run(LayerDriftSettings.checked(**settings.model_dump() | change))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


# Statements


def outcomes(results: Found) -> dict[str, str]:
    return {name: statements.check(one, results).outcome for name, one in measures.STATEMENTS.items()}


def test_statements_hold_on_rows_that_follow_the_law_and_fail_on_rows_that_do_not(lawful):
    four = pd.concat([lawful["greedy_paths"].assign(prompt=f"prompt {k}") for k in range(8)], ignore_index=True)
    lawful = with_rows(lawful, greedy_paths=four)
    found = outcomes(lawful)
    for name in ("drift-grows", "posted-loop-writes-other-text", "positions-do-not-help", "last-token-helps"):
        assert found[name] == "holds", name
    falling = with_rows(
        lawful, layer_drift=lawful["layer_drift"].assign(max_abs=lambda r: r["max_abs"] * 1.3 ** -r["layer"])
    )
    assert outcomes(falling)["drift-grows"] == "fails"
    alike = with_rows(lawful, layer_drift=lawful["layer_drift"].assign(max_abs=lambda r: 1.1 ** r["layer"]))
    assert outcomes(alike)["bf16-as-its-roundoff"] == "fails"
    healed = four[four["method"] == "no cache"].assign(method=measures.POSTED)
    mended = with_rows(lawful, greedy_paths=pd.concat([four[four["method"] != measures.POSTED], healed]))
    assert outcomes(mended)["posted-loop-writes-other-text"] == "fails"


@pytest.mark.parametrize(
    ("name", "maker", "agrees"),
    [("bf16-agrees-at-no-length", "Intel", False), ("bf16-agrees-at-some-lengths", "AMD", True)],
)
def test_lengths_at_which_bf16_agrees_are_said_of_the_processor_that_they_were_seen_on(lawful, name, maker, agrees):
    there = on_processor(maker, lawful)
    rows = there["layer_drift_lengths"]
    equal = rows.assign(differing_share=rows["differing_share"].where(rows["dtype"] != "bfloat16", 0.0))
    assert outcomes(with_rows(there, layer_drift_lengths=equal))[name] == ("holds" if agrees else "fails")
    assert outcomes(there)[name] == ("fails" if agrees else "holds")
    assert outcomes(on_processor("another", lawful))[name] == "not run"


def test_an_upcast_that_leaves_most_of_the_drift_bears_its_statement_out_and_one_that_leaves_none_does_not(lawful):
    rows = lawful["mitigations"]
    stock = rows["variant"] == "stock"
    for left, outcome in ((0.9, "holds"), (0.01, "fails")):
        planted = rows.assign(logits_relative_rms=np.where(stock, 1e-3, left * 1e-3))
        assert outcomes(with_rows(lawful, mitigations=planted))["no-upcast-removes-it"] == outcome
