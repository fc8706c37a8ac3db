"""The experiments of the chapter on whether the difference matters, on small checkpoints in a local folder."""

import copy
import itertools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from refusing import refusal
from small_models import generated, small_llama

from kvbook.diagnosis import faults
from kvbook.measuring import caches, fp64_reference, rounded_caches
from kvbook.measuring.in_fp64 import widened
from kvbook.models import corpus, loading
from kvreport.chapters.does_it_matter import (
    DoesItMatterSettings,
    classifier,
    long_contexts,
    teacher_forced,
    variants,
    writing,
    written_texts,
)
from kvreport.chapters.does_it_matter import rows as named
from kvreport.publishing import found

pytestmark = pytest.mark.usefixtures("no_gradients")

ROUNDING = [way for way in variants.VARIANTS if named.KINDS[way.name] == "rounding"]


@pytest.fixture(scope="module")
def folder(save):
    """Save a small Llama checkpoint whose widths are multiples of 64, as bitsandbytes' 4-bit product on a CPU wants."""
    return save(small_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3), "llama-64")


@pytest.fixture(scope="module")
def settings(folder, text_folder):
    return DoesItMatterSettings.checked(
        model=str(folder), corpus=str(text_folder), n_samples=4, n_tokens=24, longest=40, n_long=2, n_fit=2,
        text_lengths=(48, 64, 99),
    )


@pytest.fixture(scope="module")
def diverged(settings):
    return written_texts.EXPERIMENT.run(settings)


@pytest.fixture(scope="module")
def subject(settings):
    return variants.Subject(settings, "float32")


def gathered(subject, way, ids, prompt):
    """Return logits and last hidden state by text and position, from the prompt on."""
    return {
        (piece.text, position): row for piece in subject.pieces(way, ids, prompt)
        for position, row in enumerate(zip(piece.logits, piece.hidden, strict=True), piece.start) if position >= prompt
    }


BASELINE, GREEDILY = variants.Variant("itself", variants.whole), writing.Chooser("greedy", 0)


def mean_kl(subject, way, ids):
    expected, found = (gathered(subject, which, ids, 8) for which in (BASELINE, way))
    logits = (torch.stack([of[place][0] for place in expected]).double() for of in (found, expected))
    logp = (each.log_softmax(-1) for each in logits)
    return torch.nn.functional.kl_div(*logp, reduction="batchmean", log_target=True).item()


