"""Models that experiments share are read once, and are nobody's to change."""

import shutil

import pytest
import torch

from kvbook.models import kept, loading


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(kept, "_kept", {})


def test_a_model_is_read_once_in_each_dtype_and_attention(llama_folder):
    first = kept.load(str(llama_folder))
    assert kept.load(str(llama_folder), dtype="float32", attention=None) is first
    others = [kept.load(str(llama_folder), dtype="bfloat16"), kept.load(str(llama_folder), attention="eager")]
    assert others[0] is not first
    assert others[1].model.config._attn_implementation == "eager"
    assert kept.load(str(llama_folder), dtype="bfloat16") is others[0]


def test_a_folder_that_was_written_anew_is_read_anew(llama_folder, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "mine")
    first = kept.load(str(folder))
    changed = loading.load(str(folder)).model
    changed.lm_head.weight.add_(1)
    changed.save_pretrained(folder)
    assert torch.equal(kept.load(str(folder)).model.lm_head.weight, first.model.lm_head.weight + 1)


def test_what_was_used_longest_ago_is_forgotten_first_and_a_large_model_is_not_kept(llama_folder, monkeypatch):
    size = kept.load(str(llama_folder)).model.get_memory_footprint()
    kept._kept.clear()
    monkeypatch.setattr(kept, "LIMIT_BYTES", 1.6 * size)
    wide, narrow = (kept.load(str(llama_folder), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert kept.load(str(llama_folder)) is wide
    kept.load(str(llama_folder), dtype="float16")
    assert kept.load(str(llama_folder)) is wide
    assert kept.load(str(llama_folder), dtype="bfloat16") is not narrow
    monkeypatch.setattr(kept, "LIMIT_BYTES", 0.9 * size)
    kept._kept.clear()
    assert kept.load(str(llama_folder)) is not kept.load(str(llama_folder))


def test_what_leaves_too_little_free_is_forgotten(llama_folder, monkeypatch):
    kept.load(str(llama_folder))
    monkeypatch.setattr(kept.placement, "free_bytes", lambda place: 10)
    kept.make_room(1, torch.device("cpu"))
    assert kept._kept
    kept.make_room(6, torch.device("cpu"))
    assert not kept._kept


def test_weights_that_are_drawn_are_drawn_each_time():
    first = kept.load("llama", weights="untrained", seed=1)
    torch.manual_seed(5)
    again = kept.load("llama", weights="untrained", seed=1)
    assert again is not first
    assert torch.equal(again.model.lm_head.weight, first.model.lm_head.weight)


def test_what_is_kept_of_other_dtypes_is_predicted():
    assert kept.beside(100_000_000, ["float32", "bfloat16", "bfloat16"]) == 2e8
    assert kept.beside(100_000_000, ["float32"]) == 0
    # Too large to be kept at all.
    assert kept.beside(7_000_000_000, ["float32", "bfloat16"]) == 0


def test_a_model_that_takes_more_than_half_of_the_memory_is_streamed_with_equal_bits(llama_folder, family_folders, ids):
    folder = str(llama_folder)
    whole = kept.load(folder, dtype="float32")
    size = whole.model.get_memory_footprint()
    assert kept.load(folder, dtype="float32", memory=3.0 * size).model.lm_head.weight.isfinite().all()
    parts = kept.load(folder, dtype="float32", memory=1.5 * size)
    assert parts.model.lm_head.weight.isnan().all(), "nothing is held between calls"
    assert (parts.name, parts.weights, parts.dtype) == (whole.name, whole.weights, whole.dtype)
    with torch.inference_mode():
        assert torch.equal(parts.model(ids).logits, whole.model(ids).logits)
    # A masked model is whole: experiments copy its weights.
    assert kept.load(str(family_folders["roberta"]), memory=1.0).model.lm_head.dense.weight.isfinite().all()


def test_control_a_shared_model_that_was_changed_is_found(llama_folder, shared_models_are_left_as_they_were):
    shared_models_are_left_as_they_were()
    loaded = kept.load(str(llama_folder))
    shared_models_are_left_as_they_were()
    for change, back in (
        (lambda m: m.lm_head.weight.add_(1), lambda m: m.lm_head.weight.sub_(1)),
        (lambda m: setattr(m.lm_head, "forward", abs), lambda m: delattr(m.lm_head, "forward")),
        (lambda m: setattr(m.config, "use_cache", False), lambda m: setattr(m.config, "use_cache", True)),
    ):
        change(loaded.model)
        with pytest.raises(AssertionError):
            shared_models_are_left_as_they_were()
        back(loaded.model)
