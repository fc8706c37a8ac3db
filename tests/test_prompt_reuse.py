"""The experiments of the forum thread on cache reuse, on small checkpoints in a local folder."""

import dataclasses

import pandas as pd
import pytest
import torch
from planted import changed, moved_to
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvbook import paths
from kvbook.errors import UserError
from kvbook.measuring import agreement, caches
from kvbook.models import loading, tokenizers
from kvreport.chapters.prompt_reuse import (
    claims,
    continuations,
    figures,
    first_layer,
    split_keys,
    statements,
    tables,
    tokenizer_boundaries,
)
from kvreport.chapters.prompt_reuse.results import Results
from kvreport.chapters.prompt_reuse.settings import PromptReuseSettings
from kvreport.publishing import documents, judging
from kvreport.publishing import statements as checking

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
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
            "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2,
    }
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
        n_prompts=0, n_positions=12, n_new_tokens=8, dtypes=("float32", "bfloat16"),
    )


@pytest.fixture(scope="module")
def results(settings):
    return Results.of(settings)


@pytest.fixture(scope="module")
def split(results):
    return results.split


@pytest.fixture(scope="module")
def layer(results):
    return results.layer


@pytest.fixture(scope="module")
def reuse(results):
    return results.reuse


@pytest.fixture(scope="module")
def cuts(results):
    return results.cuts


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


def test_the_published_numbers_of_elements_are_those_of_the_true_shapes(results):
    table = results.counts
    assert table["elements"].tolist() == table["published"].tolist() == [75776, 35328]
    assert (table["tokens"] == table["prompt"] + table["response"]).all()
    # Control: without the second begin-of-text the count would be another.
    assert table["per_token"].iloc[0] * (table["tokens"].iloc[0] - 1) != 75776


def test_the_table_of_counts_shows_no_name_of_the_code(results):
    table = results.counts
    shown = tables.counts_shown(table)
    assert not any("_" in name for name in shown.columns)
    assert any("_" in name for name in table.columns)
    assert shown["elements per token"].equals(table["per_token"])


def test_with_equal_row_counts_no_first_layer_key_differs(results):
    rows = results.rows_fed
    assert rows.loc[rows["variant"] == split_keys.FULL_ROWS, "n_differing"].sum() == 0


# Texts


def test_the_vocabulary_joins_words_with_the_stop_and_the_prompts_show_it(results):
    runs = results.written
    joined = runs[runs["case"] == continuations.JOINED]
    assert "get" in set(joined["item"])
    assert joined["seam"].all()
    assert (joined["prompt_there"] == "." + joined["item"]).all()
    # Control: put behind the prefix as ids, the same words have no seam.
    assert not runs.loc[runs["case"] == continuations.CONTINUED, "seam"].any()


def test_with_a_seam_the_model_is_fed_one_token_too_few(results):
    runs = results.written
    joined = runs[(runs["case"] == continuations.JOINED)].set_index("way")
    needed = joined["prompt_tokens"] - joined["shared_tokens"]
    assert (joined["fed_tokens"] == needed)[continuations.SAFE].all()
    assert (joined["fed_tokens"] == needed - 1)[continuations.POSTED].all()


def test_safe_reuse_restores_the_tokens_in_fp32_and_reuse_as_it_is_does_not(results):
    runs = results.written.query("dtype == 'float32'")
    assert runs.loc[runs["way"] == continuations.SAFE, "equal"].all()
    assert runs.loc[(runs["way"] == continuations.POSTED) & (runs["case"] == continuations.CONTINUED), "equal"].all()
    seams_posted = runs[(runs["way"] == continuations.POSTED) & (runs["case"] == continuations.JOINED)]
    assert not seams_posted["equal"].all()


def test_a_cache_as_long_as_the_prompt_is_fed_the_whole_prompt_again(results):
    runs = results.written
    whole = runs[(runs["case"] == continuations.WHOLE)].set_index("way")
    assert (whole.loc[continuations.POSTED, "fed_tokens"] == whole.loc[continuations.POSTED, "prompt_tokens"]).all()
    assert (whole.loc[continuations.SAFE, "fed_tokens"] == 1).all()
    assert set(whole["cache"]) == {"", "dynamic", "static"}


