"""`kvbook check` on encoders with their decoders: the decoder is fed in every way behind one source text."""

import pytest
import torch
from refusing import refusal
from small_models import asked
from transformers import AutoModelForSeq2SeqLM, BartConfig, MarianConfig, PegasusConfig, T5Config
from transformers.cache_utils import DynamicLayer
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

from kvbook.diagnosis import check, repro
from kvbook.models import decoders, loading

_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **_HEADS}
SIZES = {"vocab_size": 320, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.3, **_LAYERS}
CONFIGS = {
    "t5": T5Config(
        vocab_size=320, d_model=32, num_layers=2, num_decoder_layers=3, num_heads=4, d_kv=8, d_ff=48,
        initializer_factor=3.0, decoder_start_token_id=0,
    ),
    "bart": BartConfig(**SIZES),
    "marian": MarianConfig(**SIZES, pad_token_id=0, decoder_start_token_id=0),
    "pegasus": PegasusConfig(**SIZES),
}


@pytest.fixture(params=CONFIGS)
def folder(request, save):
    torch.manual_seed(3)
    return save(AutoModelForSeq2SeqLM.from_config(CONFIGS[request.param]), request.param)


def test_the_decoder_of_an_encoder_decoder_is_checked_behind_one_source(folder, text_folder):
    found = check.check(asked(folder, text_folder, thorough=True))
    assert found.verdict == "rounding"
    assert any("which the encoder reads" in text for text in found.not_tried)
    assert {path.verdict for path in found.paths} <= {"rounding", "exact", "not supported"}
    assert sum(path.verdict != "not supported" for path in found.paths) > 4


def test_its_logits_are_those_of_the_stock_model_and_depend_on_the_source(folder, monkeypatch):
    stock = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids, source = torch.arange(20, 28)[None], torch.arange(10, 10 + decoders.SOURCE)[None]
    with torch.inference_mode():
        behind = loading.load(str(folder), with_encoder=True).model(ids).logits
        assert torch.equal(behind, stock(input_ids=source, decoder_input_ids=ids).logits)
    monkeypatch.setattr(decoders, "_FIRST", 40)
    assert not torch.allclose(loading.load(str(folder), with_encoder=True).model(ids).logits, behind)


@pytest.mark.parametrize("folder", ["bart"], indirect=True)
def test_control_a_decoder_whose_positions_restart_is_a_bug(folder, text_folder, monkeypatch):
    positions = BartLearnedPositionalEmbedding
    stock = positions.forward
    monkeypatch.setattr(positions, "forward", lambda self, ids, *_, **__: stock(self, ids, 0, None))
    assert check.check(asked(folder, text_folder)).verdict == "bug"


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_control_a_source_that_is_read_into_the_cache_wrongly_is_a_bug(folder, text_folder, monkeypatch):
    stock = DynamicLayer.update

    def harmed(self, key_states, value_states, *more, **options):
        # What is kept of the source is read back at the next call only.
        keys, values = stock(self, key_states, value_states, *more, **options)
        if key_states.shape[-2] == decoders.SOURCE:
            self.keys = 1.1 * self.keys
        return keys, values

    monkeypatch.setattr(DynamicLayer, "update", harmed)
    assert check.check(asked(folder, text_folder)).verdict == "bug"


@pytest.mark.parametrize("folder", ["t5"], indirect=True)
def test_what_needs_a_causal_model_refuses_an_encoder_decoder_in_one_line(folder, text_folder):
    for refused in (
        lambda: loading.load(str(folder)),
        lambda: check.check(asked(folder, text_folder, memory="1GB")),
        lambda: repro.write(asked(folder, text_folder), "token by token", folder / "repro.py"),
    ):
        assert "encoder-decoder" in refusal(refused)
