"""`kvbook check --thorough`: each path finds the fault that only it can show, and calls a clean model clean."""

import functools
from types import SimpleNamespace

import pytest
import torch
from small_models import asked
from transformers import DynamicCache, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Phi3Config, StaticCache

from kvbook.atlas import configurations
from kvbook.diagnosis import check, faults, outcome, reference_pass, thorough
from kvbook.models import loading, tokenizers

IDS = list(range(11, 47))


def verdicts(model, only=(), dtype="float32") -> dict[str, str]:
    paths, _ = thorough.paths_of(model.config, loading.context_length(model.config))
    chosen = [path for path in paths if not only or path.name in only]
    rows = thorough.rows_of(model, dtype, IDS, chosen, lambda _n_tokens: None)
    # On some processors some sound path is exact.
    return {found.path: found.verdict.replace("exact", "rounding") for found in thorough.findings(list(rows))}


@pytest.fixture
def mistral():
    """Build a model whose window is longer than the texts that every check reads."""
    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=32, max_position_embeddings=128, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    return MistralForCausalLM(config).eval().requires_grad_(False)


# Clean models.


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "mistral",
        "gemma3_text",
        "qwen2",
        "mpt",
        pytest.param("llama4_text", marks=pytest.mark.slow),
        "phi3",
    ],
)
def test_a_clean_architecture_has_no_bug_on_any_path(name):
    found = verdicts(configurations.build(name, torch.float64), dtype="float64")
    assert set(found.values()) <= {"rounding", "not supported"}
    assert list(found.values()).count("not supported") < len(found) / 2


def test_control_an_architecture_that_transformers_has_wrong_is_found():
    # data/upstream/bamba_positions.py: positions of several tokens on a filled cache.
    assert verdicts(configurations.build("bamba", torch.float64), ("chunked prefill",), "float64") == {
        "chunked prefill": "bug"
    }


def test_control_git_is_wrong_behind_padding_and_nowhere_else():
    # data/upstream/git_padding.py: room in the mask for an image that was never fed.
    only = ("chunked prefill", "left padding", "left padding, token by token")
    found = verdicts(configurations.build("git", torch.float64), only, "float64")
    assert found == dict.fromkeys(only[:2], "rounding") | {only[2]: "bug"}


def test_a_choice_among_equal_scores_that_changes_with_the_length_is_not_blamed_on_the_cache(monkeypatch):
    # Doge keeps the keys of the highest scores, and a token that comes twice has its score twice.
    model, only = configurations.build("doge", torch.float64), ("chunked prefill",)
    monkeypatch.setattr("test_thorough.IDS", [20, 21, 22, 23, 24, 25] * 4)
    fault = reference_pass.fault(model, torch.tensor([[20, 21, 22, 23, 24, 25] * 3]))
    assert fault == reference_pass.NOT_CAUSAL
    assert verdicts(model, only, "float64") == {"chunked prefill": "not supported"}
    # Control: without that look it would be called a bug.
    monkeypatch.setattr(reference_pass, "fault", lambda *_: None)
    assert verdicts(model, only, "float64") == {"chunked prefill": "bug"}


def test_what_generate_does_with_a_cache_as_long_as_the_prompt_is_not_blamed_on_the_model(llama):
    (found,) = thorough.findings(
        list(thorough.rows_of(llama, "float32", IDS, [_path(llama, "generate, cache as long")], lambda _n: None))
    )
    assert found.verdict in ("exact", "rounding", "not supported")
    if found.verdict == "not supported":
        assert "crop the cache by one token first" in found.detail


def _path(model, beginning: str) -> thorough.Path:
    paths, _ = thorough.paths_of(model.config, loading.context_length(model.config))
    (path,) = [path for path in paths if path.name.startswith(beginning)]
    return path


# Boundaries.


def test_boundaries_are_found_by_what_configurations_call_them():
    assert thorough.boundaries(MistralConfig(sliding_window=77)) == {"sliding window at 77": 77}
    assert thorough.boundaries(MistralConfig(sliding_window=None)) == {}
    scaled = Phi3Config(original_max_position_embeddings=64, sliding_window=None)
    assert thorough.boundaries(scaled) == {"original_max_position_embeddings at 64": 64}
    chunked = configurations.configuration("llama4_text")
    assert f"attention chunk at {configurations.WINDOW}" in thorough.boundaries(chunked)


def test_a_boundary_that_is_too_far_away_is_listed_and_not_tried():
    paths, too_far = thorough.paths_of(MistralConfig(sliding_window=100_000), None)
    assert too_far == ["sliding window at 100,000"]
    assert not [path for path in paths if path.name.startswith("sliding")]


def test_a_fault_that_begins_at_a_length_of_no_meaning_is_found_in_a_long_text(llama):
    only = ("chunked prefill", "long text, 63 tokens")
    assert verdicts(llama, only) == dict.fromkeys(only, "rounding")
    with faults._calls_on_a_cache(llama, lambda ids, held: faults._new_positions(ids, held - 1) if held > 40 else {}):
        assert verdicts(llama, only) == dict(zip(only, ("rounding", "bug"), strict=True))


def test_a_long_text_is_left_out_where_a_boundary_is_farther_away():
    paths, _ = thorough.paths_of(MistralConfig(sliding_window=300), None)
    assert [path.n_tokens for path in paths if path.n_tokens > thorough.LENGTH] == [301]


