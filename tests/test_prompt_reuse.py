"""The experiments of the forum thread on cache reuse, on small checkpoints in a local folder."""

import json

import finding_rules
import pandas as pd
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvbook import paths
from kvbook.errors import UserError
from kvbook.measuring import agreement
from kvbook.models import tokenizers
from kvreport.chapters.prompt_reuse import claims as forum_reuse
from kvreport.chapters.prompt_reuse import continuations as prompt_reuse
from kvreport.chapters.prompt_reuse import first_layer, split_keys
from kvreport.chapters.prompt_reuse import tables as analysis
from kvreport.chapters.prompt_reuse import tokenizer_boundaries as seams
from kvreport.chapters.prompt_reuse import words as text
from kvreport.chapters.prompt_reuse.settings import PromptReuseSettings
from kvreport.publishing import documents
from kvreport.publishing import verdicts as ledger

# Full stop and word are one piece in this text, so its vocabulary joins them as Llama-3's does.
TEXT = "def f(x):\n    return x.get(1).set(2).append(3)\n# You are a helpful assistant. What is it? Help me.\n"


@pytest.fixture(scope="module")
def bpes():
    return {style: tokenizers.train_bpe(style, [TEXT] * 4, 420) for style in ("llama3", "gpt2")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bpes):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 420, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2,
    }  # fmt: skip
    made = {}
    for family, config, model in (
        ("llama", LlamaConfig, LlamaForCausalLM),
        ("qwen2", Qwen2Config, Qwen2ForCausalLM),
    ):
        torch.manual_seed(4)
        folder = tmp_path_factory.mktemp("reuse") / f"small-{family}"
        model(config(**shape)).save_pretrained(folder)
        tokenizers.for_family(bpes["llama3"], family, 512).save_pretrained(folder)
        made[family] = folder
    return made


