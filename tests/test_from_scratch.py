"""The model of the forum thread: its ways to read, its training, its experiments, its verdicts."""

import dataclasses
import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from made_up import with_rows
from refusing import refusal
from small_models import SCRATCH

from kvbook import paths
from kvreport.chapters.from_scratch import ScratchSettings, measures, speed, tables
from kvreport.chapters.from_scratch import logits as scratch_logits
from kvreport.chapters.from_scratch import loss as scratch_loss
from kvreport.chapters.from_scratch import rows as names
from kvreport.chapters.from_scratch.gpt import checkpoints, text
from kvreport.chapters.from_scratch.gpt.memory import RollingMemory
from kvreport.chapters.from_scratch.gpt.model import ScratchGPT, Shape
from kvreport.chapters.from_scratch.gpt.paths import FIXES, WAYS, Refill, Reply, Rolling, Window, write
from kvreport.publishing import found

BLOCK = 8
TINY = 1e-12


def make_model(layers=3):
    torch.manual_seed(4)
    model = ScratchGPT(Shape(20, layers, 16, 2, BLOCK, 8 * BLOCK)).double().eval().requires_grad_(False)
    # At their first values the layers say almost nothing, and every way would agree.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def letters():
    return torch.randint(0, 20, (2, 4 * BLOCK), generator=torch.Generator().manual_seed(5))


# Ways


def apart(one, other, ids):
    """Say whether the logits of two ways differ in the first block and past it: by rounding at most, or clearly."""
    with torch.inference_mode():
        steps = (scratch_logits.read_steps(one, ids) - scratch_logits.read_steps(other, ids)).abs().amax((1, 2))
    largest = [steps[:BLOCK].max().item(), steps[BLOCK:].max().item()]
    assert all(one < TINY or one > 0.1 for one in largest)
    return [one > 0.1 for one in largest]


@pytest.mark.parametrize(("one", "other", "inside", "past"), [
    pytest.param(Rolling, Window, False, True, id="the posted cache leaves the window past the block"),
    pytest.param(WAYS[names.FORGOTTEN], Window, True, True, id="control: a forgotten offset is wrong at once"),
    pytest.param(WAYS[names.ABSOLUTE], Window, False, True, id="windows agree in the first block"),
    pytest.param(Rolling, WAYS[names.ABSOLUTE], False, True, id="keys go stale"),
    pytest.param(Reply, Window, False, True, id="the reply's cache leaves the window"),
    pytest.param(Reply, partial(Window, positions="modulo"), False, True, id="and its own"),
    pytest.param(FIXES[names.APPEND], Rolling, False, False, id="to append changes nothing"),
    pytest.param(FIXES[names.MASK], Rolling, False, False, id="nor does a mask"),
    pytest.param(FIXES[names.PROMPT], Rolling, False, False, id="nor the prompt"),
    pytest.param(FIXES[names.MODULO], Rolling, False, True, id="positions modulo block do, past it"),
    pytest.param(partial(Rolling, keeping="shuffled"), Rolling, False, False, id="order does not matter"),
    pytest.param(partial(Rolling, keeping="values late"), Rolling, True, True, id="control: pairs do"),
    pytest.param(partial(Window, all_rows=True), Window, False, False, id="all rows cost time alone"),
    *(
        pytest.param(partial(Refill, hop=hop), partial(Window, hop=hop), False, False, id=f"refill, hop {hop}")
        for hop in (1, 2, 3, BLOCK)
    ),
    pytest.param(partial(Refill, hop=3), partial(Window, hop=2), False, True, id="control: another hop"),
])
def test_ways_differ_where_the_chapter_says_and_nowhere_else(model, letters, one, other, inside, past):
    assert apart(one(model), other(model), letters) == [inside, past]


def test_with_one_layer_no_key_goes_stale(letters):
    shallow = make_model(layers=1)
    assert apart(Rolling(shallow), Window(shallow, "absolute"), letters) == [False, False]


def test_the_reply_forgets_everything_at_the_end_of_each_block(model, letters):
    way, held = Reply(model), []
    for length in range(1, 2 * BLOCK + 2):
        way.read(letters[:, :length])
        held.append(way.memory._stores[0][0].shape[2])
    assert held == [*range(1, BLOCK + 1), *range(1, BLOCK + 1), 1]


