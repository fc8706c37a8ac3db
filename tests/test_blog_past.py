"""The experiment of the blog post about past_key_values, on small checkpoints in local folders."""

from contextlib import suppress

import pandas as pd
import pytest
import torch
from made_up import run_of
from transformers import RobertaForCausalLM
from transformers.utils import logging

from kvbook import paths
from kvbook.models import loading
from kvreport.chapters.blog_past import PastTablesSettings, measures, past_tables
from kvreport.chapters.blog_past import rows as rows_of
from kvreport.publishing import documents, found


@pytest.fixture(scope="module")
def settings(family_folders, gpt2_folder, text_folder):
    families = [str(family_folders[name]) for name in ("roberta", "mpt", "falcon")]
    return PastTablesSettings.checked(
        model=str(gpt2_folder), families=families, quantizations="none", corpus=str(text_folder), n_samples=5,
        n_tokens=12,
    )


def results_of(rows: pd.DataFrame, **about) -> found.Found:
    return found.of_runs("blog_past", {"past_tables": run_of(rows, **about)})


def test_every_text_and_variant_is_measured_once(results):
    rows = results["past_tables"]
    assert not rows.duplicated(["model", "quantization", "variant", "layers", "sample"]).any()
    assert (rows.groupby(["model", "variant", "layers"]).size() == 6).all()
    assert set(rows["family"]) == {"gpt2", "roberta", "mpt", "falcon"}


def test_a_past_is_returned_where_the_cache_is_on_and_the_model_causal_or_handed_one(results):
    rows = results["past_tables"].eval("share = held / (n_tokens - 1)")
    shares = rows.groupby(["family", "variant"])["share"].agg(["min", "max"])
    none = [("mpt", rows_of.CACHE_OFF), ("roberta", rows_of.NO_PAST)]
    assert (shares.loc[none] == 0).all(axis=None)
    assert (shares.drop(none) == 1).all(axis=None)
    # Without a past the logits are those of the last token alone, and with one they are not.
    alone = rows.groupby(["family", "variant"])["alone_max_abs"].min()
    assert (alone[none] == 0).all()
    assert (alone[[("mpt", rows_of.NATIVE), ("roberta", rows_of.DECODER)]] > 0.01).all()


def test_the_bidirectional_model_is_built_without_a_remark_and_the_library_is_left_as_it_was(family_folders):
    # It brings a trainer and more, which takes a second in each worker that only collects this file.
    from transformers.testing_utils import CaptureLogger, LoggingLevel

    roberta = loading.load(str(family_folders["roberta"])).model
    with LoggingLevel(logging.WARNING), CaptureLogger(logging.get_logger()) as ours:
        past_tables.variants(roberta)
        assert logging.get_verbosity() == logging.WARNING
    # Control: by itself the class makes one.
    with LoggingLevel(logging.WARNING), CaptureLogger(logging.get_logger()) as control:
        RobertaForCausalLM(roberta.config)
    assert ours.out == ""
    assert "is_decoder" in control.out


def test_the_upper_left_mask_shows_a_single_query_the_first_key_alone_and_is_put_back_after_an_error():
    q, k, v = (torch.randn(1, 1, n, 4) for n in (1, 5, 5))
    attend = torch.nn.functional.scaled_dot_product_attention
    assert not torch.allclose(attend(q, k, v), v[:, :, :1])
    with suppress(KeyboardInterrupt), past_tables.upper_left_mask():
        assert torch.allclose(torch.nn.functional.scaled_dot_product_attention(q, k, v), v[:, :, :1])
        raise KeyboardInterrupt
    assert torch.nn.functional.scaled_dot_product_attention is attend


def test_the_statistics_are_those_of_pandas():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = pd.Series(values.double().tolist()).describe().drop("count")
    assert past_tables.described(values) == pytest.approx(expected.tolist())
    assert list(expected.index) == documents.published("blog-past")["statistics"]


def test_the_posts_relative_column_is_its_own_quotient():
    table = rows_of.published_tables()
    large = table[(table["absolute"] > 1e-3) & (table["without"].abs() > 1)]
    assert list(large["absolute"] / large["without"].abs()) == pytest.approx(list(large["relative"]), rel=0.02)
    assert len(table) == 7 * 7


def test_ours_stand_beside_the_posts_and_what_was_left_out_is_empty(results):
    beside = results["beside"]
    assert len(beside) == 49
    assert (beside["here absolute"].isna() == beside["case"].str.contains("bits")).all()


def test_a_family_without_a_stand_in_is_run_untrained_and_its_verdict_is_in_kind(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "STANDINS", tmp_path)
    alone = past_tables.EXPERIMENT.run(settings.model_copy(update={"families": ("mpt",), "n_samples": 1}))
    assert alone.rows.groupby("family")["weights"].first().to_dict() == {"gpt2": "local", "mpt": "untrained"}
    more = pd.concat([alone.rows.assign(source=f"{k}", sample=f"{k}") for k in range(5)])
    real = {"architecture": "gpt2", "weights": "hub", "hub_id": "openai-community/gpt2", "parameters": 1}
    # The weights of another family count for nothing.
    for models, verdict in (
        ([real], "reproduced"), ([real | {"weights": "untrained"}], "reproduced in kind"),
        ([real, {"architecture": "mpt", "weights": "untrained", "parameters": 1}], "reproduced"),
    ):
        assert measures.CHECKS["gpt2-compatible"](results_of(more, models=models)).verdict == verdict


# Verdicts


def test_the_two_relative_differences_are_compared_where_the_page_shows_both(results):
    cells = [("GPT-2", "max", 1.0, 4.0), ("MPT", "std", 1.0, 2340.0), ("Falcon", "min", 0.0, 5.0)]
    shown = pd.DataFrame(cells, columns=["case", "statistic", "here relative", "here by element"])
    assert rows_of.apart(shown)["apart"].tolist() == [4.0, 2340.0]
    # Control: what the page does not show, however far apart.
    assert results_of(results["past_tables"].assign(**{"element max": 1e9, "family": "llama"}))["apart"].empty


def test_the_ratio_of_falcons_two_tables_is_told_beside_the_posts(results):
    def four_over_eight(*quantizations: str) -> str:
        rows = pd.concat(
            results["past_tables"].assign(quantization=name, **{"absolute mean": 3.0 if name == "4bit" else 2.0})
            for name in quantizations
        )
        return measures.CHECKS["falcon-cannot"](results_of(rows)).here

    assert "published 2.4, here 1.5" in four_over_eight("4bit", "8bit")
    assert "published 2.4, here not run" in four_over_eight("4bit")
