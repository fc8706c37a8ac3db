import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import train_stand_ins as training
from refusing import refusal
from small_models import configure, lose_a_weight
from test_steps import Watching

from kvbook import paths
from kvbook.models import corpus, loading, placement, registry, sources, standins

FAMILIES = pytest.mark.parametrize("family", standins.FAMILIES)


def test_every_family_of_the_registry_has_a_stand_in_that_ships():
    assert set(standins.FAMILIES) == set(registry.families()) == {path.name for path in paths.STANDINS.iterdir()}
    assert "no stand-in" in refusal(standins.config, "bert")


@FAMILIES
def test_a_stand_in_is_deep_and_better_than_n_grams(family):
    facts, about = loading.standin_facts(family), loading.identify(family)
    assert about["layers"] >= 12
    assert 2e6 < about["parameters"] < 3e6
    scores = facts["held_out_bits_per_byte"]
    assert scores["model"] < 0.95 * scores["bigram_backoff"] < scores["unigram"]
    assert (paths.STANDINS / family / "training_log.csv").read_text().count("\n") == facts["recipe"]["steps"] + 1


@FAMILIES
@pytest.mark.slow
def test_a_stand_in_scores_as_its_record_says(family):
    """On two windows of the held-out text, within the spread between such windows; noise would miss by far."""
    loaded, recipe, facts = loading.load(family), training.Recipe(), loading.standin_facts(family)
    texts = [document.text[:4000] for document in list(corpus.documents("stdlib", "held-out"))[:200:10]]
    stream = np.concatenate([loaded.tokenizer(text)["input_ids"] for text in texts])[: 2 * recipe.long]
    assert len(stream) == 2 * recipe.long
    nats = training.held_out_nats(loaded.model, stream, recipe, masked=family == "roberta")
    found = training.training.bits_per_byte(nats, facts["held_out"]["tokens"], facts["held_out"]["bytes"])
    assert found == pytest.approx(facts["held_out_bits_per_byte"]["model"], rel=0.3)


@FAMILIES
def test_of_the_stand_ins_only_roberta_sees_what_comes_later(family):
    model, ids = loading.load(family).model, torch.arange(100, 132)[None]
    changed = torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
    with torch.inference_mode():
        one, other = (model(text).logits[0, :-1] for text in (ids, changed))
    assert bool((one - other).abs().max() > 1e-3) == (family == "roberta")


@pytest.mark.parametrize(
    "architecture", [a for f in registry.families().values() for a in f.architectures], ids=lambda a: a.hub_id
)
def test_the_registrys_shapes_have_the_published_number_of_parameters(architecture):
    assert loading.parameter_count(sources.configuration(architecture)) == architecture.parameters


@FAMILIES
def test_every_family_loads_from_a_folder_and_with_random_weights_of_its_shape_and_a_seed(family, family_folders):
    folder = str(family_folders[family])
    own, again = loading.load(folder), loading.load(folder)
    drawn, same, other = (loading.load(folder, weights="random", seed=seed) for seed in (5, 5, 6))
    assert (own.weights, drawn.weights) == ("local", "random")
    assert type(own.model) is type(drawn.model)
    assert own.model.config.model_type == registry.families()[family].architectures[0].config["model_type"]
    states = [each.model.state_dict() for each in (own, again, drawn, same, other)]
    for name, matrix in states[0].items():
        assert torch.equal(matrix, states[1][name])
        assert torch.equal(states[2][name], states[3][name])
        if matrix.dim() == 2:
            assert not torch.equal(matrix, states[2][name])
            assert not torch.equal(states[2][name], states[4][name])


def without(pattern):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


FOLDERS = {
    "holds no weights": without("*.safetensors"),
    "no config.json": without("config.json"),
    "no tokenizer": without("token*"),
    "damaged": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    r"lacks weights .*q_proj.weight, 1 in all": lose_a_weight,
    r"other shapes .*down_proj.weight, 18 in all": lambda folder: configure(folder, intermediate_size=100),
    "cannot be read.*save the model again": lambda folder: configure(folder, hidden_size="sixty"),
    "cannot be read.*not a multiple of": lambda folder: configure(folder, num_attention_heads=5),
    "cannot be read.*upgrade": lambda folder: configure(folder, model_type="frobnicate"),
    "cannot be read.*is not run": lambda folder: configure(folder, model_type="f", auto_map={"AutoConfig": "f.F"}),
    "is an encoder-decoder: `kvbook check` takes it": lambda folder: configure(folder, model_type="t5"),
    "type vit cannot be built": lambda folder: configure(folder, model_type="vit"),
}