@pytest.mark.parametrize("way", ROUNDING, ids=lambda way: way.name)
def test_every_rounding_way_gives_every_row_of_every_text_also_of_those_beyond_a_full_batch(subject, way):
    texts = torch.randint(11, 320, (variants.BATCH + 1, 14), generator=torch.Generator().manual_seed(6))
    expected, found = (gathered(subject, which, texts, 8) for which in (BASELINE, way))
    assert set(expected) == set(itertools.product(range(variants.BATCH + 1), range(8, 14)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4)
    # Control: rows of a neighbour, text or position, would not pass.
    for neighbour in ((1, 12), (0, 13)):
        assert not torch.allclose(expected[0, 12][0], expected[neighbour][0], atol=1e-1)


def test_learned_positions_are_right_after_padding(gpt2_folder, settings, texts, monkeypatch):
    gpt2 = variants.Subject(settings.model_copy(update={"model": str(gpt2_folder)}), "float32")
    assert mean_kl(gpt2, variants.PADDED, texts) < 1e-7
    # Control: where nobody tells the model, the same comparison fails.
    monkeypatch.setattr(variants, "positions", lambda _model, _places: {})
    assert mean_kl(gpt2, variants.PADDED, texts) > 1e-2


def test_fewer_bits_are_further_off_and_a_wrong_cache_further_still(subject, texts):
    rounding = max(mean_kl(subject, way, texts) for way in ROUNDING)
    int8, int4 = (mean_kl(subject, way, texts) for way in (variants.KV_INT8, variants.KV_INT4))
    assert rounding < 1e-8 < int8 < int4
    assert mean_kl(subject, variants.LOST, texts) > 100 * int8


def test_each_way_runs_the_model_that_it_names(subject):
    baseline = subject.baseline.model
    assert baseline.config._attn_implementation != "eager"
    eager, other, eight = (subject.model_of(way) for way in (variants.EAGER, variants.OTHER_DTYPE, variants.WEIGHTS_8))
    assert eager.config._attn_implementation == "eager"
    assert (baseline.dtype, other.dtype) == (torch.float32, torch.bfloat16)
    assert eight.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert subject.model_of(variants.CHUNKS) is baseline
    assert subject.model_of(variants.EAGER) is eager, "loaded once"


def test_ways_that_a_model_or_a_library_lacks_are_left_out(subject, llama, gpt2, monkeypatch):
    def lacking(model):
        return set(variants.VARIANTS) - set(variants.possible(model))

    model = subject.baseline.model
    assert lacking(model) == set()
    assert lacking(subject.model_of(variants.EAGER)) == {variants.EAGER}
    # Widths of 32 and 48: bitsandbytes has no 4-bit product for these on a CPU.
    assert lacking(llama) == lacking(gpt2) == {variants.WEIGHTS_4}
    with monkeypatch.context() as patch:
        patch.setattr(variants, "QuantizedCache", Mock(side_effect=ValueError("Unknown quantization backend")))
        assert lacking(model) == {variants.KV_FP8}
    monkeypatch.setattr(variants.lowbit, "_LIBRARIES", ("nosuch_library",))
    assert lacking(model) == {variants.WEIGHTS_8, variants.WEIGHTS_4}


def test_the_head_decides_as_the_stock_class_does(settings, subject, texts):
    config = transformers.AutoConfig.from_pretrained(settings.model)
    stock = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    stock.model = subject.baseline.model.model
    score = torch.randn(2, config.hidden_size)
    stock.score.weight.data = score
    rows = gathered(subject, BASELINE, texts, 1)
    for length in (5, 14, 21):
        expected = stock(texts[:1, :length]).logits.argmax(-1)
        assert classifier.decisions(rows[0, length - 1][1][None], score).tolist() == expected.tolist()


def test_labels_count_brackets(folder):
    tokenizer = loading.tokenizer(str(folder))
    ids = tokenizer("def f(x): return [x]", add_special_tokens=False)["input_ids"]
    texts = ["".join(tokenizer.batch_decode([[i] for i in ids[: n + 1]])) for n in range(len(ids))]
    expected = [sum(map(t.count, "([{")) > sum(map(t.count, ")]}")) for t in texts]
    assert classifier.labels(tokenizer, ids).tolist() == expected
    assert set(expected) == {True, False}


def test_the_regression_stands_where_its_loss_has_no_slope():
    generator = np.random.default_rng(3)
    features = generator.normal(size=(400, 5))
    classes = generator.random(400) < 1 / (1 + np.exp(-features @ np.array([2.0, -1.0, 0.0, 0.5, 1.0])))
    weights = classifier.logistic(features, classes)
    sign = np.where(classes, 1, -1)
    slope = -(sign / (1 + np.exp(sign * (features @ weights)))) @ features / 400 + 2e-3 * weights
    assert abs(slope).max() < 1e-4


def test_rows_hold_every_way_and_scored_token_once_and_are_what_the_passes_give(settings, subject):
    rows = teacher_forced.EXPERIMENT.run(settings).rows
    assert not rows.duplicated(["dtype", "way", "sample", "position"]).any()
    assert len(rows) == 2 * len(variants.VARIANTS) * 4 * 12
    assert set(rows["position"]) == set(range(12, 24))
    assert rows["kl"].notna().all()
    sample = list(corpus.samples(settings.corpus, subject.baseline.tokenizer, 4, 25))[2]
    logp = torch.log_softmax(subject.baseline.model(torch.tensor([sample.ids[:-1]])).logits[0].double(), -1)
    row = rows.query("dtype == 'float32' and way == 'batch of 8' and sample == 2 and position == 17").iloc[0]
    assert row["nll"] == pytest.approx(-logp[17, sample.ids[18]].item(), rel=1e-4)
    assert row["margin"] == pytest.approx(-logp[17].topk(2)[0].diff().item(), rel=1e-4)


def test_every_position_of_a_long_text_is_in_one_bin(settings):
    for _, one in long_contexts.DRIFT.run(settings).rows.groupby(["dtype", "way", "sample"]):
        # 39 positions are read, in sixteenths of 2; the first of these is the prompt.
        assert one["n_tokens"].sum() == 39 - 2
        assert one["read_from"].tolist()[1:] == one["read_to"].tolist()[:-1]


def test_long_texts_are_of_different_files_and_no_longer_than_the_context(settings):
    cut = long_contexts.texts(settings)
    assert [(sample.index, len(sample.ids)) for sample in cut] == [(0, 64), (1, 64), (2, 48)]
    assert len({sample.source for sample in cut}) == 3
    many = settings.model_copy(update={"corpus": "stdlib", "text_lengths": (64,) * 200})
    assert "shorten text_lengths" in refusal(long_contexts.EXPERIMENT.inputs, many)


def test_rows_of_a_long_text_are_what_the_models_own_logits_give_in_bins_that_leave_nothing_out(settings, subject):
    both = long_contexts.EXPERIMENT.run(settings).rows.query("dtype == 'float32' and sample == 2")
    rows, static = (both[both["way"] == way] for way in named.LONG_WAYS)
    uncached = ["bin", "kl_full", "error_full"]
    assert static[uncached].to_numpy() == pytest.approx(rows[uncached].to_numpy())
    assert static["error"].to_numpy() == pytest.approx(rows["error"].to_numpy(), rel=0.5)
    assert rows["read_from"].tolist() == [12, *rows["read_to"].iloc[:-1]]
    assert rows["read_to"].iloc[-1] == 47
    model, text = subject.baseline.model, subject.tensor([long_contexts.texts(settings)[2].ids])
    exact = copy.deepcopy(model).double()
    with widened(torch.float64):
        true = exact(text).logits[0]
    cache, parts = transformers.DynamicCache(), text.split(12, 1)
    pieces = torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])
    whole = model(text).logits[0]
    for row in rows.itertuples():
        of = slice(row.read_from, row.read_to)
        sizes = [(found[of] - true[of]).norm(dim=-1) / true[of].norm(dim=-1) for found in (pieces, whole)]
        assert [row.error, row.error_full] == pytest.approx([x.square().mean().sqrt().item() for x in sizes], rel=0.3)
        assert 1e-8 < row.drift < row.error + row.error_full < 1e-5
        assert row.n_tokens == row.read_to - row.read_from
        assert max(row.kl, row.kl_full, row.kl_cached) < 1e-9