def test_texts_side_by_side_are_marked_where_they_part_and_nowhere_else(results):
    runs = results.written
    table = tables.side_by_side(runs, (continuations.JOINED,))
    for row in table.itertuples(index=False):
        plain, posted = row[2], row[3]
        assert tables.MARK not in plain
        before = posted.partition(tables.MARK)[0]
        assert plain == posted if tables.MARK not in posted else plain.startswith(before)


def test_one_text_has_a_seam_after_its_space_and_none_before(settings, folders):
    tokenizer = loading.tokenizer(str(folders["llama"]))
    asked = settings.model_copy(update={"n_prompts": 3})
    items = {(item.case, item.name): item for item in continuations.question_items(asked, tokenizer)}
    seams = []
    for question in continuations.questions(asked):
        after, before = (items[case, question] for case in (continuations.DOCUMENTED, continuations.SPACE))
        assert after.ids == before.ids
        assert caches.shared_length(before.prefix_ids, before.ids) == len(before.prefix_ids)
        seams.append(caches.shared_length(after.prefix_ids, after.ids) < len(after.prefix_ids))
    # Control: this vocabulary joins the space with some first words, so the other cut is seen to matter.
    assert any(seams)


def test_seeds_share_no_question_and_what_is_not_there_is_refused(settings):
    taken = [continuations.questions(settings.model_copy(update={"n_prompts": 20, "seed": seed})) for seed in range(3)]
    assert len({question for of_seed in taken for question in of_seed}) == 60
    with pytest.raises(UserError, match="60 questions") as error:
        continuations.questions(settings.model_copy(update={"n_prompts": 20, "seed": 3}))
    assert "\n" not in str(error.value)


def test_white_space_can_be_seen():
    assert tables.shown(" a\n\tb  c d ") == "␣a⏎⇥b␣␣c d␣"


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
    assert tokenizer_boundaries.kind_of(text, cut) == place


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


def test_shares_of_cuts_equal_a_mean_written_out(results, cuts):
    shares = results.cut_shares
    rows = cuts.rows[cuts.rows["tokenizer"] == "gpt2-style"]
    found = shares[(shares["tokenizer"] == "gpt2-style") & (shares["place"] == "anywhere")]["estimate"].iloc[0]
    assert found.value == pytest.approx(1 - rows["safe"].mean())
    assert found.low <= found.value <= found.high


def test_a_share_without_exception_still_has_an_interval(cuts):
    always = tables.cut_shares(cuts.rows.assign(safe=1))
    estimate = always.loc[always["place"] == "anywhere", "estimate"].iloc[0]
    assert (estimate.value, estimate.low) == (0, 0)
    assert estimate.high > 0.1


# Verdicts


def word(results: Results, claim: str, **rows: pd.DataFrame) -> str:
    return claims.CHECKS[claim](changed(results, **rows)).verdict


def test_every_claim_gets_a_verdict_and_each_verdict_its_numbers(results):
    table = claims.CLAIMS.judged(results)
    assert len(table) == len(documents.published("forum-reuse")["claims"]) == 3
    assert table["here"].str.contains(r"\d").all()


def test_verdicts_on_these_rows(results):
    # The vocabulary has no word that the thread's own prompts would join with the full stop.
    assert word(results, "reused-cache-changes-text") == "not run"


@pytest.mark.parametrize(("differing", "expected"), [(5, "reproduced in kind"), (0, "refuted in kind")])
def test_differing_keys_are_seen_and_so_is_their_absence(results, differing, expected):
    rows = results.layer.rows.assign(n_differing=differing)
    assert word(results, "first-layer-differs", layer=rows) == expected