def test_what_does_not_fit_into_a_block_at_once_is_refused(model, letters):
    memory = RollingMemory(BLOCK)
    model(letters[:, :5], torch.arange(5), memory)
    with pytest.raises(ValueError, match="do not fit"):
        model(letters[:, 5:10], torch.arange(5, 10), memory)


def test_equal_draws_write_equal_texts_inside_the_block_and_greedy_needs_none(model, letters):
    draws = torch.rand(BLOCK, generator=torch.Generator().manual_seed(6))
    both = (WAYS[names.WINDOW], WAYS[names.POSTED])
    one, other = (write(make(model), letters[:, :1], BLOCK - 1, draws) for make in both)
    assert torch.equal(one, other)
    assert write(Window(model), letters[:, :3], 4)[0, 3] == model(letters[:1, :3], torch.arange(3))[0, -1].argmax()


@pytest.mark.parametrize(("how", "length", "right"), [
    (names.LAST_ONLY, 5, False), (names.LAST_ONLY, 1, True), (names.WHOLE_PROMPT, 5, True),
    (names.CHUNKED_SHIFTED, 6, True), (names.CHUNKED_REPLY, 6, False), (names.CHUNKED_UNMASKED, 6, False),
])
def test_a_prompt_is_fed_whole_or_in_chunks_with_a_mask_that_is_shifted(model, letters, how, length, right):
    prompt = letters[:1, :length]
    reference = model(prompt, torch.arange(length))[:, -1]
    difference = (scratch_logits.read_prompt(model, prompt, how) - reference).abs().max().item()
    assert difference < TINY if right else difference > 0.1


# Text


def test_encoding_and_decoding_give_the_text_back_and_mark_what_is_unknown():
    vocabulary = text.Vocabulary.of(["ab\n" * 200, "é"])
    assert vocabulary.characters == text.UNKNOWN + "\nab"
    assert vocabulary.decode(vocabulary.encode("ab\naé")) == "ab\na" + text.UNKNOWN
    assert len(vocabulary.encode("")) == 0


def test_of_one_file_the_last_tenth_is_held_out(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(str(i % 10) for i in range(100_000)))
    train, held_out = text.documents(str(file), "train"), text.documents(str(file), "held-out")
    assert len(train[0].text) == 90_000
    assert sum(len(d.text) for d in held_out) == 10_000
    assert len({d.name for d in held_out}) == len(held_out) == 3


def test_a_corpus_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\xff")
    (tmp_path / "folder").mkdir()
    for name in ("/nowhere", tmp_path / "binary", tmp_path / "folder"):
        refusal(text.documents, str(name), "held-out")


# Training


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("scratch") / "code.txt"
    file.write_text("".join(f"def f{i % 37}(x):\n    return x + {i % 11}\n" for i in range(7000)))
    return str(file)


@pytest.fixture(scope="module")
def checkpoint(corpus_file, tmp_path_factory):
    recipe = dataclasses.replace(SCRATCH, steps=60, rate=1e-2)
    return checkpoints.train(recipe, tmp_path_factory.mktemp("scratch") / "tiny", corpus_file)


def test_targets_are_one_character_further_and_offsets_reach_both_ends_of_the_table():
    batches = [checkpoints.batch(np.arange(1000), SCRATCH, step) for step in range(400)]
    assert torch.equal(batches[3][1], batches[3][0] + 1)
    positions = torch.cat([batch[2] for batch in batches])
    assert positions.min() == 0
    assert positions.max() == SCRATCH.block * SCRATCH.blocks_in_table - 1


def test_training_lowers_the_loss_and_records_what_it_was_made_of(checkpoint):
    about = json.loads((checkpoint / "training.json").read_text())
    assert about["held_out_nats_per_character"] < pd.read_csv(checkpoint / "training_log.csv")["loss_nats"][0] / 2
    assert about["trained_characters"] == 60 * 4 * 16
    assert {"sha256", "bytes"} <= about["train"].keys()