def test_control_positions_off_by_one_on_a_cache_are_far_from_fp64_to_the_end_of_a_long_text(settings, subject):
    model, text = subject.baseline.model, subject.tensor([long_contexts.texts(settings)[0].ids])
    reference = fp64_reference.in_double_precision(model)
    with faults.offset_by_one(model.base_model):
        rows = pd.DataFrame(long_contexts.follow(model, reference, text))
    assert rows["way"].value_counts().to_dict() == dict.fromkeys(named.LONG_WAYS, 4)
    assert (rows["error"] > 1000 * rows["error_full"]).all()
    assert (rows["kl"] > 1e-5).all()


def seen_past_a_window(way: str, place: int) -> list[int]:
    """List the tokens that a place sees of a text of which four pieces of 6 make a window."""
    begin = place // 6 * 6
    # Once a window is full, each piece gets room, and what is kept of the first tokens takes some of it.
    early = list(range(place))[named.FORGETTING[way]] if way in named.FORGETTING and begin > 18 else []
    first = 0 if way == named.WHOLE else max(0, begin - 18 + len(early))
    return [*early, *range(first, place + 1)]


def test_each_way_past_a_window_scores_what_the_model_says_that_sees_those_tokens_alone(settings, subject):
    sample = long_contexts.texts(settings)[2]
    model, text = subject.baseline.model, subject.tensor([sample.ids])
    rows = pd.DataFrame(long_contexts.follow_windows(subject, sample))
    ids, targets = text[:, :-1], text[0, 1:]
    for way, of in rows.groupby("way"):
        seen = [seen_past_a_window(way, place) for place in range(47)]
        mask = torch.zeros(1, 1, 47, 47, dtype=torch.bool)
        for place, tokens in enumerate(seen):
            mask[..., place, tokens] = True
        (logits,) = model(ids, attention_mask=mask).logits
        if way == named.ANEW:
            # What these tokens' keys were computed of was not seen either.
            logits = torch.stack([model(ids[:, tokens]).logits[0, -1] for tokens in seen])
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        for row in of.itertuples():
            assert row.nll == pytest.approx(losses[row.read_from : row.read_to].mean().item(), rel=1e-4), way
    assert (rows.loc[rows["way"] == named.ANEW, "kl"] < 1e-9).all()
    assert (rows.loc[rows["way"].isin(named.FORGETTING), "kl"] > 1e-7).all()


def steps_of(tokens: list[int], scores: list[float] | None = None) -> list[writing.Step]:
    """Make steps that chose these tokens, by scores that are all the same unless they are given."""
    return [writing.Step(token, torch.tensor(scores or [1.0] * 10)) for token in tokens]


