import json
import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import confined
import forked
import gguf
import numpy as np
import pytest
import small_gguf
import torch
from refusing import refusal

from kvbook import paths
from kvbook.models import gguf_files, loading, placement, sources, unpacked

# One process for all sizes, since most of its time is spent on importing the libraries.
FILL = """
import os, subprocess, sys
from pathlib import Path
from kvbook import UserError
from kvbook.models import gguf_files, unpacked
file, build, *sizes = sys.argv[1:]
unpacked.check_room = lambda *_: None
for size in sizes:
    subprocess.run(["mount", "-o", f"remount,size={size}", build], check=True)
    try:
        gguf_files.unpack(Path(file))
    except UserError as error:
        print(f"{size}: {error}; left {sorted(os.listdir(unpacked.models_folder()))}")
"""


@pytest.fixture(scope="module")
def write(llama, bpe, tmp_path_factory):
    def written(name="small.gguf", **changes):
        return small_gguf.write(tmp_path_factory.mktemp("gguf") / name, llama, bpe, **changes)

    return written


@pytest.fixture(scope="module")
def file(write):
    return write()


def norm(value):
    """Return the change that makes another file: its last norm has this weight."""
    return {"more": {"output_norm.weight": np.full(32, value)}}


def test_a_gguf_file_is_the_model_and_the_tokenizer_that_were_written(file, llama, bpe):
    loaded, text = loading.load(str(file)), "def f(x):\n    return x + 1\n"
    assert (loaded.name, loaded.weights) == ("small", "gguf")
    read, own = loaded.model.state_dict(), llama.state_dict()
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], own[name]) for name in own)
    ids = bpe.encode(text, add_special_tokens=False).ids
    assert loaded.tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def test_a_quantized_matrix_is_read_too(llama, write):
    matrix, kind = small_gguf.tensors(llama)["blk.0.attn_v.weight"], gguf.GGMLQuantizationType.Q8_0
    rounded = gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind)
    coarse = write("coarse.gguf", more={"blk.0.attn_v.weight": rounded})
    read = loading.load(str(coarse)).model.model.layers[0].self_attn.v_proj.weight
    assert torch.equal(read, torch.from_numpy(rounded))
    assert not torch.equal(read, torch.from_numpy(matrix))


def test_a_file_is_read_once_and_the_library_is_left_as_it_was(write, monkeypatch):
    counted = Mock(wraps=gguf.GGUFReader)
    monkeypatch.setattr(gguf, "GGUFReader", counted)
    gguf_files.unpack(write(**norm(6.0)))
    counted.assert_called_once()
    assert gguf.GGUFReader is counted


@pytest.mark.parametrize(("pre", "words"), [("smollm", ["x", "ĠĠ", "1", "2"]), ("gpt-2", ["x", "Ġ", "Ġ12"])])
def test_a_vocabulary_whose_digits_stand_alone_is_split_so(write, pre, words):
    split = loading.load(str(write(pre=pre))).tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  12")
    assert [piece for piece, _ in split] == words


def test_it_is_unpacked_once_and_the_identity_holds_both_digests(file, write, monkeypatch):
    first = loading.identify(str(file))
    with monkeypatch.context() as patched:
        patched.setattr(gguf_files, "_write", None)
        assert loading.identify(str(file)) == first
        assert loading.identify(str(write())) == first, "equal bytes, equal identity, wherever they lie"
    assert first["weights"] == "gguf"
    changed = loading.identify(str(write(**norm(2.0))))
    assert changed["sha256"] != first["sha256"]
    assert changed["gguf_sha256"] != first["gguf_sha256"]
    assert str(file.parent) not in json.dumps(first)


def test_weights_that_were_changed_afterwards_are_refused(write):
    file = write(**norm(3.0))
    weights = gguf_files.unpack(file) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "not those that were unpacked" in refusal(lambda: loading.identify(str(file)))


