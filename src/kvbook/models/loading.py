"""One call for any model: a stand-in, the hub, a local folder, or the true shape with random weights.

>>> loaded = load("gpt2", dtype="float32")
>>> loaded.weights
'stand-in'
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from kvbook import fingerprint, paths
from kvbook.errors import UserError
from kvbook.models import placement, registry

# Parameters from which on loading takes long enough to be watched.
_LARGE = 1e9

Source = Literal["stand-in", "hub", "random", "local"]


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
        As it was asked for, a folder by its last part.
    weights : {"stand-in", "hub", "random", "local"}
        To be said in every caption.
    dtype : str
        Name of the dtype of weights and arithmetic.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    weights: Source
    dtype: str


def context_length(config: PretrainedConfig) -> int | None:
    """Read from a configuration how many tokens a model can see, or None."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if (length := getattr(config, name, None)) is not None:
            # RoBERTa numbers its positions from behind the padding id.
            return length - config.pad_token_id - 1 if config.model_type == "roberta" else length
    return None


@dataclass(frozen=True)
class _Where:
    """A request, resolved: which source, which folder or hub id, which configuration."""

    source: Source
    name: str
    path: str
    config: PretrainedConfig
    tokenizer_path: str
    identity: dict[str, Any]


def _is_masked(config: PretrainedConfig) -> bool:
    return config.model_type == "roberta" and not config.is_decoder


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _folder(path: Path, source: Source, name: str) -> _Where:
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds no config.json: name the folder that `save_pretrained` wrote")
    files = _weight_files(path)
    if not files:
        raise UserError(f"{path} holds no weights (*.safetensors): save the model there with `save_pretrained`")
    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{path}/config.json cannot be read ({_first_line(error)}): save the model again") from error
    identity = {"sha256": fingerprint.of_values([fingerprint.of_file(file) for file in files])}
    if len(files) == 1:
        identity = {"sha256": fingerprint.of_file(files[0])}
    return _Where(source, name, str(path), config, str(path), identity)


