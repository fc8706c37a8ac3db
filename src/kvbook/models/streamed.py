"""A model of which one part's weights are in memory at a time: a decoder layer, or another module that holds weights.

The class, its forward and its configuration are transformers' own, and so is what turns a checkpoint's names and dtypes
into the class's.  Only where the weights are, and when, differs.
"""

import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from kvbook import UserError
from kvbook.models import decoders, loading, sources

try:
    from transformers import core_model_loading as checkpoints
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
except ImportError:
    # Before release 5.
    checkpoints = None

# What random weights are drawn in: most large checkpoints are kept so.
DRAWN_IN = torch.bfloat16
# The parameters of modules that have parts inside; they stay in memory.
RESIDENT = ""


class Streamed:
    """A model in one dtype whose weights come and go by parts; called as it is, each part is loaded when it is run.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model.
    dtype : torch.dtype
        Of weights and arithmetic.
    source : Source
        Of the weights; may be shared with the same model in other dtypes.

    Attributes
    ----------
    model : PreTrainedModel
        Its parameters are NaN while they are not loaded.
    parts : dict of str to Module
        What is loaded at once, by its name.
    weights : dict of str to list of str
        Names of the parameters of each part.
    tied : dict of str to list of str
        Names under which the model has each parameter, its own first.
    run : callable
        Runs a part, given its name, its forward and its arguments.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, source: "Source") -> None:
        # What is chosen for one dtype, such as how experts are computed, is not chosen for the others.
        with _weightless():
            self.model = loading.from_config(copy.deepcopy(config), dtype).eval()
        self.dtype, self.source, self.parts = dtype, source, parts_of(self.model)
        self.tied = _tied(self.model)
        # Each parameter's place, and what is there while it is not loaded: one NaN, repeated.
        self._places, self.weights = {}, {part: [] for part in (RESIDENT, *self.parts)}
        for name in self.tied:
            path, _, last = name.rpartition(".")
            module = self.model.get_submodule(path)
            self._places[name] = (module, last, _nothing(module._parameters[last]))
            self.weights[self.part_of(name)].append(name)
        self._set(dict.fromkeys(self._places))
        self._set(source.load(self, RESIDENT))
        self.run: Callable[..., Any] = self.on_demand
        for part, module in self.parts.items():
            module.forward = self._runs(part, module.forward)

    def part_of(self, name: str) -> str:
        """Find the part to which a parameter or buffer belongs."""
        while name and name not in self.parts:
            name = name.rpartition(".")[0]
        return name

    def _runs(self, part: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*given: Any, **named: Any) -> Any:
            return self.run(part, forward, given, named)

        return run

    def on_demand(self, part: str, forward: Callable[..., Any], given: tuple, named: dict[str, Any]) -> Any:
        """Load a part, run it, and let it go."""
        with self.holding(part):
            return forward(*given, **named)

    @contextmanager
    def holding(self, part: str) -> Iterator[None]:
        """Keep the weights of a part in memory while this is open."""
        try:
            self._set(self.source.load(self, part))
            yield
        finally:
            self._set(dict.fromkeys(self.weights[part]))

    def _set(self, weights: dict[str, torch.Tensor | None]) -> None:
        for name, weight in weights.items():
            module, last, nothing = self._places[name]
            module._parameters[last] = nothing if weight is None else nn.Parameter(weight, requires_grad=False)

    @torch.no_grad()
    def initialised(self, part: str) -> dict[str, torch.Tensor]:
        """Return a part's weights as its class draws them, by their names."""
        names = self.weights[part]
        self._set({name: torch.full(self.model.get_parameter(name).shape, torch.nan, dtype=DRAWN_IN) for name in names})
        for module in dict.fromkeys(self._places[name][0] for name in names):
            self.model._init_weights(module)
            # What the model's rule leaves to the module's own.
            if any(value.view(-1)[0].isnan() for value in module._parameters.values() if value is not None):
                module.reset_parameters()
        return self.taken()

    def taken(self) -> dict[str, torch.Tensor]:
        """Return the weights that are there, by their names, and let them go."""
        found = {
            name: module._parameters[last].detach() for name, (module, last, nothing) in self._places.items()
            if module._parameters[last] is not nothing
        }
        self._set(dict.fromkeys(found))
        return found


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Find what is loaded at once: each member of the outermost lists of modules, and each other one with weights."""
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if next(child.parameters(), None) is None or any(child is part for part in found.values()):
                continue
            has_inside = any(next(each.parameters(), None) is not None for each in child.children())
            if isinstance(module, nn.ModuleList) or not has_inside:
                found[inner] = child
            else:
                look(child, inner)

    look(model, "")
    return found


def is_layer(part: str) -> bool:
    """Tell a member of a list from a module of its own."""
    return part.rpartition(".")[2].isdigit()


def _tied(model: nn.Module) -> dict[str, list[str]]:
    by_value: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        by_value.setdefault(id(value), []).append(name)
    return {name: [name, *(other for other in names if other != name)] for names in by_value.values() for name in names}


@contextmanager
def _weightless() -> Iterator[None]:
    """Make parameters without memory or numbers while this is open, and buffers as they are."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    drawn = patch.object(PreTrainedModel, "initialize_weights", lambda _model, *_given, **_named: None)
    with patch.object(nn.Module, "register_parameter", on_meta), drawn:
        yield


def _nothing(meta: torch.Tensor) -> nn.Parameter:
    one = torch.full((), torch.nan if meta.is_floating_point() else 0, dtype=meta.dtype)
    return nn.Parameter(one.expand(meta.shape), requires_grad=False)