def test_an_experiment_takes_it_and_runs_without_a_notebook(kvbook_here, file, text_folder):
    asked = f"model={file} reference_model={file} corpus={text_folder} n_samples=1 n_tokens=8 dtypes=fp32"
    done = kvbook_here("run", "layer_drift", *asked.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"8 rows in {paths.RUNS}")


def test_a_link_to_a_file_of_another_name_is_read(file, tmp_path, llama_folder):
    # As the hub's cache keeps its files.
    blob, link = tmp_path / "0123abcd", tmp_path / "linked.gguf"
    blob.write_bytes(file.read_bytes())
    link.symlink_to(blob)
    assert loading.identify(str(link))["name"] == "linked"
    assert [sources.resolve(str(path), "stand-in").source for path in (link, llama_folder)] == ["gguf", "local"]


# One line each, and nothing half-written.


def refused(match, file):
    before = set(unpacked.models_folder().glob("*"))
    assert re.search(match, refusal(loading.load, str(file)))
    assert set(unpacked.models_folder().glob("*")) == before


@pytest.mark.parametrize("library", ["gguf", "accelerate"])
def test_a_missing_library(file, monkeypatch, library):
    found = placement.importlib.util.find_spec
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None if name == library else found(name))
    refused(f"takes {library}: pip install {library}", file)


def test_no_file_a_folder_and_another_kind_of_file(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "text.gguf").write_text("GGU")
    refused("cannot be read: No such file", tmp_path / "none.gguf")
    refused("cannot be read: Is a directory", tmp_path / "folder.gguf")
    refused("is no GGUF file", tmp_path / "text.gguf")


@pytest.mark.parametrize("kept", [4, 30, 2000, -5000])
def test_a_file_that_ends_early(file, tmp_path, kept):
    (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:kept])
    refused("is damaged", tmp_path / "short.gguf")


@pytest.mark.parametrize(("changes", "match"), [
    *[({"architecture": name}, f"architecture '{name}', which transformers cannot read")
      for name in ("frobnicate", "bert", "rwkv7")],
    ({"without": ("blk.1.attn_k.weight",)}, r"lacks weights of its model \(.*k_proj.weight, 1 in all\)"),
    ({"more": {"blk.0.attn_q.bias": np.ones(32)}}, "holds 32 numbers that transformers leaves out"),
    ({"words": {"llama.rope.scaling.type": "yarn"}}, "stretches its rotary positions"),
    ({"more": {"rope_freqs.weight": np.ones(4)}}, "stretches its rotary positions"),
    ({"vocabulary": False}, "cannot be read"),
])
def test_what_transformers_would_not_read_or_would_read_as_another_model(write, changes, match):
    refused(match, write(**changes))


def test_too_little_memory_and_too_small_a_disk_are_seen_beforehand(write, monkeypatch):
    file = write(**norm(4.0))
    with monkeypatch.context() as patched:
        patched.setattr(placement, "free_bytes", lambda device: 1000)
        refused("cpu has 0.0 GiB free", file)
    monkeypatch.setattr(unpacked.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    refused("its disk has 0.0 GB free", file)


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_ends_in_one_line_and_leaves_nothing(file, tmp_path):
    """Three libraries write weights, configuration and tokenizer; each finds the disk full in one of the sizes."""
    build = tmp_path / "build"
    build.mkdir()
    sizes, environment = ["100k", "268k", "280k"], os.environ | {"KVBOOK_BUILD": str(build)}
    command = [sys.executable, "-c", FILL, str(file), str(build), *sizes]
    done = confined.run(command, disk=build, size="1m", env=environment)
    full = f"no room left on the disk of {build}/models: free some, or name another folder in KVBOOK_BUILD"
    assert done.stdout.splitlines() == [f"{size}: {full}; left []" for size in sizes], done.stdout


@pytest.mark.slow
def test_two_processes_at_once_leave_one_checkpoint(file, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    ended, said = forked.both(lambda: str(gguf_files.unpack(file)))
    assert ended == [0, 0]
    assert len(said) == 1
    assert len(list((tmp_path / "build" / "models").iterdir())) == 1