def test_a_configuration_alone_is_enough_for_random_weights(llama_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    assert loading.load(str(tmp_path), weights="random").weights == "random"


# The class of GPT-2's tokenizer would make an empty one.
@pytest.mark.parametrize(("family", "match"), [*(("llama", match) for match in FOLDERS), ("gpt2", "no tokenizer")])
def test_a_folder_that_holds_no_whole_language_model_is_refused(request, tmp_path, family, match):
    folder = shutil.copytree(request.getfixturevalue(f"{family}_folder"), tmp_path / "m")
    FOLDERS[match](folder)
    assert re.search(match, refusal(loading.load, str(folder)))


def test_an_adapter_is_told_from_a_model_and_the_remedy_is_said(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_config.json cannot be read: save the adapter" in refusal(sources.resolve, str(tmp_path), "stand-in")


def test_outside_a_checkout_the_remedy_for_a_missing_stand_in_is_one_that_a_wheel_has(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "STANDINS", tmp_path)
    assert re.search("book's checkout, .* or name a folder or hub id", refusal(sources.resolve, "llama", "stand-in"))


def test_the_shape_of_a_document_is_drawn_without_the_hub():
    where = sources.resolve("meta-llama/Llama-3.1-8B-Instruct", "random")
    assert (where.source, where.config.num_hidden_layers, where.repository) == ("random", 32, None)


@pytest.mark.parametrize(("match", "name", "options"), [
    ("neither a family", "nosuch", {}), ("CUDA devices", "llama", {"device": "cuda:99"}),
    ("not a torch device", "llama", {"device": "abacus"}), ("dtype 'float8'", "llama", {"dtype": "float8"}),
])
def test_a_name_device_or_dtype_that_is_not_there_is_refused(match, name, options):
    assert match in refusal(loading.load, name, **options)


def test_a_model_larger_than_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(placement, "free_bytes", lambda device: 2**30)
    assert "needs about 29.7 GiB and cpu has 1.0 GiB free" in refusal(loading.load, "falcon", weights="random")


class TestPlacement:
    """Where weights lie; the free memory is told, for no machine of the tests has two GPUs."""

    GPU, ONE_GPU, HOST = torch.device("cuda"), torch.device("cuda", 0), torch.device("cpu")

    @pytest.fixture(autouse=True)
    def room(self, monkeypatch):
        free = {"cuda": 10 * 2**30, "cpu": 100 * 2**30}
        monkeypatch.setattr(placement, "free_bytes", lambda device: free[device.type])

    def test_what_one_gpu_holds_lies_on_it_and_more_is_spread(self):
        assert placement.device_map("m", 8 * 2**30, self.GPU) == {"": self.GPU}
        assert placement.device_map("m", 80 * 2**30, self.HOST) == {"": self.HOST}
        assert placement.device_map("m", 9 * 2**30, self.GPU) == "auto"

    def test_spread_weights_are_the_same_bits(self, llama_folder):
        # Without a GPU "all GPUs and then the host" is the host.
        where = sources.resolve(str(llama_folder), "stand-in")
        spread = loading._pretrained(where, torch.float32, "auto", {}).state_dict()
        whole = loading.load(str(llama_folder)).model.state_dict()
        assert all(torch.equal(spread[name], whole[name]) for name in whole)

    @pytest.mark.parametrize(("gib", "device", "match"), [
        (9, ONE_GPU, r"needs about 10\.3 GiB and cuda:0 has 10\.0 GiB free"),
        (1000, GPU, r"needs about 1150\.0 GiB; all GPUs .* have 1\d\d\.0 GiB free"),
        (9, GPU, "pip install accelerate"),
    ])
    def test_what_does_not_fit_where_it_may_lie_is_refused(self, gib, device, match, monkeypatch):
        if "accelerate" in match:
            monkeypatch.setitem(sys.modules, "accelerate", None)
        assert re.search(match, refusal(placement.device_map, "m", gib * 2**30, device))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_weights_are_drawn_in_their_own_dtype_and_not_first_in_fp32(dtype, llama_folder):
    with Watching() as watched:
        loading.load(str(llama_folder), weights="random", dtype=dtype)
    drawn = [made for made in watched.seen if isinstance(made, torch.Tensor) and made.dim() == 2 and made.is_cpu]
    assert {matrix.dtype for matrix in drawn if matrix.is_floating_point()} == {getattr(torch, dtype)}


def test_both_styles_of_tokenizer_have_one_size_and_give_text_back():
    text = "def f(x):\n    return x.What  # Ünicode, tabs\t and 12345\n"
    for style in ("gpt2", "llama3"):
        bpe = training.shared_bpe(style)
        assert bpe.get_vocab_size() == standins.VOCABULARY_SIZE
        assert bpe.decode(bpe.encode(text).ids) == text


def test_llama_begins_every_text_and_qwen_does_not(bpe):
    llama, qwen = (standins.tokenizer_of(bpe, family, 64) for family in ("llama", "qwen2"))
    assert llama("x")["input_ids"] == [llama.bos_token_id, *qwen("x")["input_ids"]]
