"""Engines beside the book: their environments, how they start, and their recorded answers; none is needed here."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pandas as pd
import pytest
import small_gguf
from refusing import refusal

from kvbook.models import loading
from kvbook.runs import records
from kvreport.chapters.static_cache import BesideLlamaCppSettings, StaticCacheSettings, one_call
from kvreport.engines import gguf_file, serving
from kvreport.engines.listed import ENGINES


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_listens_on_this_machine_alone_and_in_each_of_its_modes(name, tmp_path):
    engine = ENGINES[name]
    assert engine.lacks
    asked = {"model": tmp_path, "port": 8123, "dtype": engine.dtypes[0]}
    plain = serving.command_of(name, **asked, mode="")
    for mode in engine.modes:
        assert serving.command_of(name, **asked, mode=mode) != plain
    assert "8123" in " ".join(plain)
    said = " ".join(plain) + "".join(Path(part).read_text("utf-8") for part in plain if part.endswith(".py"))
    assert "127.0.0.1" in said
    assert "0.0.0.0" not in said


def test_what_computes_is_installed_in_one_exact_version():
    pinned = [package for engine in ENGINES.values() if not engine.beside for package in engine.packages]
    assert [package for package in pinned if not re.fullmatch(r"[\w.-]+==[\d.]+", package)] == []


def test_an_engine_that_cannot_be_installed_is_named_and_left_out_and_the_others_are_made(monkeypatch, folder, capsys):
    def run(command, **_):
        if "venv" in command:
            (folder / command[3] / "bin").mkdir(parents=True)
            (folder / command[3] / "bin" / "python").touch()
        failed = "xllamacpp" in " ".join(command)
        return subprocess.CompletedProcess(command, int(failed), "", "no matching distribution" if failed else "")

    monkeypatch.setattr(subprocess, "run", run)
    assert serving.make_all(["llama.cpp", "openvino"]) == ["llama.cpp"]
    said = capsys.readouterr()
    assert "llama.cpp is left out, for it cannot be installed: no matching distribution" in said.err
    assert re.search(r"OpenVINO GenAI: made in \d+ s, [\d.]+ GB", said.out)
    assert [serving.is_here(name) for name in ("llama.cpp", "openvino")] == [False, True]
    # A second time it is there.
    serving.make("openvino")
    assert "is in" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "said"), [("ollama", "choose from vllm"), ("vllm", "make engines ENGINE=vllm")])
def test_an_engine_that_is_not_there_is_refused_in_one_line(name, said):
    assert said in refusal(serving.serving(name).__enter__)


def test_a_mode_that_an_engine_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(serving, "is_here", lambda name: True)
    monkeypatch.setattr(serving, "weights_for", lambda name, dtype: None)
    assert "float32 speculation" in refusal(serving.serving("openvino", mode="speculation").__enter__)


@pytest.mark.parametrize(("printed", "said"), [
    ("out of memory", "out of memory"),
    ("may cause `OSError: x`\\n[a.py:1] ValueError: no block\\nRuntimeError: no engine\\nbye", "ValueError: no block"),
])
def test_a_server_that_stops_is_told_with_its_first_error_or_its_last_line(printed, said, monkeypatch, folder):
    monkeypatch.setattr(serving, "is_here", lambda name: True)
    monkeypatch.setattr(serving, "weights_for", lambda name, dtype: folder)
    monkeypatch.setattr(serving, "command_of", lambda name, **_: ["/bin/sh", "-c", f"printf '{printed}'; exit 3"])
    assert f"vLLM stopped with status 3: {said}" in refusal(serving.serving("vllm").__enter__)


def test_transformers_serve_gets_a_folder_whose_configuration_names_the_models_class(monkeypatch, folder):
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    (model / "tokenizer.json").write_text("{}", "utf-8")
    monkeypatch.setattr(serving.packages, "folder", lambda family: model)
    assert serving.weights_for("vllm", "float32") == model
    for _ in range(2):
        named = serving.weights_for("transformers", "float32")
        content = json.loads((named / "config.json").read_text("utf-8"))
        assert content == {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        assert (named / "tokenizer.json").read_text("utf-8") == "{}"
    # The model's own folder is left as it was.
    assert (model / "config.json").read_text("utf-8") == '{"model_type": "llama"}'


def test_an_engine_sees_only_its_own_packages(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = serving.variables_of(ENGINES["vllm"])
    assert "PYTHONPATH" not in found
    assert found["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_file_in_gguf_has_the_dtype_of_the_model_and_its_tokenizer(dtype, tmp_path):
    words = {"model": {"vocab": {f"w{place}": place for place in range(1, 320)}, "merges": [["w", "1"]]},
             "added_tokens": [{"id": 0, "content": "<end>"}]}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(words), "utf-8")
    file = gguf_file.write_gguf(loading.load("llama", dtype=dtype).model, tmp_path / "model.gguf", tokenizer)
    read = gguf.GGUFReader(file)
    kinds = {one.tensor_type.name for one in read.tensors if len(one.shape) > 1}
    assert kinds == {{"float32": "F32", "float16": "F16"}[dtype]}
    assert read.get_field("tokenizer.ggml.tokens").contents()[:2] == ["<end>", "w1"]
    assert read.get_field("tokenizer.ggml.token_type").contents()[:2] == [3, 1]
    assert read.get_field("tokenizer.ggml.merges").contents() == ["w 1"]
    assert read.get_field("general.file_type").contents() == {"float32": 0, "float16": 1}[dtype]


# The comparison with llama.cpp: it reads the model's own weights, and is made on demand alone.

def test_every_weight_is_written_and_no_other_number(tmp_path):
    model = loading.load("llama", dtype="bfloat16").model
    tensors = gguf.GGUFReader(gguf_file.write_gguf(model, tmp_path / "model.gguf")).tensors
    written = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in tensors}
    expected = small_gguf.tensors(copy.deepcopy(model).float())
    assert [name for name in written if not np.array_equal(written[name], expected[name])] == []
    assert sum(one.size for one in written.values()) == model.num_parameters()
    # The control: in the order of rows that transformers keeps it is another matrix.
    kept = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    assert not np.array_equal(written["blk.0.attn_q.weight"], kept)


def test_a_chapter_asks_for_no_comparison_with_llama_cpp_and_without_it_one_line_says_what_to_install(monkeypatch):
    assert one_call.inputs_beside(StaticCacheSettings()) is None
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "pip install llama-cpp-python" in refusal(lambda: one_call.inputs_beside(BesideLlamaCppSettings()))


@pytest.mark.parametrize("same", [True, False])
def test_a_program_that_begins_with_another_token_is_not_compared(monkeypatch, tmp_path, same):
    writer = records.Writer(tmp_path)
    library, theirs = SimpleNamespace(), ([0.002] * 6, [7 if same else 8] * 6)
    monkeypatch.setattr(
        one_call, "steps_of", lambda decoder, *_: theirs if decoder is library else ([0.001] * 6, [7] * 6)
    )
    monkeypatch.setattr(one_call, "_LlamaCpp", lambda *_: library)
    monkeypatch.setattr(one_call, "by_calls", lambda *_: ([0.0005] * 6, [7] * 6))
    settings = BesideLlamaCppSettings(model="llama", weights="stand-in", n_new_tokens=6, n_repeats=2)
    if not same:
        assert "another token" in refusal(one_call.measure_beside, settings, {}, writer)
        return
    one_call.measure_beside(settings, {}, writer)
    found = pd.read_csv(tmp_path / "rows.csv").pivot(index="repeat", columns="program", values="step_s")
    assert found.to_numpy() == pytest.approx(np.array([[0.002, 0.0005, 0.001]] * 2))