def test_the_first_layer_is_judged_in_the_threads_dtype_alone(results):
    rows = results.layer.rows
    fine = rows.assign(n_differing=(rows["dtype"] == "float32") * 3)
    assert word(results, "first-layer-differs", layer=fine) == "reproduced in kind"
    elsewhere = rows.assign(n_differing=((rows["dtype"] == "float32") & (rows["rows_fed"] == 1)) * 3)
    assert word(results, "first-layer-differs", layer=elsewhere) == "undecided"
    coarse = rows.assign(n_differing=(rows["dtype"] == "bfloat16") * 3)
    assert word(results, "first-layer-differs", layer=coarse) == "refuted in kind"
    assert word(results, "first-layer-differs", layer=rows[rows["dtype"] != "float32"]) == "not run"


def with_tokens(reuse: pd.DataFrame, where: pd.Series, like_no_reuse: bool) -> pd.DataFrame:
    """Give runs the tokens of their run without reuse, or others."""
    keys = ["model", "dtype", "case", "item", "step"]
    plain = reuse[reuse["way"] == continuations.NO_REUSE].set_index(keys)["token"]
    changed = reuse.copy()
    # A run that ended early has no counterpart for each step; what it lacks is filled with a token of its own.
    tokens = plain.reindex(pd.MultiIndex.from_frame(changed.loc[where, keys])).fillna(-1).astype(int)
    changed.loc[where, "token"] = tokens.to_numpy() if like_no_reuse else -2
    return changed


def with_mismatch(results: Results, **rows: pd.DataFrame) -> Results:
    """Give results in whose vocabulary the thread's own prompts change the prefix's ids."""
    results = changed(results, **rows)
    results.__dict__["written"] = results.written.assign(seam=True)
    return results


def test_the_threads_own_prompts_decide_where_their_ids_leave_the_prefixs(results):
    rows = results.reuse.rows
    posted = rows["way"] == continuations.POSTED
    check = claims.CHECKS["reused-cache-changes-text"]
    for like, expected in ((True, "refuted in kind"), (False, "reproduced in kind")):
        reuse = with_tokens(rows, posted, like)
        assert check(with_mismatch(results, reuse=reuse)).verdict == expected
        assert check(changed(results, reuse=reuse)).verdict == "not run"


def four_prompts(results: Results, mismatched: dict[str, bool], continued: dict[str, bool]) -> Results:
    """Give results of four prompts of each kind whose tokens are equal, by dtype, or not."""
    results = dataclasses.replace(results)
    runs = [
        {"case": case, "way": continuations.POSTED, "seam": case == continuations.JOINED, "dtype": dtype,
            "item": str(item),
         "equal": equal[dtype]}
        for case, equal in ((continuations.JOINED, mismatched), (continuations.CONTINUED, continued))
        for dtype in equal
        for item in range(4)
    ]
    results.__dict__["written"] = pd.DataFrame(runs)
    return results


@pytest.mark.parametrize(
    ("mismatched", "continued", "expected"),
    [
        ((False, False), (True, True), "plausible cause"),
        # Rounding adds to the mismatch, and does not take its place.
        ((False, False), (True, False), "plausible cause"),
        ((True, False), (True, False), "reproduced in kind"),
        # Ids that continue and still give other tokens in the finest dtype would be no matter of ids.
        ((False, False), (False, False), "refuted in kind"),
        ((True, True), (True, True), "undecided"),
    ],
)
def test_precision_explains_what_the_finest_dtype_does_not_show(results, mismatched, continued, expected):
    dtypes = ("float32", "bfloat16")
    planted = four_prompts(
        results, dict(zip(dtypes, mismatched, strict=True)), dict(zip(dtypes, continued, strict=True))
    )
    found = claims.CHECKS["precision-explains"](planted)
    assert found.verdict == expected
    assert found.n == "4 prompts (few)"
    planted.__dict__["written"] = planted.written[planted.written["item"] < "3"]
    assert claims.CHECKS["precision-explains"](planted).verdict == "undecided"