def test_a_fault_that_begins_at_the_window_is_found_there_and_nowhere_else(mistral):
    def late(ids, held):
        # Positions fall back by one once the window is full.
        return faults._new_positions(ids, held - 1) if held >= mistral.config.sliding_window else {}

    only = ("sliding window at 32", "chunked prefill")
    assert verdicts(mistral, only) == {"sliding window at 32": "rounding", "chunked prefill": "rounding"}
    with faults._calls_on_a_cache(mistral, late):
        assert verdicts(mistral, only) == {"sliding window at 32": "bug", "chunked prefill": "rounding"}


def test_the_whole_check_is_a_bug_by_a_path_that_short_texts_do_not_show(
    mistral, bpe, text_folder, tmp_path, monkeypatch
):
    mistral.save_pretrained(tmp_path)
    tokenizers.for_family(bpe, "llama", 128).save_pretrained(tmp_path)
    clean = check.check(asked(tmp_path, text_folder, thorough=True))
    assert (clean.status, len(clean.drift)) == (outcome.SOUND, 4)
    assert clean.not_tried == ["texts of more than 128 tokens: --tokens"]
    stock = MistralForCausalLM.forward

    def forward(self, input_ids=None, past_key_values=None, **options):
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        if held >= self.config.sliding_window:
            options |= faults._new_positions(input_ids, held - 1)
        return stock(self, input_ids, past_key_values=past_key_values, **options)

    monkeypatch.setattr(MistralForCausalLM, "forward", forward)
    assert check.check(asked(tmp_path, text_folder)).status == outcome.SOUND, "24 tokens do not reach the window"
    found = check.check(asked(tmp_path, text_folder, thorough=True))
    assert (found.status, found.path, found.located) == (outcome.BUG, "sliding window at 32", False)
    assert "keep texts below 32 tokens" in found.remedy
    assert any(line.startswith("path      sliding window at 32") and " bug: " in line for line in found.lines)


# A fault for every other path.


def _wrong_in_a_batch(stock):
    def forward(self, input_ids=None, **options):
        found = stock(self, input_ids, **options)
        if input_ids.shape[0] > 1:
            found.logits = found.logits.roll(1, 0)
        return found

    return forward


def _mask_not_extended(stock):
    @functools.wraps(stock)
    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **options):
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        if held and attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        return stock(self, input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **options)

    return forward


def _chunks_see_what_follows(stock):
    def forward(self, input_ids=None, past_key_values=None, **options):
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        if held and input_ids.shape[1] > 1:
            options |= faults._new_positions(input_ids, 0)
        return stock(self, input_ids, past_key_values=past_key_values, **options)

    return forward


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("batch against single", _wrong_in_a_batch),
        ("left padding, token by token", _mask_not_extended),
        ("chunked prefill", _chunks_see_what_follows),
    ],
)
def test_a_fault_of_the_forward_is_found_on_its_path_and_the_others_stay_clean(path, fault, llama, monkeypatch):
    assert verdicts(llama, (path,)) == {path: "rounding"}
    monkeypatch.setattr(LlamaForCausalLM, "forward", fault(LlamaForCausalLM.forward))
    assert verdicts(llama, (path, "generate, dynamic cache")) == {path: "bug", "generate, dynamic cache": "rounding"}


def test_a_static_cache_that_loses_its_last_slot_is_found_only_when_it_is_full(llama, monkeypatch):
    stock = StaticCache.update

    def update(self, keys, values, layer, *arguments, **options):
        found = stock(self, keys, values, layer, *arguments, **options)
        if self.get_seq_length(layer) == self.layers[layer].max_cache_len:
            found[0][:, :, -1] = 0
        return found

    assert verdicts(llama, ("static cache, full",)) == {"static cache, full": "rounding"}
    monkeypatch.setattr(StaticCache, "update", update)
    only = ("static cache, full", "chunked prefill")
    assert verdicts(llama, only) == {"static cache, full": "bug", "chunked prefill": "rounding"}


def test_a_crop_that_leaves_a_token_behind_is_found(llama, monkeypatch):
    stock = DynamicCache.crop
    monkeypatch.setattr(DynamicCache, "crop", lambda self, n: stock(self, n + 1 if n else n))
    assert verdicts(llama, ("cropped cache",)) == {"cropped cache": "bug"}


def test_a_copy_that_shares_its_keys_is_found(llama, monkeypatch):
    only = ("copied cache, used twice",)
    assert verdicts(llama, only) == {"copied cache, used twice": "rounding"}
    monkeypatch.setattr(thorough, "copy", SimpleNamespace(deepcopy=lambda cache: cache))
    assert verdicts(llama, only) == {"copied cache, used twice": "bug"}


def test_generate_with_a_faulty_cache_is_found_by_what_it_wrote(llama):
    only = ("generate, dynamic cache", "generate, static cache")
    assert set(verdicts(llama, only).values()) == {"rounding"}
    with faults.offset_forgotten(llama):
        assert verdicts(llama, only) == dict.fromkeys(only, "bug")


def test_what_a_class_does_not_take_is_not_supported_and_no_bug():
    found = verdicts(configurations.build("mamba"))
    assert found["cropped cache"] == "not supported"
    assert found["batch against single"] == "rounding"
