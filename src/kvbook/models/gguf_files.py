"""GGUF files, llama.cpp's format: read once, with transformers' own reader, and kept as a checkpoint.

The reader turns every block of rounded numbers into fp32, which takes a quarter of a minute for 135 million parameters,
and the model that it returns cannot be saved as it is.  The unpacked checkpoint loads in a second or two, and is then a
folder like any other.
"""

import contextlib
import functools
import importlib.metadata
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from kvbook import UserError, fingerprint, refusing
from kvbook.models import hub, placement, unpacked

_LIBRARIES = ("gguf", "accelerate")
_MAGIC = b"GGUF"
# Of the fp32 numbers there is one copy from the reader and one in the model.
_COPIES = 2
# Vocabularies, by llama.cpp's names, in which each digit is a word of its own.  transformers' reader does not know them
# and cuts runs of blanks before a number in another place.
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# llama.cpp stretches rotary positions by these; transformers' reader knows of them for one architecture alone.
_STRETCHED = re.compile(r"^rope_(freqs|factors)")
# The library's own words for a quantization that it does not know, or cannot undo.
_UNKNOWN_TYPE = re.compile(r"GGMLQuantizationType|[Dd]equantiz")
_READS_STRETCHED = ("gpt-oss",)


def unpack(file: Path) -> Path:
    """Unpack a GGUF file, unless that has been done.

    Parameters
    ----------
    file : Path
        Of a causal language model, with its tokenizer, in one piece.

    Returns
    -------
    Path
        A folder with weights in fp32, configuration and tokenizer; nothing is left of one that could not be finished.

    Raises
    ------
    UserError
        For a file that is not there, is damaged, is of an architecture or has positions that transformers does not
        read; for a missing library, or too little memory or room on the disk.
    """
    placement.need(f"to read {file.name}", *_LIBRARIES)
    with refusing(lambda error: f"{file} cannot be read: {error.strerror}", OSError):
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{file} is no GGUF file: name one, or the folder that `save_pretrained` wrote")
        sha256 = fingerprint.of_large_file(file)
    folder = unpacked.folder_of(file.stem, sha256)
    if unpacked.is_whole(folder):
        return folder
    with unpacked.workplace() as temporary:
        made = temporary / "checkpoint"
        made.mkdir()
        _write(file.absolute(), sha256, made)
        try:
            made.rename(folder)
        except OSError:
            # Another process that was faster made the same one.
            if not unpacked.is_whole(folder):
                raise
    return folder