def _hub_config(hub_id: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(hub_id, trust_remote_code=False)
    except Exception as error:
        raise _hub_error(hub_id, error) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _hub_error(hub_id: str, error: Exception) -> UserError:
    """Say in one line what went wrong between us and the hub."""
    from huggingface_hub import errors as hub

    # transformers wraps the hub's errors; the cause tells more than the wrapper.
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = tuple(type(link) for link in chain)

    def among(*names: type[BaseException]) -> bool:
        return any(issubclass(kind, names) for kind in kinds)

    if among(hub.GatedRepoError):
        return UserError(f"{hub_id} is gated: accept its licence on the hub, then set HF_TOKEN to a token of yours")
    if among(hub.RepositoryNotFoundError, hub.HFValidationError):
        return UserError(f"{hub_id!r} is not on the hub (or private): check owner/name, or set HF_TOKEN")
    if among(SafetensorError):
        return UserError(f"{hub_id}: the downloaded weights are damaged: delete them from HF_HOME and run again")
    if among(hub.EntryNotFoundError) and not among(hub.LocalEntryNotFoundError):
        return UserError(f"{hub_id} lacks a file that is needed (safetensors only, no pickles): {_first_line(error)}")
    if among(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, OSError):
        return UserError(
            f"{hub_id} is not in the local cache and the hub cannot be reached: go online, or name a local folder, "
            "or use weights='stand-in' with a family's name"
        )
    return UserError(f"{hub_id} cannot be loaded: {_first_line(error)}")


def _resolve(model: str, weights: str) -> _Where:
    families = registry.families()
    folder = Path(model).expanduser()
    if model in families and not folder.joinpath("config.json").is_file():
        family = families[model]
        standin = paths.STANDINS / model
        if weights == "stand-in":
            if not standin.is_dir():
                raise UserError(f"{standin} is missing: make it with `python -m kvbook models train --family {model}`")
            return _folder(standin, "stand-in", model)
        architecture = family.architectures[0]
        if weights == "random":
            values = dict(architecture.config)
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            return _Where("random", model, architecture.hub_id, config, str(standin), {"shape_of": architecture.hub_id})
        return _Where(
            "hub", model, architecture.hub_id, _hub_config(architecture.hub_id), architecture.hub_id,
            {"hub_id": architecture.hub_id},
        )  # fmt: skip
    if folder.is_dir():
        found = _folder(folder.resolve(), "local", folder.resolve().name)
        if weights == "random":
            return _Where("random", found.name, found.path, found.config, found.path, {"shape_of": found.name})
        return found
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        config = _hub_config(model)
        source: Source = "random" if weights == "random" else "hub"
        return _Where(source, model, model, config, model, {"hub_id": model})
    raise UserError(
        f"model {model!r} is neither a family ({', '.join(families)}), nor an existing folder, nor a hub id (owner/name)"
    )


def identify(model: str, weights: str = "stand-in", seed: int = 0) -> dict[str, Any]:
    """Say which weights a request leads to, without loading them.

    Parameters
    ----------
    model, weights, seed
        As for `load`.

    Returns
    -------
    dict
        ``name``, ``weights``, ``architecture`` (transformers' model type), ``layers``, ``width``, ``context_length``, and
        what identifies the weights: the files' ``sha256``, the hub's ``hub_id`` and ``revision``, or the ``seed``.

    Raises
    ------
    UserError
        As `load`, as far as it shows before the weights are read.
    """
    where = _resolve(model, weights)
    identity = dict(where.identity)
    if where.source == "random":
        identity["seed"] = seed
    elif revision := getattr(where.config, "_commit_hash", None):
        identity["revision"] = revision
    return {
        "name": where.name,
        "weights": where.source,
        "architecture": where.config.model_type,
        "parameters": parameter_count(where.config),
        "layers": where.config.num_hidden_layers,
        "width": where.config.hidden_size,
        "context_length": context_length(where.config),
        **identity,
    }


def parameter_count(config: PretrainedConfig) -> int:
    """Count the parameters that a configuration makes, without allocating them."""
    auto = AutoModelForMaskedLM if _is_masked(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return sum(p.numel() for p in auto.from_config(config).parameters())


def load(
    model: str,
    *,
    weights: str = "stand-in",
    dtype: str = "float32",
    device: str = "cpu",
    attention: str | None = None,
    seed: int = 0,
) -> Loaded:
    """Load a model and its tokenizer.

    Parameters
    ----------
    model : str
        A family's name (see ``data/models/registry.yaml``), a local folder, or a hub id.
    weights : {"stand-in", "hub", "random"}
        For a family's name: its stand-in, its first hub id, or that architecture with random weights.  A folder or a
        hub id brings its own weights; with ``"random"`` its architecture gets random ones.
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``; the weights are converted to it.
    device : str
        A torch device's name.
    attention : str, optional
        transformers' ``attn_implementation``; its own choice by default.
    seed : int
        Of random weights.

    Returns
    -------
    Loaded

    Raises
    ------
    UserError
        For a name that leads nowhere, a folder without weights, damaged files, a gated or unreachable repository, a
        device or dtype that is not there, or a model larger than the free memory.
    """
    where = _resolve(model, weights)
    place = placement.device_of(device)
    torch_dtype = placement.dtype_on(dtype, place)
    parameters = parameter_count(where.config)
    placement.check_memory(where.name, parameters, torch_dtype.itemsize, place)

    # A bar helps while gigabytes are read; for a small model it is a flicker between our own progress lines.
    if parameters < _LARGE:
        logging.disable_progress_bar()
    else:
        logging.enable_progress_bar()
    auto = AutoModelForMaskedLM if _is_masked(where.config) else AutoModelForCausalLM
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        if where.source == "random":
            torch.manual_seed(seed)
            # Weights are drawn where and as they will be used: no copy in fp32 first.
            with place:
                built = auto.from_config(where.config, dtype=torch_dtype, **options)
        else:
            built = auto.from_pretrained(
                where.path, dtype=torch_dtype, use_safetensors=True, trust_remote_code=False,
                device_map=None if place.type == "cpu" else {"": place}, **options,
            )  # fmt: skip
    except SafetensorError as error:
        raise UserError(
            f"{where.path}: the weights are damaged ({_first_line(error)}): fetch or save them again"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        if where.source == "hub":
            raise _hub_error(where.path, error) from error
        raise UserError(f"{where.path} cannot be loaded: {_first_line(error)}") from error
    built = built.to(place).eval().requires_grad_(False)
    return Loaded(model=built, tokenizer=_tokenizer(where), name=where.name, weights=where.source, dtype=dtype)


def _tokenizer(where: _Where) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(where.tokenizer_path, trust_remote_code=False)
    except Exception as error:
        if where.source == "hub":
            raise _hub_error(where.tokenizer_path, error) from error
        raise UserError(
            f"{where.tokenizer_path} holds no tokenizer that can be read: save it there with `tokenizer.save_pretrained`"
        ) from error


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
    return _tokenizer(_resolve(model, weights))


def standin_facts(family: str) -> dict[str, Any]:
    """Read how a stand-in was trained: its ``training.json``."""
    return json.loads((paths.STANDINS / family / "training.json").read_text("utf-8"))


def check_length(model: dict[str, Any], n_tokens: int) -> None:
    """Refuse a text that is longer than a model's context.

    Parameters
    ----------
    model : dict
        What `identify` gave.
    n_tokens : int
        Length of the text.

    Raises
    ------
    UserError
        With both lengths.
    """
    limit = model["context_length"]
    if limit is not None and n_tokens > limit:
        raise UserError(f"{n_tokens} tokens are more than the context of {model['name']}, {limit}: lower n_tokens")
