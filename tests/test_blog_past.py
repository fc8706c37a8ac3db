"""The experiment of the blog post about past_key_values, on small checkpoints in local folders."""

import pandas as pd
import pytest
import torch
from planted import run_of
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from kvbook import paths
from kvbook.errors import UserError
from kvbook.models import tokenizers
from kvreport.chapters.blog_past import figures, measures, past_tables, tables
from kvreport.chapters.blog_past import rows as rows_of
from kvreport.chapters.blog_past.settings import PastTablesSettings
from kvreport.publishing import documents, found
from kvreport.publishing.found import Found, Frame
from kvreport.publishing.measures import named, written
from kvreport.publishing.statements import check

SHAPE = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}


def small(family: str):
    torch.manual_seed(6)
    if family == "mpt":
        # The class's own default of use_cache stays: it is what the document fell into.
        return MptForCausalLM(
            MptConfig(**SHAPE, d_model=32, n_heads=4, n_layers=3, max_seq_len=64, initializer_range=0.2)
        )
    if family == "falcon":
        config = FalconConfig(
            **SHAPE, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
            multi_query=True, parallel_attn=True, alibi=False, bias=False, new_decoder_architecture=False,
            ffn_hidden_size=64, initializer_range=0.2,
        )
        return FalconForCausalLM(config)
    config = RobertaConfig(
        **SHAPE, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=67, type_vocab_size=1, initializer_range=0.2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    return RobertaForMaskedLM(config)


@pytest.fixture(scope="module")
def settings(tmp_path_factory, bpe, gpt2_folder, text_folder):
    folders = []
    for family in ("roberta", "mpt", "falcon"):
        folder = tmp_path_factory.mktemp("past") / f"small-{family}"
        small(family).save_pretrained(folder)
        tokenizers.for_family(bpe, family, 64).save_pretrained(folder)
        folders.append(str(folder))
    return PastTablesSettings.checked(
        model=str(gpt2_folder), families=folders, quantizations="none", corpus=str(text_folder), n_samples=5,
        n_tokens=12,
    )


@pytest.fixture(scope="module")
def run(settings):
    return past_tables.EXPERIMENT.run(settings)


def found_in(run) -> Found:
    return found.of_runs("blog_past", {"past_tables": run})


def results_of(rows: pd.DataFrame) -> Found:
    return found_in(run_of(rows))


def of(run, family: str, variant: str, layers: int | None = None) -> pd.DataFrame:
    rows = run.rows[(run.rows["family"] == family) & (run.rows["variant"] == variant)]
    return rows if layers is None else rows[rows["layers"] == layers]


def test_every_text_and_variant_is_measured_once(run):
    assert not run.rows.duplicated(["model", "quantization", "variant", "layers", "sample"]).any()
    assert (run.rows.groupby(["model", "variant", "layers"]).size() == 6).all()
    assert set(run.rows["family"]) == {"gpt2", "roberta", "mpt", "falcon"}


def test_mpt_with_its_default_has_no_past_and_with_the_cache_on_it_has(run):
    off, on = of(run, "mpt", rows_of.CACHE_OFF), of(run, "mpt", rows_of.NATIVE)
    assert (off["held"] == 0).all()
    assert (off["alone_max_abs"] == 0).all()
    assert (on["held"] == on["n_tokens"] - 1).all()
    assert (on["max_abs"] < 1e-4).all()
    # Control: with a past the logits are not those of the last token alone.
    assert (on["alone_max_abs"] > 0.01).all()
    assert (off["max_abs"] > 0.01).all()


def test_each_line_of_falcon_breaks_it_alone_and_the_native_model_is_whole(run):
    assert (of(run, "falcon", rows_of.NATIVE)["max_abs"] < 1e-4).all()
    for variant in (rows_of.UPPER_LEFT, rows_of.NO_OFFSET, rows_of.BOTH):
        assert (of(run, "falcon", variant)["max_abs"] > 0.01).any(), variant


def test_with_one_key_in_sight_the_rotary_embedding_cannot_matter():
    model = small("falcon").eval()
    ids = torch.tensor([[11, 12, 13, 14, 15]])
    found = {variant.name: variant.split(ids).logits for variant in past_tables.variants(model)}
    with torch.inference_mode():
        assert torch.equal(found[rows_of.UPPER_LEFT], found[rows_of.BOTH])
    # Control: without that mask it does.
    assert not torch.allclose(found[rows_of.NATIVE], found[rows_of.NO_OFFSET], atol=1e-3)


def test_the_bidirectional_model_is_built_without_a_remark_and_the_library_is_left_as_it_was(caplog):
    from transformers import RobertaForCausalLM
    from transformers.utils import logging

    library, said = logging.get_logger(), logging.get_verbosity()
    library.addHandler(caplog.handler)
    try:
        logging.set_verbosity_warning()
        past_tables.variants(small("roberta"))
        assert not caplog.records
        assert logging.get_verbosity() == logging.WARNING
        # Control: by itself the class makes one.
        RobertaForCausalLM(small("roberta").config)
        assert "is_decoder" in caplog.text
    finally:
        library.removeHandler(caplog.handler)
        logging.set_verbosity(said)


def test_the_mask_is_put_back_also_after_an_error():
    stock = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(KeyboardInterrupt):
        _interrupted()
    assert torch.nn.functional.scaled_dot_product_attention is stock


def _interrupted() -> None:
    with past_tables.upper_left_mask():
        raise KeyboardInterrupt


def test_the_upper_left_mask_shows_a_single_query_the_first_key_alone():
    q, k, v = (torch.randn(1, 1, n, 4) for n in (1, 5, 5))
    attend = torch.nn.functional.scaled_dot_product_attention
    assert not torch.allclose(attend(q, k, v), v[:, :, :1])
    with past_tables.upper_left_mask():
        assert torch.allclose(torch.nn.functional.scaled_dot_product_attention(q, k, v), v[:, :, :1])


def test_roberta_returns_no_past_and_a_handed_one_costs_nothing_in_one_layer_alone(run):
    posted = of(run, "roberta", rows_of.NO_PAST)
    assert (posted["held"] == 0).all()
    assert (posted["alone_max_abs"] == 0).all()
    assert (of(run, "roberta", rows_of.DECODER)["max_abs"] < 1e-4).all()
    one, three = (of(run, "roberta", rows_of.HANDED, layers) for layers in (1, 3))
    assert (one["held"] == one["n_tokens"] - 1).all()
    assert (one["max_abs"] < 1e-4).all()
    assert (three["max_abs"] > 1e-3).all()


def test_the_statistics_are_those_of_pandas():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = pd.Series(values.double().tolist()).describe().drop("count")
    assert past_tables.described(values) == pytest.approx(expected.tolist())
    assert list(expected.index) == documents.published("blog-past")["statistics"]


def test_the_posts_relative_column_is_its_own_quotient():
    table = rows_of.published_tables()
    large = table[(table["absolute"] > 1e-3) & (table["without"].abs() > 1)]
    assert (large["absolute"] / large["without"].abs()).to_numpy() == pytest.approx(
        large["relative"].to_numpy(), rel=0.02
    )
    assert len(table) == 7 * 7


def test_ours_stand_beside_the_posts_and_what_was_left_out_is_empty(run):
    beside = found_in(run)["beside"]
    assert len(beside) == 49
    plain = beside[~beside["case"].str.contains("bits")]
    assert plain["here absolute"].notna().all()
    assert beside.loc[beside["case"].str.contains("bits"), "here absolute"].isna().all()


def test_a_family_without_a_stand_in_is_run_untrained_and_the_rows_say_so(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "STANDINS", tmp_path)
    alone = past_tables.EXPERIMENT.run(settings.model_copy(update={"families": ("mpt",), "n_samples": 1}))
    assert alone.rows.groupby("family")["weights"].first().to_dict() == {"gpt2": "local", "mpt": "untrained"}
    # Weights that are not the document's show a mechanism, and no verdict may say more.
    assert word(alone.rows, "mpt-cannot") == "undecided"
    more = pd.concat([alone.rows.assign(source=f"{k}", sample=f"{k}") for k in range(5)])
    real = [{"architecture": "gpt2", "weights": "hub", "hub_id": "openai-community/gpt2", "parameters": 1}]
    check = measures.CHECKS["gpt2-compatible"]
    assert check(found_in(run_of(more, models=real))).verdict == "reproduced"
    assert check(found_in(run_of(more, models=[real[0] | {"weights": "untrained"}]))).verdict == "reproduced in kind"
    # The weights of another family count for nothing here.
    toy = {"architecture": "mpt", "weights": "untrained", "parameters": 1}
    assert check(found_in(run_of(more, models=[*real, toy]))).verdict == "reproduced"
    # Control: a folder that is not there is refused, not replaced.
    with pytest.raises(UserError):
        past_tables.EXPERIMENT.run(settings.model_copy(update={"families": ("/nowhere",)}))


# Verdicts


def word(rows: pd.DataFrame, claim: str) -> str:
    return measures.CHECKS[claim](results_of(rows)).verdict


def test_verdicts_on_these_rows(run):
    found = {claim: word(run.rows, claim) for claim in measures.CHECKS}
    assert found["gpt2-compatible"] == "reproduced in kind"
    assert found["roberta-fails-bidirectional"] == "reproduced in kind"
    assert found["quantization-keeps-past"] == "not run"
    # The post shows neither MPT's configuration nor Falcon's code.
    assert found["mpt-cannot"] == found["falcon-cannot"] == "plausible cause"


def test_what_is_no_more_than_rounding_cannot_fail(run):
    harmless = run.rows.assign(relative_rms=0.0)
    assert word(harmless, "roberta-fails-bidirectional") == "refuted in kind"
    # Were the causal model as far off, the direction of its attention would not be what counts.
    assert word(run.rows.assign(relative_rms=0.5), "roberta-fails-bidirectional") == "undecided"


def test_a_large_native_difference_would_bear_the_post_out(run):
    native = run.rows["variant"] == rows_of.NATIVE
    rows = run.rows.assign(relative_rms=run.rows["relative_rms"].mask(native, 0.5))
    assert word(rows, "gpt2-compatible") == "refuted in kind"
    for claim in ("mpt-cannot", "falcon-cannot"):
        assert word(rows, claim) == "reproduced in kind", claim


def test_a_past_that_was_there_is_no_missing_past(run):
    rows = run.rows.assign(alone_max_abs=1.0, held=5)
    assert word(rows, "mpt-cannot") == "refuted in kind"


def test_switches_that_break_nothing_explain_nothing(run):
    assert word(run.rows.assign(relative_rms=1e-8), "falcon-cannot") == "refuted in kind"


def test_the_posts_thousandth_is_asked_of_every_quantized_model_and_a_stand_ins_alone_bears_nothing_out(run):
    rows = run.rows.assign(quantization="4bit", relative_rms=2e-4)
    beyond = rows.assign(model="another model", relative_rms=7.4e-3)
    found = measures.CHECKS["quantization-keeps-past"](results_of(pd.concat([rows, beyond])))
    assert found.verdict == "undecided"
    assert "above the bound: another model 4 bits 0.74%" in found.here
    # Controls: all models on one side.
    assert word(rows, "quantization-keeps-past") == "reproduced in kind"
    assert word(beyond, "quantization-keeps-past") == "refuted in kind"


def test_the_two_relative_differences_are_compared_where_the_page_shows_both(run):
    shown = pd.DataFrame(
        {
            "case": ["GPT-2", "MPT", "Falcon"], "statistic": ["max", "std", "min"],
            "here relative": [1.0, 1.0, 0.0], "here by element": [4.0, 2340.0, 5.0],
        }
    )
    assert rows_of.relative_apart(shown)["apart"].tolist() == [4.0, 2340.0]
    results = Found({**rows_of.ROWS, "beside": Frame(lambda _: shown, ("own",))}, {"past_tables": run})
    said = [written(name, named(measures), results) for name in ("RELATIVE_APART", "MOST_APART")]
    assert said == ["2,300", "MPT: std"]
    # Control: what the page does not show, however far apart.
    assert results_of(run.rows.assign(**{"element max": 1e9, "family": "llama"}))["apart"].empty


def test_the_ratio_of_falcons_two_tables_is_told_beside_the_posts(run):
    def four_over_eight(*quantizations: str) -> str:
        rows = pd.concat(
            run.rows.assign(quantization=name, **{"absolute mean": 3.0 if name == "4bit" else 2.0})
            for name in quantizations
        )
        return measures.CHECKS["falcon-cannot"](results_of(rows)).here

    assert "published 2.4, here 1.5" in four_over_eight("4bit", "8bit")
    assert "published 2.4, here not run" in four_over_eight("4bit")


QUANTIZED = {"four-bits-too", "eight-bits-in-small-models", "eight-bits-cost-more"}


def outcomes(rows: pd.DataFrame) -> dict[str, str]:
    return {name: check(one, results_of(rows)).outcome for name, one in measures.STATEMENTS.items()}


def test_statements_hold_on_untrained_checkpoints_too_and_what_was_not_run_is_not_judged(run, settings):
    found = outcomes(run.rows)
    assert {name for name, outcome in found.items() if outcome != "holds"} == QUANTIZED
    assert {found[name] for name in QUANTIZED} == {"not run"}
    alone = past_tables.EXPERIMENT.run(settings.model_copy(update={"families": ()}))
    assert set(outcomes(alone.rows).values()) == {"holds", "not run"}
    assert {check(found_in(alone)).verdict for check in measures.CHECKS.values()} >= {"not run"}


def test_control_each_statement_fails_on_rows_that_contradict_it(run):
    rows = run.rows
    has_past = rows["variant"].isin([rows_of.NATIVE, rows_of.DECODER])
    swapped = outcomes(rows.assign(relative_rms=has_past.map({True: 1.0, False: 1e-9})))
    for name in ("with-a-past-it-is-rounding", "mask-loses-context", "positions-lost-too", "deeper-layers-lose"):
        assert swapped[name] == "fails", name
    assert outcomes(rows.assign(relative_rms=1.0))["one-layer-loses-nothing"] == "fails"
    for bits, name in (("4bit", "four-bits-too"), ("8bit", "eight-bits-in-small-models")):
        assert outcomes(rows.assign(quantization=bits, relative_rms=1.0, weights="stand-in"))[name] == "fails"
    exact = rows.assign(quantization="8bit", relative_spread=0.0, weights="package")
    assert outcomes(exact)["eight-bits-cost-more"] == "fails"
    assert outcomes(rows.assign(alone_max_abs=1.0))["no-past-is-the-last-token-alone"] == "fails"
    both = rows["variant"] == rows_of.BOTH
    assert outcomes(rows.assign(max_abs=rows["max_abs"] + both))["mask-hides-positions"] == "fails"


def test_figures_draw_what_the_tables_hold(run):
    table = tables.variants(found_in(run))
    variants = figures.figure_variants(table)
    # Two variants of MPT, three of RoBERTa at its whole depth, four of Falcon, and GPT-2; what differs by nothing is
    # left out.
    assert len(variants.axes[0].get_yticks()) == 10
    assert len(variants.axes[0].containers) == (table.query("layers == 3 or family == 'gpt2'")["largest"] > 0).sum()
    assert len(figures.figure_published(found_in(run)["beside"]).axes) == 8
    behind = figures.figure_variants(table, table)
    assert len(behind.axes[0].containers) == 2 * len(variants.axes[0].containers)
    depth = table[table["family"] == "roberta"]
    assert len(figures.figure_depth(depth).axes[0].containers) == 1


def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for change in ({"families": ("/nowhere",)}, {"device": "cuda:99"}, {"n_tokens": 99}):
        with pytest.raises(UserError) as error:
            past_tables.EXPERIMENT.run(settings.model_copy(update=change))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()