def test_a_cause_of_a_symptom_that_was_not_seen_is_plausible_at_most(results):
    planted = four_prompts(results, {"float32": False, "bfloat16": False}, {"float32": True, "bfloat16": True})
    check = claims.CHECKS["precision-explains"]
    evidence = dataclasses.replace(check.measure(planted), weights="hub")
    assert judging.judge(check.rule, evidence).verdict == "plausible cause"
    # Control: had the thread's own prompts shown it.
    assert judging.judge(dataclasses.replace(check.rule, unseen=""), evidence).verdict == "other cause"


def test_rounding_is_told_for_each_case_whose_ids_continue(results):
    planted = four_prompts(results, {"float32": False, "bfloat16": False}, {"float32": True, "bfloat16": True})
    rows = planted.written
    continued = rows[rows["case"] == continuations.CONTINUED]
    # Neither the corpus nor a cache of the whole prompt is counted, nor a prompt whose ids do not continue.
    others = [
        continued.assign(case=case, equal=False)
        for case in (continuations.CHAT, continuations.CORPUS, continuations.WHOLE)
    ]
    own = continued.assign(case=continuations.THREAD, equal=False, seam=True)
    planted.__dict__["written"] = pd.concat([rows, *others, own])
    said = claims.CHECKS["precision-explains"](planted).here
    assert "differ in 4 of 8 runs in coarser dtypes (ids continued 0 of 4, chat template, system turn 4 of 4)" in said
    # Control: the thread's own prompts where their ids continue.
    planted.__dict__["written"] = pd.concat([rows, *others, own.assign(seam=False)])
    assert "differ in 8 of 12 runs" in claims.CHECKS["precision-explains"](planted).here


def test_a_systems_turn_is_a_prefix_of_the_chat_in_ids(folders):
    tokenizer = loading.tokenizer(str(folders["qwen2"]))
    items = [item for item in continuations.posted_items(tokenizer) if item.case == continuations.CHAT]
    assert [item.name for item in items] == ["0", "1"]
    assert all(item.ids[: len(item.prefix_ids)] == item.prefix_ids for item in items)
    assert len({len(item.ids) for item in items}) > 1
    # Controls: no template, and one that refuses a system's turn.
    for template in (None, "{{ raise_exception('no system here') }}"):
        tokenizer.chat_template = template
        assert continuations.CHAT not in {item.case for item in continuations.posted_items(tokenizer)}


# Statements


def checked(name: str, results: Results) -> str:
    return checking.check(statements.STATEMENTS[name], results).outcome


def with_texts(equal: dict[tuple[str, str, str], bool], n: int = 40, seam: bool = True) -> Results:
    """Give results of prompts whose tokens are equal or not, by case, way and dtype."""
    results = Results(None, None, None, None)
    rows = [
        {"model": "small", "case": case, "way": way, "dtype": dtype, "item": str(item), "equal": same,
         "seam": seam and case == continuations.DOCUMENTED}
        for (case, way, dtype), same in equal.items() for item in range(n)
    ]
    results.__dict__["written"] = pd.DataFrame(rows)
    return results


@pytest.mark.parametrize(
    ("name", "case", "way", "dtype", "same"),
    [
        ("recipe-changes-text", continuations.DOCUMENTED, continuations.POSTED, "float32", False),
        ("cut-before-the-space-keeps", continuations.SPACE, continuations.POSTED, "float32", True),
        ("template-keeps", continuations.CHAT, continuations.POSTED, "float32", True),
        ("common-prefix-restores", continuations.DOCUMENTED, continuations.SAFE, "float32", True),
    ],
)
def test_a_statement_on_texts_holds_on_its_rows_and_fails_on_the_contrary(name, case, way, dtype, same):
    assert checked(name, with_texts({(case, way, dtype): same})) == "holds"
    assert checked(name, with_texts({(case, way, dtype): not same})) == "fails"
    assert checked(name, with_texts({(case, way, dtype): same}, n=3)) == "not resolved"
    other = {(continuations.THREAD, way, dtype): same}
    assert checked(name, with_texts(other)) == "not run"