@pytest.mark.parametrize(
    ("other", "expected"), [([1, 2, 3], (3, 0)), ([1, 9, 3], (2, 1)), ([1, 2, 9, 9], (3, 1)), ([1, 2, 3, 9], (3, 0))]
)
def test_watching_counts_the_step_that_diverges_and_ends_with_the_baselines_text(other, expected):
    (row,) = written_texts.watch([steps_of([1, 2, 3])], ([step] for step in steps_of(other)))
    assert (row["steps"], row["parted"]) == expected


def test_a_divergence_is_at_an_exact_tie_only_where_both_candidates_have_equal_scores():
    def found(ours: list[float], theirs: list[float]) -> dict:
        baseline, other = (steps_of([int(np.argmax(scores))], scores) for scores in (ours, theirs))
        return written_texts.watch([baseline], [other])[0]

    tie = found([0.0, 5.0, 5.0], [0.0, 4.0, 5.0])
    assert (tie["tied_baseline"], tie["tied"], tie["margin_baseline"], tie["margin"]) == (1, 0, 0, 1)
    # Control: no tie, and a tie of two other tokens, which decides nothing.
    for ours, theirs in (([0.0, 5.0, 4.0], [0.0, 4.0, 5.0]), ([5.0, 5.0, 4.0], [4.0, 4.0, 5.0])):
        assert (found(ours, theirs)["tied_baseline"], found(ours, theirs)["tied"]) == (0, 0)


def test_nothing_is_written_after_every_text_of_a_batch_has_diverged_or_ended():
    written = (steps_of([9 if place == 2 else 1, 1]) for place in range(9))
    rows = written_texts.watch([steps_of([1] * 9), steps_of([1] * 4)], written)
    assert [(row["steps"], row["parted"]) for row in rows] == [(3, 1), (4, 0)]
    assert len(list(written)) == 9 - 4


def written_alone(model, prompt, n) -> list[writing.Step]:
    (steps,) = writing.to_the_end(model, writing.write(model, prompt, [0], n, GREEDILY, named.NO_CACHE))
    return steps


def tokens_of(steps: list[writing.Step]) -> list[int]:
    return [step.token for step in steps]


def test_what_reads_a_text_diverges_where_what_is_written_on_such_a_cache_does(subject):
    model = subject.baseline.model
    prompts = torch.randint(11, 320, (6, 10), generator=torch.Generator().manual_seed(8))
    rows = written_texts.diverge(subject, prompts, list(range(6)), 14, GREEDILY)
    found = {(text, row["way"]): row for text, row in rows}
    for text, prompt in enumerate(prompts.split(1)):
        path = [int(token) for token in found[text, written_texts.BASELINE]["path"].split()]
        cache = rounded_caches.make(model.config, 4, 4)
        # It does not stop at the end token.
        rounded = generated(model, prompt, len(path), past_key_values=cache, eos_token_id=-1).sequences[0, 10:].tolist()
        shared = caches.shared_length(path, rounded)
        row = found[text, variants.KV_INT4.name]
        assert row["parted"] == (shared < len(path)), text
        assert row["steps"] == shared + row["parted"]
        if row["parted"]:
            assert (row["instead"], row["token"]) == (path[shared], rounded[shared])
    assert any(found[text, variants.KV_INT4.name]["parted"] for text in range(6)), "the test shows nothing"


def test_single_texts_are_written_alone_and_the_batch_is_a_way_of_its_own(subject, texts, monkeypatch):
    fed, true = [], written_texts.write
    monkeypatch.setattr(written_texts, "write", lambda *to: fed.append((len(to[1]), *to[5:])) or true(*to))
    found = list(written_texts.diverge(subject, texts[:, :10], [0, 1, 2], 6, GREEDILY, cached_only=True))
    assert Counter(fed) == {(1, named.NO_CACHE): 3, (1,): 3, (variants.BATCH,): 1}
    assert Counter(row["way"] for _, row in found) == dict.fromkeys((named.BASELINE, named.CACHED, named.TOGETHER), 3)


def test_with_common_noise_equal_logits_draw_alike_and_with_other_noise_they_do_not(subject, texts):
    def tokens(noise: int) -> list[int]:
        written = writing.write(subject.baseline.model, texts, range(3), 12, writing.Chooser("sampled", noise))
        return [step.token for steps in written for step in steps]

    assert tokens(3) == tokens(3) != tokens(4)


