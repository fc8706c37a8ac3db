"""Folders of adapters of PEFT: merged into their model, which is then checked as any other."""

import json
import sys

import pytest
import torch
from refusing import refusal
from small_models import asked
from transformers import AutoModelForCausalLM

from kvbook.diagnosis import check, faults
from kvbook.models import loading


@pytest.fixture(scope="module")
def adapter(llama_folder, tmp_path_factory):
    # Here and not above: it takes seconds, in each worker that collects the tests.
    import peft

    torch.manual_seed(2)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(str(llama_folder), dtype=torch.float32)
    folder = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, lora).save_pretrained(folder)
    return folder


def test_an_adapter_is_merged_into_the_model_that_its_folder_names(adapter, llama_folder):
    import peft

    merged, plain = (loading.load(str(folder), dtype="float64").model for folder in (adapter, llama_folder))
    weights = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float64)
    by_hand = peft.PeftModel.from_pretrained(weights, adapter)
    ids = torch.arange(10, 20)[None]
    with torch.inference_mode():
        found = merged(ids).logits
        torch.testing.assert_close(found, by_hand(ids).logits, rtol=1e-6, atol=1e-6)
        assert (found - plain(ids).logits).abs().max() > 1e-3
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_a_model_with_its_adapter_is_checked_and_a_bug_still_shows(adapter, text_folder, injected):
    assert check.check(asked(adapter, text_folder)).verdict == "rounding"
    injected(faults.offset_forgotten)
    assert check.check(asked(adapter, text_folder)).verdict == "bug"


def test_what_identifies_the_weights_names_the_adapter_too(adapter, llama_folder):
    one, other = (loading.identify(str(folder)) for folder in (adapter, llama_folder))
    assert one["sha256"] == other["sha256"]
    assert "adapter_sha256" in one
    assert "adapter_sha256" not in other


def test_an_adapter_without_its_library_or_model_is_refused(adapter, text_folder, tmp_path, monkeypatch):
    about = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": "gone"}))
    assert "its model 'gone' is not there" in refusal(loading.load, str(tmp_path))
    assert "--memory takes no adapters" in refusal(check.check, asked(adapter, text_folder, memory="1GB"))
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install peft, or merge it" in refusal(loading.load, str(adapter))
