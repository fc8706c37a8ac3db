import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import train_stand_ins as training
from transformers import AutoConfig

from kvbook import paths
from kvbook.errors import UserError
from kvbook.models import corpus, loading, placement, registry, sources, standins, tokenizers

SHIPPED = sorted(path.name for path in paths.STANDINS.iterdir() if path.is_dir())


def test_every_family_has_a_stand_in():
    assert set(SHIPPED) == set(standins.FAMILIES)


@pytest.mark.parametrize("family", SHIPPED)
def test_a_stand_in_is_small_deep_and_better_than_n_grams(family):
    folder = paths.STANDINS / family
    assert (folder / "model.safetensors").stat().st_size <= 6_000_000
    facts = loading.standin_facts(family)
    about = loading.identify(family)
    assert about["layers"] >= 12
    assert 2e6 < about["parameters"] < 3e6
    scores = facts["held_out_bits_per_byte"]
    assert scores["model"] < 0.95 * scores["bigram_backoff"] < scores["unigram"]
    assert (folder / "training_log.csv").read_text().count("\n") == facts["recipe"]["steps"] + 1


@pytest.mark.parametrize("family", SHIPPED)
@pytest.mark.slow
def test_a_stand_in_scores_as_its_record_says(family):
    """On windows from all over the held-out text, within the spread between them; noise would miss by far."""
    loaded, recipe, facts = loading.load(family), training.Recipe(), loading.standin_facts(family)
    texts = [document.text[:4000] for document in list(corpus.documents("stdlib", "held-out"))[::10]]
    stream = np.concatenate([loaded.tokenizer(text)["input_ids"] for text in texts])[: 5 * recipe.long]
    nats = training.held_out_nats(loaded.model, stream, recipe, masked=family == "roberta")
    found = training.training.bits_per_byte(nats, facts["held_out"]["tokens"], facts["held_out"]["bytes"])
    assert found == pytest.approx(facts["held_out_bits_per_byte"]["model"], rel=0.3)


@pytest.mark.parametrize("family", SHIPPED)
def test_two_loads_give_equal_bits(family):
    first, second = loading.load(family).model.state_dict(), loading.load(family).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def sees_what_comes_later(model) -> bool:
    ids = torch.arange(100, 132)[None]
    changed = ids.clone()
    changed[0, -1] += 1
    with torch.inference_mode():
        early = model(ids).logits[0, :-1] - model(changed).logits[0, :-1]
    return bool(early.abs().max() > 1e-3)


@pytest.mark.parametrize("family", SHIPPED)
def test_of_the_stand_ins_only_roberta_sees_what_comes_later(family):
    assert sees_what_comes_later(loading.load(family).model) == (family == "roberta")


@pytest.mark.parametrize(
    "architecture", [a for f in registry.families().values() for a in f.architectures], ids=lambda a: a.hub_id
)
def test_the_registrys_shapes_have_the_published_number_of_parameters(architecture):
    values = dict(architecture.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert loading.parameter_count(config) == architecture.parameters


def test_random_weights_of_a_folders_shape_depend_on_the_seed_alone(llama_folder):
    one, again, other = (loading.load(str(llama_folder), weights="random", seed=s).model for s in (5, 5, 6))
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_a_folder_is_loaded_in_the_dtype_asked_for_and_says_where_it_came_from(llama_folder):
    loaded = loading.load(str(llama_folder), dtype="bfloat16")
    assert (loaded.weights, loaded.name, loaded.model.dtype) == ("local", "small-llama", torch.bfloat16)
    assert len(loading.identify(str(llama_folder))["sha256"]) == 64


@pytest.mark.parametrize("family", standins.FAMILIES)
def test_every_family_loads_from_a_folder_and_with_random_weights_of_its_shape(family, family_folders):
    folder = str(family_folders[family])
    own, drawn = loading.load(folder), loading.load(folder, weights="random")
    assert (own.weights, drawn.weights) == ("local", "random")
    assert type(own.model) is type(drawn.model)
    assert own.model.config.model_type == registry.families()[family].architectures[0].config["model_type"]
    states = own.model.state_dict(), drawn.model.state_dict(), loading.load(folder).model.state_dict()
    matrices = [name for name, tensor in states[0].items() if tensor.dim() == 2]
    assert not any(torch.equal(states[0][name], states[1][name]) for name in matrices)
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0]), "two loads, equal bits"