class Checkpoint:
    """Weights in files of safetensors.

    Parameters
    ----------
    folder : Path
        Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._mapping, self._keys = folder, None, {}
        index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            self.files = json.loads(index.read_text("utf-8"))["weight_map"]
            return
        self.files = {}
        for file in [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                self.files |= dict.fromkeys(opened.keys(), file.name)

    def all_files(self) -> list[Path]:
        """List the files."""
        return [self.folder / name for name in sorted(set(self.files.values()))]

    def load(self, streamed: Streamed, part: str) -> dict[str, torch.Tensor]:
        """Read the tensors of a part, converted as `from_pretrained` converts them."""
        model, weights = streamed.model, streamed.weights[part]
        if self._mapping is None:
            self._mapping = get_model_conversion_mapping(model) or []
            self._keys = self._by_part(streamed)
        keys = self._keys.get(part, [])
        # A bar for each part would be a flood.
        logging.disable_progress_bar()
        with ExitStack() as opened:
            files = {
                name: opened.enter_context(safe_open(self.folder / name, framework="pt"))
                for name in {self.files[key] for key in keys}
            }
            checkpoints.convert_and_load_state_dict_in_model(
                model, {key: files[self.files[key]].get_slice(key) for key in keys}, **self._how(streamed)
            )
        read = streamed.taken()
        found = {name: next((read[other] for other in streamed.tied[name] if other in read), None) for name in weights}
        sources.refuse_lacking(self.folder, [name for name, tensor in found.items() if tensor is None])
        return found

    def _how(self, streamed: Streamed) -> dict[str, Any]:
        """Return the loader's further arguments, some of which early releases of 5 take apart."""
        model, takes = streamed.model, inspect.signature(checkpoints.convert_and_load_state_dict_in_model).parameters
        apart = {"tp_plan": None, "dtype_plan": getattr(model, "dtype_plan", None)}
        plan = {"dtype_plan": model._get_dtype_plan(streamed.dtype)} if hasattr(model, "_get_dtype_plan") else {}
        config = LoadStateDictConfig(dtype=streamed.dtype, weight_mapping=self._mapping, **plan)
        return {"load_config": config} | {name: value for name, value in apart.items() if name in takes}

    def _by_part(self, streamed: Streamed) -> dict[str, list[str]]:
        """List the checkpoint's tensors that each part needs; a tied one may be needed by two."""
        kinds = (checkpoints.WeightRenaming, checkpoints.WeightConverter)
        renamings, converters = ([each for each in self._mapping if isinstance(each, kind)] for kind in kinds)
        prefix, known = streamed.model.base_model_prefix, streamed.model.state_dict()
        found: dict[str, list[str]] = {}
        for key in self.files:
            # What the class calls it, or the first of those that are made from it.
            name, _ = checkpoints.rename_source_key(key, renamings, converters, prefix, known)
            if name in known:
                for part in {streamed.part_of(other) for other in streamed.tied.get(name, [name])}:
                    found.setdefault(part, []).append(key)
        return found


class Drawn:
    """Random weights, drawn by the class's own rule from a seed; those of a part are always the same.

    Parameters
    ----------
    seed : int
        Of all parts.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self._last = seed, ("", {})

    def all_files(self) -> list[Path]:
        """List none."""
        return []

    def load(self, streamed: Streamed, part: str) -> dict[str, torch.Tensor]:
        """Draw the weights of a part, unless they were drawn just now for another dtype."""
        found = {}
        for name in streamed.weights[part]:
            # Of tied ones the first is drawn.
            first = next(other for other in streamed.tied if other in streamed.tied[name])
            found[name] = self._drawn(streamed, streamed.part_of(first))[first].to(streamed.dtype)
        return found

    def _drawn(self, streamed: Streamed, part: str) -> dict[str, torch.Tensor]:
        if self._last[0] != part or not self._last[1]:
            self._last = ("", {})
            digest = hashlib.sha256(f"{self.seed} {part}".encode()).digest()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest[:7]))
                self._last = (part, streamed.initialised(part))
        return self._last[1]


# Where weights come from.
Source = Checkpoint | Drawn


def check(config: PretrainedConfig, device: str) -> None:
    """Refuse what cannot be streamed."""
    if device != "cpu":
        raise UserError("weights are streamed to the processor alone: leave device out, or memory")
    if decoders.has_encoder(config):
        raise UserError("the weights of an encoder-decoder are not streamed: leave memory out")
    if getattr(config, "quantization_config", None):
        raise UserError("only weights that are not quantized are streamed: leave memory out")


def load(model: str, dtype: str, weights: str, seed: int) -> loading.Loaded:
    """Load a model that reads its weights in every call, a part at a time, and computes as `loading.load`'s does."""
    where = sources.resolve(model, weights)
    one = Streamed(where.config, getattr(torch, dtype), source_of(where, seed))
    return loading.Loaded(one.model, loading.tokenizer(model, weights), where.name, where.source, dtype)


def source_of(where: sources.Where, seed: int) -> Source:
    """Find the weights of a request, without reading them."""
    if checkpoints is None:
        raise UserError("--memory takes transformers 5 or newer: install it, or leave --memory out")
    if where.adapter and where.source not in sources.DRAWN:
        raise UserError("--memory takes no adapters: merge it into its model first, or leave --memory out")
    if where.source in sources.DRAWN:
        return Drawn(seed)
    if where.repository is None:
        return Checkpoint(Path(where.path))
    with where.repository.open("weights"):
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        return Checkpoint(Path(snapshot_download(where.path, revision=where.revision, allow_patterns=patterns)))
