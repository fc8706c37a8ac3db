"""The experiments of the forum thread on cache reuse, on small checkpoints in a local folder."""


import pandas as pd
import pytest
import torch
from made_up import run_of
from refusing import refusal
from small_models import LLAMAS, drawn
from transformers import AutoConfig

from kvbook.measuring import agreement
from kvbook.models import loading
from kvreport.chapters.prompt_reuse import PromptReuseSettings, continuations, measures, rows, split_keys, tables
from kvreport.chapters.prompt_reuse.continuations import kind_of
from kvreport.chapters.prompt_reuse.rows import AS_IS, CHAT, CONTINUED, DOCUMENTED, JOINED, SHARED, THREAD
from kvreport.publishing import found as found_in
from kvreport.publishing import statements

FP32, BF16 = "float32", "bfloat16"
SHAPE = LLAMAS | {
    "vocab_size": 2048, "num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": 2, "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save small checkpoints with the stand-ins' tokenizers, as a user's folders would hold them."""
    made = {}
    for family in ("llama", "qwen2"):
        made[family] = str(tmp_path_factory.mktemp("reuse") / f"small-{family}")
        drawn(4, AutoConfig.for_model(family, **SHAPE)).save_pretrained(made[family])
        loading.tokenizer(family).save_pretrained(made[family])
    return made


@pytest.fixture(scope="module")
def settings(folders, text_folder):
    with pytest.MonkeyPatch.context() as patch:
        # At its true width even one layer takes seconds.
        patch.setattr(split_keys, "_LENGTHS", (1, 4))
        yield PromptReuseSettings.checked(
            model=folders["llama"], second_model=folders["qwen2"], corpus=str(text_folder), n_samples=2, n_prompts=0,
            n_positions=12, n_new_tokens=2, dtypes=(FP32, BF16),
        )


# Keys and values


def test_the_posted_ids_have_a_second_begin_of_text_for_llama_alone(folders):
    for family, more in (("llama", 1), ("qwen2", 0)):
        tokenizer = loading.tokenizer(folders[family])
        (prompt, posted), (_, single) = (split_keys.posted_ids(tokenizer, one_begin=one) for one in (False, True))
        assert posted.shape[1] - single.shape[1] == more
        assert (torch.cat([prompt, posted], 1) == tokenizer.bos_token_id).sum() == 2 * more


def test_every_layer_tensor_and_part_is_counted_once(results):
    rows = results["split_keys"]
    assert not rows.duplicated(["model", "dtype", "variant", "layer", "tensor", "part"]).any()
    # 2 models and dtypes, 6 variants, 3 layers, keys and values, 2 parts.
    assert len(rows) == 2 * 2 * 6 * 3 * 2 * 2
    # 2 key heads of 8 dimensions.
    assert rows.query("part == 'prompt'").eval("n_elements == 16 * n_prompt").all()


def test_an_overwritten_cache_changes_deeper_layers_and_not_one_bit_of_the_first(results):
    response = results["split_keys"].query("part == 'response' and tensor == 'keys'")
    by = response.set_index(["variant", "layer", "model", "dtype"]).sort_index()
    posted, overwritten = (by.loc[variant] for variant in ("as posted", "cache overwritten"))
    assert posted.loc[0, "n_differing"].equals(overwritten.loc[0, "n_differing"])
    # By size, for rounding alone may change most elements.
    assert (overwritten.loc[2, "relative_rms"] > 0.1).all()
    assert (posted.loc[2, "relative_rms"] < 0.05).all()


def test_the_switches_give_the_whole_passs_rows_and_cache_and_leave_the_model_as_it_was(llama, ids):
    with torch.inference_mode():
        whole = llama(ids, use_cache=True).past_key_values
        as_many_rows = split_keys.in_two_parts(llama, ids, 23, rows.FULL_ROWS)
        again = llama(ids, use_cache=True).past_key_values
        # The last is a control: another text's cache is seen.
        both, of_other_ids = (split_keys.in_two_parts(llama, text, 23, rows.BOTH) for text in (ids, ids.flip(1)))
    assert torch.equal(whole.layers[0].keys, as_many_rows.layers[0].keys)
    assert torch.equal(whole.layers[5].keys, again.layers[5].keys)
    for split, differs in ((both, False), (of_other_ids, True)):
        compared = split_keys.compare(whole, split, 23)
        assert any(row["n_differing"] for row in compared if row["part"] == "prompt") == differs


def test_what_a_layer_with_a_window_has_forgotten_is_compared_with_nothing(ids):
    model = drawn(4, AutoConfig.for_model("mistral", **SHAPE, sliding_window=8))
    with torch.inference_mode():
        whole = split_keys.in_one_pass(model, ids)
        for variant in rows.VARIANTS:
            made = list(split_keys.compare(whole, split_keys.in_two_parts(model, ids, 23, variant), 23))
            cut_back = variant in (rows.WHOLE_CACHE, rows.BOTH)
            for part, n_tokens in (("prompt", 7 if cut_back else 23), ("response", ids.shape[1] - 23)):
                assert {row["n_elements"] for row in made if row["part"] == part} == {16 * n_tokens}
            # Rows that belong to other tokens would be far apart.
            assert all(row["relative_rms"] < 0.01 for row in made) == (variant != rows.OVERWRITTEN)


def test_ulps_count_the_numbers_between():
    one = torch.tensor([1.0, 1.0, -1.0, 0.0, 1e-45, 2.0])
    other = torch.tensor([1.0, 1.0 + 2**-23, -1.0 - 2**-23, -0.0, -1e-45, 2.0 + 2**-21])
    assert agreement.ulps(one, other).tolist() == [0, 1, 1, 0, 2, 2]
    half = torch.tensor([1.0, -3.0], dtype=torch.bfloat16)
    assert agreement.ulps(half, torch.tensor([1.0078125, -3.03125], dtype=torch.bfloat16)).tolist() == [1, 2]
    with pytest.raises(ValueError, match="bfloat16"):
        agreement.ulps(half, half.float())


def test_the_published_numbers_of_elements_are_those_of_the_true_shapes(results):
    table = tables.counts(results)
    assert table["elements"].tolist() == table["published"].tolist() == [75776, 35328]
    assert (table["tokens"] == table["prompt"] + table["response"]).all()
    # Control: without the second begin-of-text the count would be another.
    assert table["elements per token"].iloc[0] * (table["tokens"].iloc[0] - 1) != 75776


# Texts


def test_a_word_that_the_vocabulary_joins_with_the_stop_leaves_the_model_one_token_short(results):
    rows = results["continuations"]
    joined = rows[rows["case"] == JOINED].set_index("way")
    assert len(joined)
    assert joined["mismatch"].all()
    assert (joined["prompt_there"] == "." + joined["prompt"]).all()
    short = joined["prompt_tokens"] - joined["shared_tokens"] - joined["fed_tokens"]
    assert (short[SHARED] == 0).all()
    assert (short[AS_IS] == 1).all()
    # Control: where the ids of the same words follow the prefix's, they continue it.
    assert not rows.loc[rows["case"] == CONTINUED, "mismatch"].any()


def test_the_common_prefix_with_a_cache_as_long_as_the_prompt_leaves_one_token_to_feed(results):
    whole = results["continuations"].query("case == 'whole prompt'").set_index("way")
    assert (whole.loc[SHARED, "fed_tokens"] == 1).all()
    assert set(whole["cache"]) == {"", "dynamic", "static"}


def test_texts_side_by_side_are_marked_where_they_diverge_and_nowhere_else(results):
    table = tables.texts(results)
    assert table[AS_IS].str.contains(tables.MARK).any()
    for plain, posted in zip(table["no reuse"], table[AS_IS], strict=True):
        before, mark, _ = posted.partition(tables.MARK)
        assert tables.MARK not in plain
        assert plain.startswith(before) if mark else plain == posted
    assert tables.visible(" a\n\tb  c d ") == "␣a⏎⇥b␣␣c d␣"


def test_one_text_has_a_mismatch_after_its_space_and_none_before_nor_in_the_chat_template(settings, folders):
    asked = settings.model_copy(update={"n_prompts": 3})
    tokenizer = loading.tokenizer(folders["qwen2"])
    items = {(item.case, item.name): item for item in continuations.question_items(asked, tokenizer)}
    kept = {key: item.prefix_ids == item.ids[: len(item.prefix_ids)] for key, item in items.items()}
    for question in continuations.questions(asked):
        assert items[DOCUMENTED, question].ids == items["before the space", question].ids
        assert kept["before the space", question]
        assert kept[CHAT, question]
    # Control: this vocabulary joins the space with some first words, so the other cut is seen to matter.
    assert not all(kept[DOCUMENTED, question] for question in continuations.questions(asked))


def test_seeds_share_no_question_and_what_is_not_there_is_refused(settings):
    *three, fourth = (settings.model_copy(update={"n_prompts": 20, "seed": seed}) for seed in range(4))
    assert len({question for asked in three for question in continuations.questions(asked)}) == 60
    assert "60 questions" in refusal(continuations.questions, fourth)


def test_without_a_template_for_a_systems_turn_there_is_no_such_case(folders):
    tokenizer = loading.tokenizer(folders["qwen2"])
    for template, n_items in ((tokenizer.chat_template, 2), (None, 0), ("{{ raise_exception('no system here') }}", 0)):
        tokenizer.chat_template = template
        assert sum(item.case == CHAT for item in continuations.posted_items(tokenizer)) == n_items


def test_a_cut_is_named_by_its_two_characters():
    cuts = {
        "wo|rd": "inside a word", "a |word": "after a space", "a| word": "before a space",
        "a\n|word": "after a line break", "a.|word": "mark before a letter", "a.|)": "elsewhere",
    }
    assert {cut: kind_of(cut.replace("|", ""), cut.index("|")) for cut in cuts} == cuts


def test_every_file_and_vocabulary_is_cut_at_the_same_places(results, settings):
    counts = results["seams"].groupby(["source", "tokenizer"]).size().unstack()
    assert counts.eq(counts.iloc[:, 0], axis=0).all(axis=None)
    assert {"gpt2-style", "llama3-style", "small-llama", "small-qwen2"} == set(counts.columns)
    assert counts.max().max() <= settings.n_positions


# Sentences and claims


def of_texts(*kinds: tuple[str, str, str, bool], mismatch: tuple[str, ...] = (), n: int = 40) -> found_in.Found:
    """Make up n prompts of each case, way and dtype, with the tokens that they have without reuse or others."""
    rows = []
    for case, way, dtype, equal in kinds:
        about = {
            "model": "small", "dtype": dtype, "case": case, "step": 0, "text": "", "margin": 1, "fed_tokens": 5,
            "prefix_tokens": 4, "prompt_tokens": 9, "shared_tokens": 3 if case in mismatch else 4,
        }
        for item in map(str, range(n)):
            rows.append(about | {"item": item, "way": "no reuse", "cache": "", "token": 0})
            rows.append(about | {"item": item, "way": way, "cache": "dynamic", "token": int(not equal)})
    return found_in.of_runs("prompt_reuse", {"prompt_reuse": run_of(pd.DataFrame(rows))})


def test_ids_that_do_not_continue_are_counted_by_prompt():
    documented = [(DOCUMENTED, AS_IS, dtype, False) for dtype in (FP32, BF16)]
    for mismatch, outcome in (((DOCUMENTED,), "holds"), ((), "fails")):
        found = of_texts(*documented, mismatch=mismatch)
        assert statements.check(measures.STATEMENTS["ids-do-not-continue"], found).outcome == outcome
        assert [one.units for one in measures.MISMATCHED(found)] == [40]


def test_the_threads_own_prompts_decide_where_their_ids_leave_the_prefixs():
    check = measures.CHECKS["reused-cache-changes-text"]
    for equal, expected in ((True, "refuted in kind"), (False, "reproduced in kind")):
        assert check(of_texts((THREAD, AS_IS, FP32, equal), mismatch=(THREAD,))).verdict == expected
        assert check(of_texts((THREAD, AS_IS, FP32, equal))).verdict == "not run"


PRECISION = measures.CHECKS["precision-explains"]


def four_prompts(mismatched: tuple[bool, bool], continued: tuple[bool, bool], n: int = 4) -> found_in.Found:
    """Make up prompts of each kind whose tokens are equal in fp32 and in bf16, or not."""
    kinds = [
        (case, AS_IS, dtype, equal) for case, of in ((JOINED, mismatched), (CONTINUED, continued))
        for dtype, equal in zip((FP32, BF16), of, strict=True)
    ]
    return of_texts(*kinds, mismatch=(JOINED,), n=n)


@pytest.mark.parametrize(("mismatched", "continued", "expected"), [
    ((False, False), (True, True), "plausible cause"),
    ((True, False), (True, False), "reproduced in kind"),
    # Ids that continue and still give other tokens in the finest dtype would be no matter of ids.
    ((False, False), (False, False), "refuted in kind"),
    ((True, True), (True, True), "undecided"),
])
def test_precision_explains_what_the_finest_dtype_does_not_show(mismatched, continued, expected):
    verdict = PRECISION(four_prompts(mismatched, continued))
    assert (verdict.verdict, verdict.n) == (expected, "4 prompts (few)")
    assert PRECISION(four_prompts(mismatched, continued, n=3)).verdict == "undecided"