def test_every_way_is_watched_for_every_prompt_and_choice(diverged):
    rows = diverged.rows
    ways = {named.BASELINE, named.CACHED, named.TOGETHER, *(way.name for way in written_texts.WATCHED)}
    assert set(rows["way"]) == ways
    assert len(rows) == 2 * 2 * len(ways) * 4
    # A quarter of 24 tokens is the prompt.
    assert rows["steps"].between(1, 18).all()
    baseline = rows[rows["way"] == written_texts.BASELINE]
    for column in ("path", "margins"):
        assert (baseline[column].str.split().str.len() == baseline["steps"]).all()
    columns = ["token", "instead", "margin", "margin_baseline", "tied", "tied_baseline"]
    assert (rows[columns].notna().all(axis=1) == (rows["parted"] == 1)).all()


def test_assisted_decoding_verifies_what_it_looked_up_and_writes_what_plain_decoding_would_but_for_rounding(subject):
    model = subject.baseline.model
    prompt = torch.tensor([11, 12, 13, 14, 11, 12, 13, 14, 11, 12])
    fed = []
    with model.register_forward_pre_hook(lambda *of: fed.append(of[2]["input_ids"].shape[1]), with_kwargs=True):
        (looked_up,) = writing.to_the_end(model, writing.write_by_lookup(model, prompt, 14))
    plain = written_alone(model, prompt[None], 14)
    assert tokens_of(looked_up) == tokens_of(plain) == [step.scores.argmax().item() for step in looked_up]
    # The prompt with the first draft.
    assert fed[0] == 10 + named.AT_ONCE - 1