@pytest.mark.parametrize(
    "name",
    [
        "any-cut", "cut-after-a-space", "cut-before-a-space", "first-layer-ignores-the-cache",
        "first-layer-at-the-threads-counts", "first-layer-at-some-counts", "equal-query-lengths-equal-keys",
        "deeper-layers-differ", "both-switches-leave-none", "one-switch-leaves-some",
            "first-layer-at-the-threads-counts-in-bf16",
    ],
)
def test_where_texts_alone_are_recorded_nothing_else_is_said(name):
    assert checked(name, with_texts({(continuations.THREAD, continuations.POSTED, "float32"): True})) == "not run"


def test_ids_that_do_not_continue_are_counted_by_prompt():
    rows = {(continuations.DOCUMENTED, continuations.POSTED, "float32"): False}
    assert checked("ids-do-not-continue", with_texts(rows)) == "holds"
    assert checked("ids-do-not-continue", with_texts(rows, seam=False)) == "fails"


def test_rounding_in_bf16_needs_a_prompt_that_differs_in_either_case():
    cases = (continuations.SPACE, continuations.CHAT)
    rows = {(case, continuations.POSTED, "bfloat16"): False for case in cases}
    assert checked("rounding-in-bf16", with_texts(rows)) == "holds"
    for case in cases:
        assert (
            checked("rounding-in-bf16", with_texts(rows | {(case, continuations.POSTED, "bfloat16"): True})) == "fails"
        )


def test_statements_on_keys_follow_their_rows(results):
    assert checked("first-layer-ignores-the-cache", results) == "holds"
    assert checked("equal-query-lengths-equal-keys", results) == "holds"
    assert checked("whole-prompt-fed-again", results) == "holds"
    # Controls: a first layer that sees the cache, a switch that helps, and a prompt that is fed in part.
    split, layer = results.split.rows, results.layer.rows
    seen = split.assign(n_differing=split["n_differing"] + (split["variant"] == split_keys.OVERWRITTEN))
    assert checked("first-layer-ignores-the-cache", changed(results, split=seen)) == "fails"
    helped = split.assign(n_differing=(split["variant"] == split_keys.POSTED) * 3)
    assert checked("both-switches-leave-none", changed(results, split=helped)) == "holds"
    assert checked("both-switches-leave-none", changed(results, split=split.assign(n_differing=1))) == "fails"
    assert checked("equal-query-lengths-equal-keys", changed(results, layer=layer.assign(n_differing=1))) == "fails"
    partly = results.reuse.rows.assign(fed_tokens=1)
    assert checked("whole-prompt-fed-again", changed(results, reuse=partly)) == "fails"


def test_deeper_layers_are_counted_without_the_first(results):
    split = results.split.rows
    posted = (split["variant"] == split_keys.POSTED) & (split["part"] == "response")
    deep, first = (split.assign(n_differing=split["n_elements"] * (posted & layers))
                   for layers in (split["layer"] > 0, split["layer"] == 0))
    for rows, outcome, said in ((deep, "holds", "100%"), (first, "fails", "0%")):
        planted = changed(results, split=rows)
        assert checked("deeper-layers-differ", planted) == outcome
        assert statements.NUMBERS["differing_bf16"](planted) == said


# What is planted on one maker's processor: how many elements differ where the thread's lengths are fed, and under a
# switch.
ON_ONE = {
    "first-layer-at-the-threads-counts": ("Intel", "layer", lambda rows: 3, lambda rows: 0),
    "first-layer-at-the-threads-counts-on-amd": ("AMD", "layer", lambda rows: 0, lambda rows: 3),
    "one-switch-leaves-some": ("Intel", "split", lambda rows: 3, lambda rows: 0),
    "one-switch-is-enough-on-amd": ("AMD", "split", lambda rows: 0, lambda rows: 3),
    "linear-layers-are-not-on-amd": (
        "AMD", "split", lambda rows: 3, lambda rows: (rows["variant"] == split_keys.FULL_ROWS) * 3
    ),
}