def _write(file: Path, sha256: str, made: Path) -> None:
    config, state, generation, tokenizer = _read(file)
    # What names its maker's folders, and how the numbers were packed, is no part of the checkpoint.
    config.name_or_path = ""
    with contextlib.suppress(AttributeError):
        del config.quantization_config
    try:
        save_file(state, made / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(made)
        generation.save_pretrained(made)
        tokenizer.save_pretrained(made)
    except Exception as error:
        # Libraries written in Rust say with an exception of their own what the system said to them.
        number = re.search(r"os error (\d+)", str(error))
        if isinstance(error, OSError) or not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    about = {
        "gguf_sha256": sha256, "weights_sha256": fingerprint.of_file(made / "model.safetensors"),
        "transformers": transformers.__version__, "gguf": importlib.metadata.version("gguf"),
    }
    (made / unpacked.ORIGIN).write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def _read(file: Path) -> tuple[PretrainedConfig, dict[str, torch.Tensor], Any, PreTrainedTokenizerBase]:
    """Read configuration, weights, settings of generation and tokenizer."""
    # The reader shows a bar of its own, which in a notebook is part of the page.
    with contextlib.redirect_stderr(io.StringIO()), _one_reading():
        architecture, pre_tokenizer, sizes = _header(file)
        # The reader raises whatever a wrong or unknown file makes of it.
        with refusing(lambda error: _refusal(file, error, architecture)):
            options = {"gguf_file": file.name, "local_files_only": True}
            config = AutoConfig.from_pretrained(file.parent, **options)
            with torch.device("meta"):
                blank = AutoModelForCausalLM.from_config(config)
            needed = sum(p.numel() for p in blank.parameters()) * torch.float32.itemsize
            placement.check_memory(file.name, needed * _COPIES, torch.device("cpu"))
            unpacked.check_room(needed, unpacked.models_folder())
            # Newer versions may else keep the blocks, and fetch kernels for them.
            packing = getattr(transformers, "GgufConfig", None)
            plain = {"quantization_config": packing(dequantize=True)} if packing else {}
            model, report = AutoModelForCausalLM.from_pretrained(
                file.parent, config=config, dtype=torch.float32, output_loading_info=True, **options, **plain
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{file.name} lacks weights of its model ({missing[0]}, {len(missing)} in all): get it again")
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    if tied:
        # Some files hold the one matrix twice.
        sizes.pop("output.weight", None)
    left = sum(sizes.values()) - sum(tensor.numel() for tensor in state.values())
    if left > 0:
        raise UserError(f"{file.name} holds {left:,} numbers that transformers leaves out: it would be another model")
    if pre_tokenizer in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return model.config, state, model.generation_config, tokenizer


@contextlib.contextmanager
def _one_reading() -> Iterator[None]:
    """Take a third of the time: transformers reads the vocabulary four times, and lists names for each module anew."""
    import gguf

    def mapped(path: str, mode: str) -> np.ndarray:
        # Each of half a million small pieces of a memmap is one too, which takes as long as all else.
        return np.memmap(path, mode=mode).view(np.ndarray)

    arrays = SimpleNamespace(**vars(np) | {"memmap": mapped})
    shared, names = map(functools.cache, (gguf.GGUFReader, gguf.get_tensor_name_map))
    with (
        patch.object(gguf.gguf_reader, "np", arrays), patch.object(gguf, "get_tensor_name_map", names),
        patch.object(gguf, "GGUFReader", lambda file: shared(str(file))),
    ):
        yield


def _header(file: Path) -> tuple[str, str, dict[str, int]]:
    """Read a file's architecture, its vocabulary's kind, and how many numbers each of its tensors has."""
    from gguf import GGUFReader

    with refusing(lambda error: _refusal(file, error)):
        reader = GGUFReader(file)
        # A vocabulary's words and merges, of no use here, take seconds.
        short = {name: field for name, field in reader.fields.items() if name.count(".") < 4 and len(field.data) == 1}
        words = {name: field.contents() for name, field in short.items()}
    architecture = str(words.get("general.architecture", "none"))
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    stretched = words.get(f"{architecture}.rope.scaling.type", "none") != "none" or any(map(_STRETCHED.match, sizes))
    if stretched and architecture not in _READS_STRETCHED:
        what = "stretches its rotary positions, which transformers does not read from GGUF"
        raise UserError(f"{file.name} {what}: use the model's own folder or hub id")
    return architecture, str(words.get("tokenizer.ggml.pre", "")), sizes


def _refusal(file: Path, error: Exception, architecture: str | None = None) -> str:
    """Say why a file cannot be read; while its architecture is not known, it is its header that cannot be."""
    words = hub.first_line(error)
    if _UNKNOWN_TYPE.search(words):
        # numpy writes its numbers with their class.
        words = re.sub(r"np\.\w+\((\d+)\)", r"\1", words)
        remedy = "upgrade gguf, or take the file in another quantization, such as Q8_0"
        return f"{file.name} holds numbers of a type that cannot be read ({words}): {remedy}"
    if architecture is None:
        return f"{file.name} is damaged ({words}): get it again"
    if isinstance(error, NotImplementedError | KeyError) or re.search(r"not supported|Unrecognized|Unknown", words):
        what = f"of the architecture {architecture!r}, which transformers cannot read from GGUF ({words})"
        return f"{file.name} is {what}: use the model's own folder or hub id"
    return f"{file.name} cannot be read ({words}): get it again, or use the model's own folder or hub id"