@pytest.mark.parametrize("family", standins.FAMILIES)
def test_of_all_families_only_roberta_sees_what_comes_later(family, family_folders):
    assert sees_what_comes_later(loading.load(str(family_folders[family])).model) == (family == "roberta")


def test_identity_changes_with_the_weights(llama_folder, gpt2_folder):
    assert loading.identify(str(llama_folder))["sha256"] != loading.identify(str(gpt2_folder))["sha256"]


class TestBadInput:
    """One line each that says what to do."""

    def refused(self, match, model, **options):
        with pytest.raises(UserError, match=match) as error:
            loading.load(str(model), **options)
        assert "\n" not in str(error.value)

    def test_unknown_name(self):
        self.refused("neither a family", "nosuch")

    def test_unreachable_hub(self):
        self.refused("cannot be reached", "somebody/something")

    def test_folder_without_weights(self, llama_folder, tmp_path):
        shutil.copy(llama_folder / "config.json", tmp_path)
        self.refused("holds no weights", tmp_path)

    def test_folder_without_config(self, tmp_path):
        self.refused("no config.json", tmp_path)

    def test_folder_without_tokenizer(self, llama_folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(llama_folder / name, tmp_path)
        self.refused("no tokenizer", tmp_path)

    def test_damaged_weights(self, llama_folder, tmp_path):
        shutil.copytree(llama_folder, tmp_path / "m")
        weights = tmp_path / "m" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        self.refused("damaged", tmp_path / "m")

    def test_weights_of_which_some_are_missing(self, llama_folder, tmp_path):
        shutil.copytree(llama_folder, tmp_path / "m")
        file = tmp_path / "m" / "model.safetensors"
        weights = safetensors.torch.load_file(file)
        del weights["model.layers.1.self_attn.q_proj.weight"]
        safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
        self.refused(r"lacks weights .*q_proj.weight, 1 in all", tmp_path / "m")

    @pytest.mark.parametrize(
        ("changed", "match"),
        [
            ({"hidden_size": "sixty"}, "cannot be read.*save the model again"),
            ({"model_type": "frobnicate"}, "cannot be read.*upgrade"),
            ({"model_type": "f", "auto_map": {"AutoConfig": "f.F"}}, "cannot be read.*is not run"),
            ({"model_type": "t5"}, "type t5 cannot be built as a causal or masked language model"),
            ({"model_type": "vit"}, "type vit cannot be built"),
        ],
    )
    def test_a_configuration_of_something_else(self, llama_folder, tmp_path, changed, match):
        shutil.copytree(llama_folder, tmp_path / "m")
        config = tmp_path / "m" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
        self.refused(match, tmp_path / "m")

    def test_device_that_is_not_there(self, llama_folder):
        self.refused("CUDA devices", llama_folder, device="cuda:99")
        self.refused("not a torch device", llama_folder, device="abacus")

    def test_dtype_that_does_not_exist(self, llama_folder):
        self.refused("dtype 'float8'", llama_folder, dtype="float8")

    def test_a_gpt2_folder_without_tokenizer_whose_class_would_make_an_empty_one(self, gpt2_folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(gpt2_folder / name, tmp_path)
        self.refused("no tokenizer", tmp_path)

    def test_a_model_larger_than_the_memory(self, monkeypatch):
        monkeypatch.setattr(placement, "free_bytes", lambda device: 2**30)
        self.refused(r"needs about 29\.7 GiB and cpu has 1\.0 GiB free", "falcon", weights="random")

    def test_text_longer_than_the_context(self, llama_folder):
        with pytest.raises(UserError, match="lower n_tokens"):
            loading.check_length(loading.identify(str(llama_folder)), 65)
        loading.check_length(loading.identify(str(llama_folder)), 64)


class TestPlacement:
    """Where weights lie; the free memory is told, for no machine of the tests has two GPUs."""

    GPU, ONE_GPU, HOST = torch.device("cuda"), torch.device("cuda", 0), torch.device("cpu")

    @pytest.fixture(autouse=True)
    def room(self, monkeypatch):
        free = {"cuda": 10 * 2**30, "cpu": 100 * 2**30}
        monkeypatch.setattr(placement, "free_bytes", lambda device: free[device.type])

    def test_what_one_gpu_holds_lies_on_it(self):
        assert placement.device_map("m", 8 * 2**30, self.GPU) == {"": self.GPU}
        assert placement.device_map("m", 80 * 2**30, self.HOST) == {"": self.HOST}

    def test_what_one_gpu_does_not_hold_is_spread(self):
        assert placement.device_map("m", 9 * 2**30, self.GPU) == "auto"

    def test_spread_weights_are_the_same_bits(self, llama_folder):
        # Without a GPU "all GPUs and then the host" is the host.
        where = sources.resolve(str(llama_folder), "stand-in")
        spread = loading._pretrained(where, torch.float32, "auto", {}).state_dict()
        whole = loading.load(str(llama_folder)).model.state_dict()
        assert all(torch.equal(spread[name], whole[name]) for name in whole)

    def test_a_gpu_that_was_named_is_the_only_one(self):
        with pytest.raises(UserError, match=r"needs about 10\.3 GiB and cuda:0 has 10\.0 GiB free"):
            placement.device_map("m", 9 * 2**30, self.ONE_GPU)

    def test_what_nothing_holds_is_refused_with_both_numbers(self):
        with pytest.raises(UserError, match=r"needs about 1150\.0 GiB; all GPUs .* have 1\d\d\.0 GiB free"):
            placement.device_map("m", 1000 * 2**30, self.GPU)

    def test_without_accelerate_spreading_is_one_line(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "accelerate", None)
        with pytest.raises(UserError, match="pip install accelerate"):
            placement.device_map("m", 9 * 2**30, self.GPU)


DRAW = """
import os, sys
import torch
from pathlib import Path
from kvbook.models import loading

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

def peak_over_weights(family, dtype):
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    model = loading.load(family, weights="random", dtype=dtype).model.to(torch.bfloat16)
    return (status("VmHWM") - before) / sum(p.numel() * p.element_size() for p in model.parameters())

loading.load("gpt2")  # whatever is loaded once, is loaded now
for case in sys.argv[1:]:
    # A process each: memory that an earlier model has given back would hide a later one's.
    child = os.fork()
    if child == 0:
        print(peak_over_weights(*case.split()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process's memory from /proc")
@pytest.mark.slow
def test_random_weights_are_drawn_in_their_own_dtype():
    """The true shapes in bf16, and, as the control, drawn in fp32 and then converted."""

    cases = ["gpt2 bfloat16", "smollm2 bfloat16", "gpt2 float32"]
    done = subprocess.run([sys.executable, "-c", DRAW, *cases], capture_output=True, text=True, check=True)
    gpt2, smollm2, control = map(float, done.stdout.split())
    assert 1 <= gpt2 < 1.6
    assert 1 <= smollm2 < 1.6
    assert control > 2


class TestTokenizers:
    def test_both_styles_have_one_size_and_give_text_back(self):
        text = "def f(x):\n    return x.What  # Ünicode, tabs\t and 12345\n"
        for style in ("gpt2", "llama3"):
            bpe = training.shared_bpe(style)
            assert bpe.get_vocab_size() == tokenizers.VOCABULARY_SIZE
            assert bpe.decode(bpe.encode(text).ids) == text

    def test_only_the_llama3_style_lets_punctuation_lead_a_word(self):
        pieces = {
            style: [piece for piece, _ in tokenizers._pre_tokenizer(style).pre_tokenize_str("assistant.What")]
            for style in ("gpt2", "llama3")
        }
        assert pieces == {"gpt2": ["assistant", ".", "What"], "llama3": ["assistant", ".What"]}

    def test_llama_begins_every_text_and_qwen_does_not(self, bpe):
        llama, qwen = (tokenizers.for_family(bpe, family, 64) for family in ("llama", "qwen2"))
        assert llama("x")["input_ids"] == [llama.bos_token_id, *qwen("x")["input_ids"]]


def test_every_stand_in_is_of_a_family_of_the_registry():
    assert set(standins.FAMILIES) <= set(registry.families())
    with pytest.raises(UserError, match="no stand-in"):
        standins.config("bert")