@pytest.mark.parametrize(("cache", "padding", "lengths"), [
    (named.NO_CACHE, named.UNPADDED, [12]), (named.DYNAMIC, named.LEFT, [6, 11, 9]),
    (named.PREALLOCATED, named.LEFT, [6, 11, 9]),
])
def test_what_is_written_is_bitwise_what_generate_writes(subject, cache, padding, lengths, monkeypatch):
    model, generator = subject.baseline.model, torch.Generator().manual_seed(3)
    prompts = [torch.randint(11, 320, (length,), generator=generator) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    width = ids.shape[1]

    def texts():
        written = writing.write(model, prompts, range(len(prompts)), 16, GREEDILY, cache, padding, width)
        return writing.to_the_end(model, written)

    # The first text's fourth token ends every text.
    end = texts()[0][3].token
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    output = generated(
        model, ids, 16, attention_mask=(ids > 0).long(), min_new_tokens=None, output_logits=True, pad_token_id=0,
        use_cache=cache != named.NO_CACHE, cache_implementation="static" if cache == named.PREALLOCATED else None,
    )
    for row, steps in enumerate(texts()):
        tokens = output.sequences[row, width:].tolist()
        assert tokens_of(steps) == tokens[: tokens.index(end) + 1 if end in tokens else None]
        assert all(torch.equal(step.scores, logits[row]) for step, logits in zip(steps, output.logits, strict=False))


@pytest.fixture(scope="module")
def usage(settings):
    many = settings.model_copy(update={"corpus": "stdlib", "n_usage": 10, "n_tokens": 48})
    return found.of_runs("does_it_matter", {"usage_factorial": written_texts.USAGE.run(many)})


def test_every_cell_that_is_planned_writes_every_prompt_in_both_dtypes(usage):
    counts = usage["usage_factorial"].groupby(["dtype", *named.Cell._fields]).size()
    assert len(counts) == 2 * len(list(named.planned())) == 2 * 16
    assert set(counts) == {10}


def test_in_fp32_no_change_moves_a_text_and_each_is_held_against_the_cell_without_it(usage):
    rows = usage["one change"]
    assert not rows.query("dtype == 'float32'")["differs"].any()
    assert set(rows["change"]) == set(named.CHANGES)
    alone = rows.query("choice == 'greedy' and dtype == 'bfloat16' and beside == ''")
    assert not alone.duplicated(["change", "sample"]).any()


def test_control_positions_off_by_one_after_left_padding_move_texts_and_at_no_tie(subject, settings, monkeypatch):
    samples = variants.texts(settings, 6, 9)
    padded = named.Cell(named.GREEDY, named.SINGLE, named.LEFT, named.DYNAMIC)

    def written():
        return pd.DataFrame(written_texts.texts_of(subject, padded, samples, 12, 10, 0)).set_index("sample")

    def late(self, ids, position_ids, **more):
        # A written token stands one place too far behind the prompt.
        return forward(self, ids, position_ids=position_ids + (ids.shape[1] == 1), **more)

    usual, forward = written(), type(subject.baseline.model).forward
    monkeypatch.setattr(type(subject.baseline.model), "forward", late)
    found = pd.DataFrame(named._differences(usual, written()))
    assert found["differs"].mean() > 0.7
    assert not found["near"].any()


def test_two_continuations_are_equal_up_to_the_divergence_and_free_after_it(subject, ids):
    path = tokens_of(written_alone(subject.baseline.model, ids, 16))
    rows = list(written_texts.follow(subject, ids, path, 7, (path[6] + 1) % 320, GREEDILY))
    assert [row["offset"] for row in rows] == list(range(-6, 10))
    by_offset = {row["offset"]: row for row in rows}
    assert all(by_offset[k]["token_equal"] and by_offset[k]["kl_free"] < 1e-8 for k in range(-6, 0))
    assert not by_offset[0]["token_equal"]
    assert by_offset[0]["kl_free"] < 1e-8 < 1e-3 < by_offset[1]["kl_free"]
    assert all(row["kl_forced"] < 1e-8 for row in rows)


def test_without_a_divergence_nothing_is_followed_and_with_some_every_pair_is(diverged, settings, monkeypatch):
    def followed(**values):
        before = SimpleNamespace(rows=diverged.rows.assign(**values))
        monkeypatch.setattr(written_texts, "EXPERIMENT", SimpleNamespace(run=lambda _: before))
        return written_texts.AFTER.run(settings)

    assert followed(parted=0) is None
    assert len(followed(parted=1, token=5).rows[["dtype", "sample"]].drop_duplicates()) == 2 * 4


def test_shorter_files_of_a_folder_are_passed_over_and_too_few_longer_ones_refused(settings, tmp_path):
    for name, lines in (("a.py", 50), ("b.py", 1), ("c.py", 50)):
        (tmp_path / name).write_text("x = 1\n" * lines)
    own = settings.model_copy(update={"corpus": str(tmp_path)})
    assert [text.source for text in variants.texts(own, 2, 24)] == ["a.py", "c.py"]
    assert "at most 2, or lower n_tokens" in refusal(lambda: variants.texts(own, 3, 24))
    assert "ask for at most 6" in refusal(lambda: long_contexts.DRIFT.inputs(settings.model_copy(update={"n_long": 9})))


def test_a_cache_whose_backend_is_not_installed_is_left_out_and_the_run_says_what_was(llama):
    installed = dict(teacher_forced._installed())
    found = {way.name for way in variants.possible(llama, tuple(teacher_forced.ways()))}
    packages = {k: of.replace("quanto", "optimum-quanto") for k, (of, _) in named.OF_BACKENDS.items() if of != "fp8"}
    assert found & packages.keys() == {name for name, package in packages.items() if package in installed}
    assert {named.PLAIN, named.CHUNKS, named.KV_FP8, *named.ROUNDED} <= found


def test_the_bits_of_a_number_are_those_of_what_a_cache_stores_and_our_subclass_rounds_one_side_alone():
    class Halves(transformers.cache_utils.QuantizedLayer):
        _quantize = staticmethod(lambda tensor, _axis: (tensor.half(), {"scale": tensor[..., :1].clone()}))
        _dequantize = staticmethod(lambda held: held[0].float())

    layer = type("OneSided", (teacher_forced._OneSided, Halves), {})("key")
    keys, values = torch.randn(2, 1, 2, 6, 32)
    layer.update(keys, values)
    both = zip(layer.update(keys, values), (keys, values), strict=True)
    # The tokens that it held are exact on one side, the new ones on both.
    assert [[torch.equal(half, exact) for half in of.chunk(2, -2)] for of, exact in both] == [[True] * 2, [False, True]]
    assert teacher_forced.stored(SimpleNamespace(layers=[layer])) == {"bits": (32 + 16 + 32 / 32) / 2, "exact": 6}


@pytest.mark.parametrize(("side", "kept"), [("key", [True, False]), ("value", [False, True])])
def test_our_subclass_of_the_fp8_layer_rounds_one_side_alone(side, kept):
    layer, states = teacher_forced.OneSidedFp8Layer(side), torch.randn(2, 1, 2, 6, 32)
    layer.update(*states)
    assert [torch.equal(a, b.repeat(1, 1, 2, 1)) for a, b in zip(layer.update(*states), states, strict=True)] == kept
    assert teacher_forced.stored(SimpleNamespace(layers=[layer]))["bits"] == (32 + 8 + 32 / 768) / 2
