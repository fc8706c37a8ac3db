import json
import os
import sys

import confined
import forked
import llama_equations
import numpy as np
import pytest
import small_gguf
import torch

from kvbook import paths
from kvbook.errors import UserError
from kvbook.models import gguf_files, loading, placement, sources, unpacked

# One process for all sizes, since most of its time is spent on importing the libraries.
FILL = """
import os, subprocess, sys
from pathlib import Path
from kvbook.errors import UserError
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
TEXT = "def f(x):\n    return x + 1\n"


@pytest.fixture(scope="module")
def write(llama, bpe, tmp_path_factory):
    def written(name="small.gguf", **changes):
        return small_gguf.write(tmp_path_factory.mktemp("gguf") / name, llama, bpe, **changes)

    return written


@pytest.fixture(scope="module")
def file(write):
    return write()


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def test_a_gguf_file_is_the_model_that_was_written(file, llama):
    loaded = loading.load(str(file))
    assert (loaded.name, loaded.weights) == ("small", "gguf")
    own = llama.state_dict()
    assert {name: tensor.shape for name, tensor in loaded.model.state_dict().items()} == {
        name: tensor.shape for name, tensor in own.items()
    }
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.model.state_dict().items())


def test_its_logits_are_those_of_the_equations_and_not_of_another_base(file):
    ids = list(range(11, 40))
    found = logits_of(loading.load(str(file), dtype="float64").model, ids)
    assert torch.allclose(found, llama_equations.logits(file, ids), atol=1e-5)
    assert not torch.allclose(found, llama_equations.logits(file, ids, base=100.0), atol=1e-2)


def test_a_quantized_matrix_is_read_too(file, llama, bpe, tmp_path):
    from gguf import GGMLQuantizationType, quants

    matrix = small_gguf.tensors(llama)["blk.0.attn_v.weight"]
    rounded = quants.dequantize(quants.quantize(matrix, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    coarse = small_gguf.write(tmp_path / "coarse.gguf", llama, bpe, more={"blk.0.attn_v.weight": rounded})
    read = loading.load(str(coarse)).model.model.layers[0].self_attn.v_proj.weight
    assert torch.equal(read, torch.from_numpy(rounded))
    assert not torch.equal(read, torch.from_numpy(matrix))


def test_a_file_is_read_once_and_the_library_is_left_as_it_was(write, monkeypatch):
    import gguf

    readings, stock = [], gguf.GGUFReader

    def counted(file):
        readings.append(file)
        return stock(file)

    monkeypatch.setattr(gguf, "GGUFReader", counted)
    gguf_files.unpack(write(more={"output_norm.weight": np.full(32, 6.0)}))
    assert len(readings) == 1
    assert gguf.GGUFReader is counted


def test_its_tokenizer_comes_with_it(file, bpe):
    loaded = loading.load(str(file))
    assert (
        loaded.tokenizer(TEXT, add_special_tokens=False)["input_ids"] == bpe.encode(TEXT, add_special_tokens=False).ids
    )


def test_a_vocabulary_whose_digits_stand_alone_is_split_so(write):
    def words(pre):
        tokenizer = loading.load(str(write(pre=pre))).tokenizer
        return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  12")]

    assert words("smollm") == ["x", "ĠĠ", "1", "2"]
    assert words("gpt-2") == ["x", "Ġ", "Ġ12"]


def test_it_is_unpacked_once_and_the_identity_holds_both_digests(file, write, monkeypatch):
    first = loading.identify(str(file))
    monkeypatch.setattr(gguf_files, "_write", None)
    assert loading.identify(str(file)) == first
    assert first["weights"] == "gguf"
    other = write()
    monkeypatch.undo()
    changed = loading.identify(str(write(more={"output_norm.weight": np.full(32, 2.0)})))
    assert loading.identify(str(other)) == first, "equal bytes, equal identity, wherever they lie"
    assert changed["sha256"] != first["sha256"]
    assert changed["gguf_sha256"] != first["gguf_sha256"]
    assert str(file.parent) not in json.dumps(first)


def test_weights_that_were_changed_afterwards_are_refused(write):
    file = write(more={"output_norm.weight": np.full(32, 3.0)})
    weights = gguf_files.unpack(file) / "model.safetensors"
    bytes_of = bytearray(weights.read_bytes())
    bytes_of[-1] ^= 1
    weights.write_bytes(bytes_of)
    with pytest.raises(UserError, match="not those that were unpacked"):
        loading.identify(str(file))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "--samples=1", "--tokens=8", "--dtypes=float32"), "verdict"),
        (("run", "layer_drift", "n_samples=1", "n_tokens=8", "dtypes=float32"), "8 rows in "),
    ],
    ids=["check", "an experiment"],
)
def test_a_check_and_an_experiment_take_it(kvbook_here, file, text_folder, arguments, said):
    command, *options = arguments
    if command == "check":
        named = [str(file), f"--corpus={text_folder}"]
    else:
        named = [options.pop(0), f"model={file}", f"reference_model={file}", f"corpus={text_folder}"]
    done = kvbook_here(command, *named, *options)
    assert said in done.stdout, done.stderr


def test_its_shape_can_have_random_weights(file):
    drawn = loading.load(str(file), weights="random")
    assert drawn.weights == "random"
    assert not torch.equal(drawn.model.lm_head.weight, loading.load(str(file)).model.lm_head.weight)


def test_a_link_to_a_file_of_another_name_is_read(file, tmp_path):
    # As the hub's cache keeps its files.
    blob = tmp_path / "0123abcd"
    blob.write_bytes(file.read_bytes())
    (tmp_path / "linked.gguf").symlink_to(blob)
    assert loading.identify(str(tmp_path / "linked.gguf"))["name"] == "linked"


def unfinished() -> list[str]:
    folder = unpacked.models_folder()
    return [path.name for path in folder.iterdir() if path.name.startswith(".")] if folder.is_dir() else []


class TestBadInput:
    """One line each, and nothing half-written."""

    def refused(self, match, file):
        before = set(unpacked.models_folder().glob("*"))
        with pytest.raises(UserError, match=match) as error:
            loading.load(str(file))
        assert "\n" not in str(error.value)
        assert set(unpacked.models_folder().glob("*")) == before
        assert unfinished() == []

    def test_no_file(self, tmp_path):
        self.refused("cannot be read: No such file", tmp_path / "none.gguf")

    def test_a_folder(self, tmp_path):
        (tmp_path / "folder.gguf").mkdir()
        self.refused("cannot be read: Is a directory", tmp_path / "folder.gguf")

    def test_another_kind_of_file(self, tmp_path):
        (tmp_path / "text.gguf").write_text("GGU")
        self.refused("is no GGUF file", tmp_path / "text.gguf")

    @pytest.mark.parametrize("kept", [4, 30, 2000, -5000])
    def test_a_file_that_ends_early(self, file, tmp_path, kept):
        (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:kept])
        self.refused("is damaged", tmp_path / "short.gguf")

    @pytest.mark.parametrize("architecture", ["frobnicate", "bert", "rwkv7"])
    def test_an_architecture_that_is_not_read(self, write, architecture):
        self.refused(f"architecture '{architecture}', which transformers cannot read", write(architecture=architecture))

    def test_a_missing_tensor(self, write):
        self.refused(
            r"lacks weights of its model \(.*k_proj.weight, 1 in all\)", write(without=("blk.1.attn_k.weight",))
        )

    def test_a_tensor_that_would_be_left_out(self, write):
        more = {"blk.0.attn_q.bias": np.ones(32)}
        self.refused("holds 32 numbers that transformers leaves out", write(more=more))

    @pytest.mark.parametrize(
        "changes",
        [{"words": {"llama.rope.scaling.type": "yarn"}}, {"more": {"rope_freqs.weight": np.ones(4)}}],
        ids=["named", "given as a tensor"],
    )
    def test_stretched_positions(self, write, changes):
        self.refused("stretches its rotary positions", write(**changes))

    def test_no_vocabulary(self, write):
        self.refused("cannot be read", write(vocabulary=False))

    @pytest.mark.parametrize("library", ["gguf", "accelerate"])
    def test_a_missing_library(self, file, monkeypatch, library):
        found = gguf_files.importlib.util.find_spec
        monkeypatch.setattr(
            gguf_files.importlib.util, "find_spec", lambda name: None if name == library else found(name)
        )
        self.refused(f"takes {library}: pip install {library}", file)

    def test_too_little_memory(self, write, monkeypatch):
        monkeypatch.setattr(placement, "free_bytes", lambda device: 1000)
        self.refused("cpu has 0.0 GiB free", write(more={"output_norm.weight": np.full(32, 4.0)}))

    def test_too_small_a_disk_is_seen_beforehand(self, write, monkeypatch):
        monkeypatch.setattr(unpacked.shutil, "disk_usage", lambda folder: Free())
        self.refused("its disk has 0.0 GB free", write(more={"output_norm.weight": np.full(32, 5.0)}))


class Free:
    free = 10


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_ends_in_one_line_and_leaves_nothing(file, tmp_path):
    """Weights, configuration and tokenizer are written by three libraries; each finds the disk full in one of the sizes."""
    script, build = tmp_path / "unpack.py", tmp_path / "build"
    script.write_text(FILL)
    build.mkdir()
    sizes = ["100k", "268k", "280k"]
    done = confined.run(
        [sys.executable, str(script), str(file), str(build), *sizes], disk=build, size="1m",
        env=os.environ | {"KVBOOK_BUILD": str(build)},
    )
    full = f"no room left on the disk of {build}/models: free some, or name another folder in KVBOOK_BUILD"
    assert done.stdout.splitlines() == [f"{size}: {full}; left []" for size in sizes], done.stdout


@pytest.mark.slow
def test_two_processes_at_once_leave_one_checkpoint(file, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    ended, said = forked.both(lambda: str(gguf_files.unpack(file)))
    assert ended == [0, 0]
    assert len(said) == 1
    assert len(list((tmp_path / "build" / "models").iterdir())) == 1


def test_sources_of_files_and_folders_are_told_apart(file, llama_folder):
    assert sources.resolve(str(file), "stand-in").source == "gguf"
    assert sources.resolve(str(llama_folder), "stand-in").source == "local"