def test_the_threads_size_is_trained_on_another_text_on_first_use_and_found_again(corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path)
    monkeypatch.setattr(checkpoints.training, "WORK", tmp_path / "training")
    monkeypatch.setitem(checkpoints.RECIPES, "thread", SCRATCH)
    about = checkpoints.identify("thread", "stand-in", 0, corpus_file)
    assert about["weights"] == "stand-in"
    assert about["shape"]["width"] == SCRATCH.width
    monkeypatch.setattr(checkpoints, "train", None)
    assert checkpoints.identify("thread", "stand-in", 0, corpus_file) == about


@pytest.mark.slow
@pytest.mark.parametrize(("size", "every", "within", "off"), [("small", 32, 0.02, 0.2), ("thread", 250, 0.15, 1.0)])
def test_what_ships_scores_on_some_windows_what_its_record_says_of_all(size, every, within, off):
    recorded = json.loads((checkpoints.shipped(size) / "training.json").read_text())
    # Another Python has another standard library.
    alike = text.describe("stdlib", "held-out")["sha256"] == recorded["held_out"]["sha256"]
    within = within if alike else max(within, 0.1)
    expected = pytest.approx(recorded["held_out_nats_per_character"], abs=within)
    loaded = checkpoints.load(size, "stand-in", 0, "stdlib", "float32", "cpu")
    assert checkpoints.held_out_nats(loaded.model, loaded.vocabulary, "stdlib", every) == expected
    # Control: weights that are off by a part of their spread do not.
    noise = torch.Generator().manual_seed(1)
    for weight in loaded.model.parameters():
        weight.data += off * weight.data.std() * torch.randn(weight.shape, generator=noise)
    assert checkpoints.held_out_nats(loaded.model, loaded.vocabulary, "stdlib", 8 * every) != expected


# Experiments


@pytest.fixture(scope="module")
def settings(checkpoint, corpus_file):
    return ScratchSettings.checked(model=str(checkpoint), corpus=corpus_file, n_samples=6, n_blocks=4, n_timed=2)


@pytest.fixture(scope="module")
def results(settings):
    with pytest.MonkeyPatch.context() as patched:
        # Thirty million weights take seconds, and what is said of their times is made up where a test looks at it.
        patched.setattr(speed, "REPLYS_SHAPE", Shape(300, 2, 32, 2, block=256, table=256))
        return found.measured("from_scratch", settings)


@pytest.fixture
def loss(results):
    return results["scratch_loss"]


@pytest.fixture
def trained(checkpoint, settings):
    return checkpoints.load(str(checkpoint), "stand-in", 0, settings.corpus, "float32", "cpu")


def test_a_run_that_the_replys_model_has_no_positions_for_is_refused_and_control_the_longest_is_not():
    most = speed.REPLYS_SHAPE.table - scratch_loss.PROMPT
    assert ScratchSettings.checked(n_new_tokens=most).n_new_tokens == most
    assert f"n_new_tokens = {most + 1}: " in refusal(ScratchSettings.checked, n_new_tokens=most + 1)


def test_every_way_is_scored_at_the_same_places(loss):
    counts = loss.groupby(["way", "read_to"])["n_scored"].sum().unstack("way")
    assert (counts.eq(counts[names.WINDOW], axis=0)).all(axis=None)
    assert set(loss["way"]) >= {*WAYS, *FIXES}


def test_losses_are_what_a_full_pass_gives_in_the_first_block(loss, settings, trained):
    sample = text.samples(settings.corpus, trained.vocabulary, 6, 4 * 16 + 1)[2]
    places = [place for place in scratch_loss.places(16, 4, 0) if place <= 8]
    with torch.inference_mode():
        logs = torch.log_softmax(trained.model(torch.tensor([sample.ids])[:, :16], torch.arange(16)), -1)[0]
    expected = -np.mean([logs[place - 1, sample.ids[place]].item() for place in places])
    scored = loss.query("way == @names.POSTED and sample == 2 and read_to == 8")["nats"].item()
    assert scored == pytest.approx(expected, abs=1e-5)


def test_places_do_not_keep_one_phase_of_the_hops():
    places = np.array(scratch_loss.places(64, 8, 0))
    assert len(set(places % 8)) == 8
    assert (np.diff(places) > 0).all()
    assert places[-1] <= 8 * 64