@pytest.fixture(scope="module")
def settings(folders, text_folder):
    return PromptReuseSettings.checked(
        model=str(folders["llama"]), second_model=str(folders["qwen2"]), corpus=str(text_folder), n_samples=3,
        n_positions=12, n_new_tokens=8, dtypes=("float32", "bfloat16"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def split(settings):
    return split_keys.run(settings)


@pytest.fixture(scope="module")
def layer(settings):
    return first_layer.run(settings)


@pytest.fixture(scope="module")
def reuse(settings):
    return prompt_reuse.run(settings)


@pytest.fixture(scope="module")
def cuts(settings):
    return seams.run(settings)


# Keys and values


def test_the_posted_ids_have_a_second_begin_of_text_for_llama_alone(folders):
    from kvbook.models import loading

    for family, more in (("llama", 1), ("qwen2", 0)):
        tokenizer = loading.tokenizer(str(folders[family]))
        (prompt, posted), (_, single) = (split_keys.posted_ids(tokenizer, one_begin=one) for one in (False, True))
        assert posted.shape[1] - single.shape[1] == more
        assert (torch.cat([prompt, posted], 1) == 1).sum() == 2 * more


def test_every_layer_tensor_and_part_is_counted_once(split):
    keys = ["model", "dtype", "variant", "layer", "tensor", "part"]
    assert not split.rows.duplicated(keys).any()
    assert len(split.rows) == 2 * 2 * len(split_keys.VARIANTS) * 3 * 2 * 2
    row = split.rows[(split.rows["part"] == "prompt")].iloc[0]
    # 2 key heads of 8 dimensions.
    assert row["n_elements"] == 16 * row["n_prompt"]


def test_an_overwritten_cache_changes_deeper_layers_and_not_one_bit_of_the_first(split):
    response = split.rows[(split.rows["part"] == "response") & (split.rows["tensor"] == "keys")]
    posted, overwritten = (
        response[response["variant"] == variant].set_index(["model", "dtype", "layer"])
        for variant in (split_keys.POSTED, split_keys.OVERWRITTEN)
    )
    first = [rows.xs(0, level="layer")["n_differing"] for rows in (posted, overwritten)]
    assert (first[0] == first[1]).all()
    # By size, for rounding alone may give most elements other bits.
    assert (overwritten.xs(2, level="layer")["relative_rms"] > 0.1).all()
    assert (posted.xs(2, level="layer")["relative_rms"] < 0.05).all()


def test_equal_row_counts_take_any_difference_out_of_the_linear_maps_and_are_put_back(llama, ids):
    with torch.inference_mode():
        whole = llama(ids, use_cache=True).past_key_values
        split = split_keys.in_two_parts(llama, ids, 23, split_keys.FULL_ROWS)
        assert torch.equal(whole.layers[0].keys, split.layers[0].keys)
        assert all("forward" not in vars(module) for module in llama.modules())
        # Control: rows at the wrong place are other keys, so the comparison can fail.
        assert not torch.equal(whole.layers[0].keys[:, :, 1:], split.layers[0].keys[:, :, :-1])


def test_ulps_count_the_numbers_between():
    one = torch.tensor([1.0, 1.0, -1.0, 0.0, 1e-45, 2.0])
    other = torch.tensor([1.0, 1.0 + 2**-23, -1.0 - 2**-23, -0.0, -1e-45, 2.0 + 2**-21])
    assert agreement.ulps(one, other).tolist() == [0, 1, 1, 0, 2, 2]
    half = torch.tensor([1.0, -3.0], dtype=torch.bfloat16)
    assert agreement.ulps(half, torch.tensor([1.0078125, -3.03125], dtype=torch.bfloat16)).tolist() == [1, 2]
    with pytest.raises(ValueError, match="bfloat16"):
        agreement.ulps(half, half.float())


def test_the_published_numbers_of_elements_are_those_of_the_true_shapes(layer):
    table = analysis.count_arithmetic(layer.rows, layer.about["shapes"])
    assert table["elements"].tolist() == table["published"].tolist() == [75776, 35328]
    assert (table["tokens"] == table["prompt"] + table["response"]).all()
    # Control: without the second begin-of-text the count would be another.
    assert table["per_token"].iloc[0] * (table["tokens"].iloc[0] - 1) != 75776


def test_the_table_of_counts_shows_no_name_of_the_code(layer):
    table = analysis.count_arithmetic(layer.rows, layer.about["shapes"])
    shown = text.counts_shown(table)
    assert not any("_" in name for name in shown.columns)
    assert any("_" in name for name in table.columns)
    assert shown["elements a token"].equals(table["per_token"])


def test_with_equal_row_counts_no_first_layer_key_differs(layer):
    rows = analysis.rows_fed_table(layer.rows)
    assert rows.loc[rows["variant"] == split_keys.FULL_ROWS, "n_differing"].sum() == 0


# Texts


def test_the_vocabulary_joins_words_with_the_stop_and_the_prompts_show_it(reuse):
    runs = analysis.runs(reuse.rows)
    joined = runs[runs["case"] == prompt_reuse.JOINED]
    assert "get" in set(joined["item"])
    assert joined["seam"].all()
    assert (joined["prompt_there"] == "." + joined["item"]).all()
    # Control: put behind the prefix as ids, the same words have no seam.
    assert not runs.loc[runs["case"] == prompt_reuse.CONTINUED, "seam"].any()


def test_with_a_seam_the_model_is_fed_one_token_too_few(reuse):
    runs = analysis.runs(reuse.rows)
    joined = runs[(runs["case"] == prompt_reuse.JOINED)].set_index("way")
    needed = joined["prompt_tokens"] - joined["shared_tokens"]
    assert (joined["fed_tokens"] == needed)[prompt_reuse.SAFE].all()
    assert (joined["fed_tokens"] == needed - 1)[prompt_reuse.POSTED].all()


def test_safe_reuse_restores_the_tokens_in_fp32_and_reuse_as_it_is_does_not(reuse):
    runs = analysis.runs(reuse.rows).query("dtype == 'float32'")
    assert runs.loc[runs["way"] == prompt_reuse.SAFE, "equal"].all()
    assert runs.loc[(runs["way"] == prompt_reuse.POSTED) & (runs["case"] == prompt_reuse.CONTINUED), "equal"].all()
    seams_posted = runs[(runs["way"] == prompt_reuse.POSTED) & (runs["case"] == prompt_reuse.JOINED)]
    assert not seams_posted["equal"].all()


def test_a_cache_as_long_as_the_prompt_is_fed_the_whole_prompt_again(reuse):
    runs = analysis.runs(reuse.rows)
    whole = runs[(runs["case"] == prompt_reuse.WHOLE)].set_index("way")
    assert (whole.loc[prompt_reuse.POSTED, "fed_tokens"] == whole.loc[prompt_reuse.POSTED, "prompt_tokens"]).all()
    assert (whole.loc[prompt_reuse.SAFE, "fed_tokens"] == 1).all()
    assert set(whole["cache"]) == {"", "dynamic", "static"}


def test_texts_side_by_side_are_marked_where_they_part_and_nowhere_else(reuse):
    runs = analysis.runs(reuse.rows)
    table = analysis.side_by_side(runs, (prompt_reuse.JOINED,))
    for row in table.itertuples(index=False):
        plain, posted = row[2], row[3]
        assert analysis.MARK not in plain
        before = posted.partition(analysis.MARK)[0]
        assert plain == posted if analysis.MARK not in posted else plain.startswith(before)


def test_white_space_can_be_seen():
    assert analysis.shown(" a\n\tb  c d ") == "␣a⏎⇥b␣␣c d␣"


# Cuts


@pytest.mark.parametrize(
    ("text", "cut", "place"),
    [
        ("word", 2, "inside a word"),
        ("a word", 2, "after a space"),
        ("a word", 1, "before a space"),
        ("a\nword", 2, "after a line break"),
        ("a.word", 2, "mark before a letter"),
        ("a.)", 2, "elsewhere"),
    ],
)
def test_a_cut_is_named_by_its_two_characters(text, cut, place):
    assert seams.kind_of(text, cut) == place


def test_a_stop_before_a_word_is_a_seam_for_the_llama3_pattern_alone(bpes):
    text, cut = "x.get(3)", 2
    safe = {}
    for style, bpe in bpes.items():
        part, whole = bpe.encode(text[:cut]).ids, bpe.encode(text).ids
        safe[style] = whole[: len(part)] == part
    assert safe == {"llama3": False, "gpt2": True}


def test_every_file_and_vocabulary_is_cut_at_the_same_places(cuts, settings):
    counts = cuts.rows.groupby(["source", "tokenizer"]).size().unstack()
    assert counts.eq(counts.iloc[:, 0], axis=0).all(axis=None)
    assert {"gpt2-style", "llama3-style", "small-llama", "small-qwen2"} == set(counts.columns)
    assert counts.max().max() <= settings.n_positions


def test_shares_of_cuts_equal_a_mean_written_out(cuts):
    shares = analysis.cut_shares(cuts.rows)
    rows = cuts.rows[cuts.rows["tokenizer"] == "gpt2-style"]
    found = shares[(shares["tokenizer"] == "gpt2-style") & (shares["place"] == "anywhere")]["estimate"].iloc[0]
    assert found.value == pytest.approx(1 - rows["safe"].mean())
    assert found.low <= found.value <= found.high


def test_a_share_without_exception_still_has_an_interval(cuts):
    always = analysis.cut_shares(cuts.rows.assign(safe=1))
    estimate = always.loc[always["place"] == "anywhere", "estimate"].iloc[0]
    assert (estimate.value, estimate.low) == (0, 0)
    assert estimate.high > 0.1


# Verdicts


@pytest.fixture(scope="module")
def evidence(split, layer, reuse):
    return {
        "split": split.rows, "first_layer": layer.rows, "reuse": reuse.rows, "shapes": layer.about["shapes"]
    }  # fmt: skip


def word(evidence, claim: str, **changes) -> str:
    return forum_reuse.CHECKS[claim](forum_reuse.Evidence(**evidence | changes)).verdict


def test_every_claim_gets_a_verdict_and_the_ledger_of_all_documents_holds_them(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path)
    (tmp_path / "claims").mkdir()
    other = {"document": "another", "claim": "c", "published": "p", "here": "1", "verdict": "not run"}
    (tmp_path / "claims" / "another.json").write_text(json.dumps([other]))
    table = ledger.judge("forum-reuse", forum_reuse.CHECKS, forum_reuse.Evidence(**evidence))
    assert len(table) == len(documents.published("forum-reuse")["claims"]) == 9
    assert table["here"].str.contains(r"\d").all()
    everything = json.loads((tmp_path / "claims.json").read_text())
    assert everything[0] == other
    assert everything[1:] == table.to_dict("records")
    assert not list(tmp_path.rglob("*.partial"))
    # Judged again, a document replaces its own verdicts and no other's.
    ledger.judge("forum-reuse", forum_reuse.CHECKS, forum_reuse.Evidence(**evidence))
    assert len(json.loads((tmp_path / "claims.json").read_text())) == 10


def test_verdicts_on_these_rows(evidence):
    assert word(evidence, "element-counts") == "reproduced"
    assert word(evidence, "reuse-is-the-cause") == "other cause"
    assert word(evidence, "precision-explains") == "other cause"
    assert word(evidence, "answer-survives") == "needs the real weights"


def test_the_count_of_elements_is_refuted_by_another_shape(evidence):
    shorter = evidence["first_layer"].assign(n_elements=lambda rows: rows["n_elements"] - 1)
    assert word(evidence, "element-counts", first_layer=shorter) == "refuted"


@pytest.mark.parametrize(("differing", "expected"), [(5, "reproduced"), (0, "refuted")])
def test_differing_keys_are_seen_and_so_is_their_absence(evidence, differing, expected):
    rows = evidence["split"].assign(n_differing=differing)
    assert word(evidence, "split-changes-keys", split=rows) == expected
    rows = evidence["first_layer"].assign(n_differing=differing)
    found = word(evidence, "first-layer-differs", first_layer=rows)
    assert found == ("reproduced in kind" if differing else "refuted")


def test_keys_that_differ_in_a_coarser_dtype_alone_decide_nothing(evidence):
    rows = evidence["split"].assign(n_differing=lambda rows: (rows["dtype"] == "bfloat16") * 5)
    assert word(evidence, "split-changes-keys", split=rows) == "undecided"
    rows = evidence["split"].assign(n_differing=lambda rows: (rows["dtype"] == "float32") * 5)
    assert word(evidence, "split-changes-keys", split=rows) == "reproduced"


def test_a_first_layer_that_differs_at_other_row_counts_alone_decides_nothing(evidence):
    rows = evidence["first_layer"].assign(n_differing=lambda rows: (rows["rows_fed"] == 1) * 3)
    assert word(evidence, "first-layer-differs", first_layer=rows) == "undecided"


def test_were_the_cache_the_cause_overwriting_it_would_change_the_first_layer(evidence):
    rows = evidence["split"].copy()
    rows.loc[rows["variant"] == split_keys.OVERWRITTEN, "n_differing"] += 1
    assert word(evidence, "reuse-is-the-cause", split=rows) == "reproduced"


def with_tokens(reuse: pd.DataFrame, where: pd.Series, like_no_reuse: bool) -> pd.DataFrame:
    """Give runs the tokens of their run without reuse, or others."""
    keys = ["model", "dtype", "case", "item", "step"]
    plain = reuse[reuse["way"] == prompt_reuse.NO_REUSE].set_index(keys)["token"]
    changed = reuse.copy()
    # A run that ended early has no counterpart for each step; what it lacks is filled with a token of its own.
    tokens = plain.reindex(pd.MultiIndex.from_frame(changed.loc[where, keys])).fillna(-1).astype(int)
    changed.loc[where, "token"] = tokens.to_numpy() if like_no_reuse else -2
    return changed


def test_texts_that_are_equal_refute_what_different_ones_bear_out(evidence):
    rows = evidence["reuse"]
    posted = rows["way"] == prompt_reuse.POSTED
    equal, different = (with_tokens(rows, posted, like) for like in (True, False))
    assert word(evidence, "reused-cache-changes-text", reuse=equal) == "refuted"
    assert word(evidence, "reused-cache-changes-text", reuse=different) == "reproduced"
    assert word(evidence, "recipe-is-safe", reuse=equal) == "reproduced"
    assert word(evidence, "precision-explains", reuse=equal) == "undecided"
    # Ids that continue and still give other tokens in the finest dtype would be no matter of ids.
    assert word(evidence, "precision-explains", reuse=different) == "undecided"


def test_were_only_the_coarser_dtype_to_break_precision_would_explain_it(evidence):
    rows = evidence["reuse"]
    fine = with_tokens(rows, (rows["way"] == prompt_reuse.POSTED) & (rows["dtype"] == "float32"), like_no_reuse=True)
    broken = with_tokens(
        fine, (rows["way"] == prompt_reuse.POSTED) & (rows["dtype"] == "bfloat16"), like_no_reuse=False
    )
    assert word(evidence, "precision-explains", reuse=broken) == "reproduced"


def test_an_answer_that_is_there_is_found_and_so_is_the_complaint(evidence):
    rows = evidence["reuse"].copy()
    asked = (rows["case"] == prompt_reuse.THREAD) & (rows["step"] == 0)
    rows.loc[asked & (rows["way"] == prompt_reuse.NO_REUSE), "text"] = " Paris"
    assert word(evidence, "answer-survives", reuse=rows) == "refuted"
    rows.loc[asked & (rows["way"] == prompt_reuse.POSTED), "text"] = " incomplete"
    assert word(evidence, "answer-survives", reuse=rows) == "reproduced"


def test_a_static_cache_that_writes_other_tokens_is_seen(evidence):
    rows = evidence["reuse"]
    static = rows["cache"] == "static"
    assert word(evidence, "either-cache-kind", reuse=with_tokens(rows, static, like_no_reuse=False)) == "refuted"
    alike = with_tokens(rows, rows["way"] != prompt_reuse.NO_REUSE, like_no_reuse=True)
    assert word(evidence, "either-cache-kind", reuse=alike) == "reproduced"


def test_words_can_be_written_for_these_rows(split, layer, reuse, cuts):
    said = text.numbers(split.rows, layer.rows, reuse.rows, cuts.rows)
    assert all(isinstance(value, str) and value for value in said.values())
    captions = text.captions(split, layer, reuse, cuts)
    findings = text.findings(split.rows, layer.rows, reuse.rows, cuts.rows)
    assert finding_rules.broken(captions, findings) == []


@pytest.fixture
def found(split, layer, reuse, cuts):
    """Give a function from changed rows to the findings on them."""
    rows = {"split": split.rows, "first_layer": layer.rows, "reuse": reuse.rows, "cuts": cuts.rows}
    return lambda **changes: text.findings(**rows | changes)


def test_row_counts_are_blamed_only_where_keys_differ(found, layer):
    one = layer.rows.assign(n_differing=lambda r: r["rows_fed"].eq(1) * 3)
    said = found(first_layer=one)["fig-rows-fed"]
    assert ", 1 make first-layer keys differ; at the thread's own, 14 and 15, no element does" in said
    own = layer.rows.assign(n_differing=lambda r: (r["rows_fed"].eq(15) & (r["variant"] == split_keys.POSTED)) * 3)
    assert "15 make first-layer keys differ" in found(first_layer=own)["fig-rows-fed"]
    assert "no element does" not in found(first_layer=own)["fig-rows-fed"]
    assert "At none of" in found(first_layer=layer.rows.assign(n_differing=0))["fig-rows-fed"]


def test_layers_differ_by_as_much_and_in_as_many_series_as_the_rows_say(found, split):
    n = len(split.rows[["model", "dtype"]].drop_duplicates())
    roundoff = split.rows["dtype"].map(agreement.UNIT_ROUNDOFF)
    half = split.rows.assign(n_differing=lambda r: r["n_elements"] / 2, relative_rms=4 * roundoff)
    said = found(split=half)["fig-split-layers"]
    assert f"in all {n} pairs" in said
    assert "up to 4 unit roundoffs and in up to 50%" in said
    first = half.assign(n_differing=half["n_differing"].where(half["dtype"] == half["dtype"].iloc[0], 0))
    assert f"of {n} pairs" in found(split=first)["fig-split-layers"]
    none = split.rows.assign(n_differing=0, relative_rms=0.0)
    assert "no key or value of the response differs" in found(split=none)["fig-split-layers"]


def test_reuse_is_compared_over_the_cases_that_were_run_both_ways(found, reuse):
    table = analysis.runs(reuse.rows)
    safe = table[table["way"] == prompt_reuse.SAFE]
    n = int(table[table["way"] == prompt_reuse.POSTED]["case"].isin(safe["case"]).sum())
    assert n < (table["way"] == prompt_reuse.POSTED).sum()
    posted = reuse.rows["way"] == prompt_reuse.POSTED
    equal = with_tokens(reuse.rows, posted, like_no_reuse=True)
    assert f"in all {n} runs with the prefix's cache as it is" in found(reuse=equal)["fig-reuse-outcomes"]
    different = with_tokens(reuse.rows, posted, like_no_reuse=False)
    assert f"in 0 of {n} runs with the prefix's cache" in found(reuse=different)["fig-reuse-outcomes"]


def test_cuts_are_told_by_their_place_and_not_from_too_few_files(found, cuts):
    safe, unsafe = (found(cuts=cuts.rows.assign(safe=value))["fig-cut-shares"] for value in (1, 0))
    assert "in 0% of all cuts" in safe
    assert "in 100% of all cuts" in unsafe
    two = cuts.rows[cuts.rows["source"].isin(cuts.rows["source"].unique()[:2])]
    assert "too few files" in found(cuts=two)["fig-cut-shares"]


def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    for change in ({"second_model": "/nowhere"}, {"corpus": "/nowhere"}, {"n_samples": 99}, {"n_new_tokens": 500}):
        with pytest.raises(UserError) as error:
            prompt_reuse.run(settings.model_copy(update=change))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()