@pytest.mark.parametrize("name", ON_ONE)
def test_a_statement_on_keys_of_one_processor_follows_its_rows_and_says_nothing_of_another(results, name):
    maker, which, lawful, contrary = ON_ONE[name]
    rows = getattr(results, which).rows
    for count, outcome in ((lawful, "holds"), (contrary, "fails")):
        planted = changed(results, **{which: rows.assign(n_differing=count(rows))})
        assert checked(name, moved_to(maker, planted)) == outcome
    assert checked(name, moved_to("another", planted)) == "not run"


def test_keys_in_bf16_at_the_threads_lengths_are_counted_apart(results):
    rows = results.layer.rows
    fine = rows.assign(n_differing=(rows["dtype"] == "float32") * 3)
    assert checked("first-layer-at-the-threads-counts-in-bf16", changed(results, layer=fine)) == "holds"
    coarse = rows.assign(n_differing=(rows["dtype"] == "bfloat16") * 3)
    assert checked("first-layer-at-the-threads-counts-in-bf16", changed(results, layer=coarse)) == "fails"


def test_the_first_layer_has_a_panel_for_each_processor(results):
    runs = [moved_to(name, results).layer for name in ("one", "another")]
    fed = tables.rows_fed_by_processor(runs)
    assert list(dict.fromkeys(fed["processor"])) == ["one", "another"]
    drawn = figures.figure_rows_fed(fed, results.published_shares).axes
    assert [ax.get_title(loc="left") for ax in drawn] == ["one", "another"]
    shares = fed.loc[(fed["processor"] == "one") & (fed["variant"] == split_keys.POSTED), "share"]
    assert sum(len(line.get_xdata()) for line in drawn[0].lines) == len(shares) + len(results.published_shares)


def test_both_switches_leave_no_difference_in_two_parts(llama, ids):
    with torch.inference_mode():
        whole = llama(ids, use_cache=True).past_key_values
        both = split_keys.in_two_parts(llama, ids, 23, split_keys.BOTH)
        differing = [row["n_differing"] for row in split_keys.compare(whole, both, 23) if row["part"] == "prompt"]
        assert sum(differing) == 0
        # Control: with the prompt's own pass its cache is another one where that pass has other bits, and here its rows
        # are.
        other = split_keys.in_two_parts(llama, ids.flip(1), 23, split_keys.BOTH)
        assert any(row["n_differing"] for row in split_keys.compare(whole, other, 23))


@pytest.mark.parametrize(("safe", "outcome"), [(0, "holds"), (1, "fails")])
def test_cuts_that_change_ids_are_told_from_cuts_that_do_not(results, cuts, safe, outcome):
    planted = changed(results, cuts=cuts.rows.assign(safe=safe))
    assert checked("any-cut", planted) == outcome


def test_the_figure_draws_each_way_and_the_book_behind(results):
    table = results.outcomes
    own = figures.figure_outcomes(table).axes[0]
    assert len(own.containers) == len(own.texts) == len(table)
    both = figures.figure_outcomes(table, table.head(3)).axes[0]
    assert len(both.lines) - len(own.lines) == 3


@pytest.mark.parametrize(
    ("experiment", "change"),
    [
        (continuations, {"second_model": "/nowhere"}),
        (continuations, {"corpus": "/nowhere"}),
        (continuations, {"n_samples": 99}),
        (continuations, {"n_new_tokens": 500}),
        (split_keys, {"dtypes": ("float32", "float8")}),
        (first_layer, {"device": "cuda:99"}),
        (tokenizer_boundaries, {"corpus": "/nowhere"}),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(
    settings, tmp_path, monkeypatch, experiment, change
):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    with pytest.raises(UserError) as error:
        experiment.EXPERIMENT.run(settings.model_copy(update=change))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_model_too_short_for_the_posted_text_is_refused_before_anything_is_written(
    settings, llama_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    with pytest.raises(UserError, match="more than the context"):
        split_keys.EXPERIMENT.run(settings.model_copy(update={"second_model": str(llama_folder)}))
    assert not (tmp_path / "runs").exists()