def test_a_whole_block_held_is_the_window(results, settings, trained):
    held = results["scratch_held"]
    samples = text.samples(settings.corpus, trained.vocabulary, 6, 4 * 16 + 1)
    lengths = [length for length in scratch_loss.places(16, 4, 0) if length >= 16]
    ids = torch.tensor([sample.ids for sample in samples])
    by_window = scratch_loss.nats_at(Window(trained.model), ids, lengths).mean(1)
    for count in (16, 4):
        scored = held[held["held"] == count].sort_values("sample")["nats"].to_numpy()
        # With fewer characters another number comes out, or `held` would mean nothing.
        assert np.allclose(scored, by_window, atol=1e-5) == (count == 16)


def test_every_repetition_times_every_way(results):
    times = results["scratch_speed"]
    assert (times.groupby(["model", "measure", "way", "length"]).size() == 2).all()
    assert (times["seconds"] > 0).all()


def test_more_than_the_table_or_the_text_holds_and_a_folder_without_a_model_are_refused(settings, tmp_path):
    for change in ({"n_blocks": 9}, {"n_samples": 10_000}, {"model": str(tmp_path)}):
        refusal(scratch_loss.EXPERIMENT.inputs, ScratchSettings.checked(**settings.model_dump() | change))


def test_a_checkpoint_whose_weights_do_not_fit_is_refused_in_one_line(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert "does not fit" in refusal(checkpoints.load, str(tmp_path), "stand-in", 0, "stdlib", "float32", "cpu")


def test_the_published_runs_are_of_the_model_that_ships():
    ours = checkpoints.identify("thread", "stand-in", 0, "stdlib")
    published = found.printed("from_scratch").runs
    assert [published[name].about["models"] for name in names.EXPERIMENTS] == [[ours]] * len(names.EXPERIMENTS)


# Verdicts


def moved(loss, way, by):
    """Move a way's loss past the first block."""
    hit = (loss["way"] == way) & (loss["read_from"] >= loss["block"])
    return loss.assign(nats=loss["nats"] + np.where(hit, by, 0.0))


@pytest.mark.parametrize(("fix", "claim"), [
    (names.APPEND, "roll-scrambles"), (names.MASK, "mask-missing"), (names.PROMPT, "prompt-is-the-cause"),
    (names.MODULO, "positions-misalign"),
])
def test_a_point_is_borne_out_where_its_remedy_lowers_the_loss(results, loss, fix, claim):
    alike = pd.concat([loss[loss["way"] != fix], loss[loss["way"] == names.POSTED].assign(way=fix)])
    some = alike["source"].isin(sorted(alike["source"].unique())[::2])
    mixed = pd.concat([moved(alike[some], fix, -5.0), moved(alike[~some], fix, 5.0)])
    lower, higher, hardly = (moved(alike, fix, by) for by in (-0.02, 0.5, 1e-6 * alike["sample"].to_numpy()))
    changed = (with_rows(results, scratch_loss=rows) for rows in (lower, hardly, higher, mixed))
    words = [measures.CHECKS[claim](found).verdict for found in changed]
    assert words == ["reproduced in kind", "refuted in kind", "refuted in kind", "undecided"]


# Statements


def test_stale_keys_are_all_of_the_gap_where_positions_cost_nothing(results, loss):
    window = loss[loss["way"] == names.WINDOW]
    rest = loss[~loss["way"].isin([names.POSTED, names.ABSOLUTE])]
    posted = moved(window.assign(way=names.POSTED), names.POSTED, 1.0)
    rows = pd.concat([rest, window.assign(way=names.ABSOLUTE), posted])
    assert measures.STALE(with_rows(results, scratch_loss=rows))[0].estimate.value == pytest.approx(1)


def test_sizes_are_compared_change_by_change_whatever_their_blocks(results, loss):
    twice = {"refill, hop 8": "refill, hop 16", "refill, hop 16": "refill, hop 32"}
    larger = loss.assign(block=32, way=loss["way"].replace(twice), read_from=2 * loss["read_from"])
    other = with_rows(results, scratch_loss=moved(larger, names.POSTED, 1.0))
    table = tables.sizes({"one": results, "other": other})
    one, other = (of.set_index("label")["estimate"].map(lambda e: e.value) for _, of in table.groupby("size"))
    difference = (one - other).abs()
    assert difference.pop("posted cache") == pytest.approx(1.0)
    assert difference["refill, hop of half a block"] == difference.max() == pytest.approx(0.0)
