"""`kvbook check --thorough` calls clean models clean and transformers' faults bugs, and names what it left out."""

import pytest
import torch
from small_models import asked, small_mistral
from transformers import MistralConfig, Phi3Config

from kvbook.atlas import configurations
from kvbook.diagnosis import check, faults, outcome, thorough, wrong_pass
from kvbook.models import loading

IDS = list(range(11, 47))


def verdicts(model, only=(), dtype="float64") -> dict[str, str]:
    paths, _ = thorough.paths_of(model.config, loading.context_length(model.config))
    chosen = {name: path for name, path in paths.items() if not only or name in only}
    rows = thorough.rows_of(model, dtype, IDS, chosen, lambda _n_tokens: None)
    # On some processors some sound path is exact.
    return {found.path: found.verdict.replace("exact", "rounding") for found in thorough.findings(list(rows))}


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "mpt", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_a_clean_architecture_has_no_bug_on_any_path(name):
    found = verdicts(configurations.build(name, torch.float64))
    assert set(found.values()) <= {"rounding", "not supported"}
    assert list(found.values()).count("not supported") < len(found) / 2


# data/upstream/bamba_positions.py: positions of several tokens on a filled cache.
# data/upstream/git_padding.py: room in the mask for an image that was never fed.
@pytest.mark.parametrize(("name", "kinds"), [
    ("bamba", {"chunked prefill": "bug"}),
    ("git", {"chunked prefill": "rounding", "left padding": "rounding", "left padding, token by token": "bug"}),
])
def test_control_an_architecture_that_transformers_has_wrong_is_found_and_nowhere_else(name, kinds):
    assert verdicts(configurations.build(name, torch.float64), kinds) == kinds


def test_a_choice_among_equal_scores_that_changes_with_the_length_is_not_blamed_on_the_cache(monkeypatch):
    # Doge keeps the keys of the highest scores, and a token that comes twice has its score twice.
    model, only = configurations.build("doge", torch.float64), ("chunked prefill",)
    monkeypatch.setattr("test_thorough.IDS", [20, 21, 22, 23, 24, 25] * 4)
    assert wrong_pass.reference_fault(model, torch.tensor([[20, 21, 22, 23, 24, 25] * 3])) == wrong_pass.NOT_CAUSAL
    assert verdicts(model, only) == {"chunked prefill": "not supported"}
    # Control: without that look it would be called a bug.
    monkeypatch.setattr(wrong_pass, "reference_fault", lambda *_, **__: None)
    assert verdicts(model, only) == {"chunked prefill": "bug"}


def test_what_a_class_does_not_take_is_not_supported_and_no_bug():
    only = {"cropped cache": "not supported", "batch against single": "rounding"}
    assert verdicts(configurations.build("mamba"), only, "float32") == only


# Boundaries.


def test_boundaries_are_found_by_what_configurations_call_them():
    assert thorough.boundaries(MistralConfig(sliding_window=77)) == {"sliding window at 77": 77}
    assert thorough.boundaries(MistralConfig(sliding_window=None)) == {}
    scaled = Phi3Config(original_max_position_embeddings=64, sliding_window=None)
    assert thorough.boundaries(scaled) == {"original_max_position_embeddings at 64": 64}
    chunked = configurations.configuration("llama4_text")
    assert f"attention chunk at {configurations.WINDOW}" in thorough.boundaries(chunked)


def test_a_boundary_that_is_too_far_away_is_listed_and_a_long_text_left_out_beside_a_farther_one():
    paths, too_far = thorough.paths_of(MistralConfig(sliding_window=100_000), None)
    assert too_far == ["sliding window at 100,000"]
    assert [path.n_tokens for path in paths.values() if path.n_tokens != thorough.SHORT] == [thorough.LONG]
    paths, _ = thorough.paths_of(MistralConfig(sliding_window=300), None)
    assert [path.n_tokens for path in paths.values() if path.n_tokens != thorough.SHORT] == [301]


def test_a_model_with_too_few_positions_for_the_paths_takes_none_and_says_so():
    assert thorough.paths_of(MistralConfig(), 25) == ({}, ["all paths of --thorough, 26 tokens"])
    assert thorough.paths_of(MistralConfig(), 26)[0]


def test_the_whole_check_is_a_bug_by_a_path_that_short_texts_do_not_show(save, text_folder, injected):
    folder = save(small_mistral(), "mistral", context_length=128)
    clean = check.check(asked(folder, text_folder, thorough=True))
    assert (clean.status, len(clean.drift)) == (outcome.SOUND, 4)
    assert clean.not_tried == ["texts of more than 128 tokens: --tokens"]
    injected(faults.offset_by_one_far_on)
    assert check.check(asked(folder, text_folder)).status == outcome.SOUND, "24 tokens do not reach the window"
    found = check.check(asked(folder, text_folder, thorough=True))
    assert (found.status, found.path, found.located) == (outcome.BUG, "sliding window at 32", False)
    assert "keep texts below 32 tokens" in found.remedy
    assert any(line.startswith("path      sliding window at 32") and " bug: " in line for line in found.lines)
