"""Classes that call their cache `cache_params`, and what the atlas knows of their faults."""

import json

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from kvbook.diagnosis import check, known
from kvbook.diagnosis.settings import CheckSettings
from kvbook.models import loading
from kvreport.site import history


@pytest.fixture(scope="module")
def mamba_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mamba")
    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.5}
    MambaForCausalLM(MambaConfig(**shape)).save_pretrained(folder)
    loading.tokenizer("llama").save_pretrained(folder)
    return folder


def test_a_model_that_takes_cache_params_is_judged_and_its_known_fault_has_a_cause_and_a_remedy(mamba_folder):
    found = check.check(CheckSettings.checked(model=str(mamba_folder), n_samples=1))
    assert {path.path: path.verdict for path in found.paths} == {"token by token": "rounding", "in two parts": "bug"}
    assert found.cause.startswith("known of mamba: the selective scan takes no initial state, so a second chunk")
    assert found.remedy == "feed the prompt in one call, and single tokens after it"


def test_control_another_class_or_another_path_is_not_explained_by_a_known_fault():
    assert known.fault("mamba", {"in two parts"}, "5.23.0")
    assert known.fault("mamba", {"in two parts", "token by token"}, "5.23.0") is None
    assert known.fault("llama", {"in two parts"}, "5.23.0") is None


def test_a_release_before_the_mend_is_told_to_update_and_one_after_it_is_not_excused():
    assert known.fault("mamba2", {"in two parts"}, "5.5.4").remedy.endswith("or use transformers 5.13.1 or newer")
    assert known.fault("mamba2", {"in two parts"}, "5.13.1") is None


def test_what_the_check_knows_is_what_the_recorded_history_says():
    assert json.loads(known.FILE.read_text()) == history.known(history.read())
