"""`kvbook check --repro`: the smallest program of plain transformers that shows a fault, for a report of it.

Candidates are tried from the smallest on: random weights in few layers first, the checkpoint itself last; a short text
cut once, then longer ones.  A candidate is the text of a program.  It is run as it stands, and the first whose drift no
rounding explains is written.
"""

import contextlib
import io
import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
from transformers import PretrainedConfig

from kvbook import UserError
from kvbook.diagnosis import CheckSettings, check, feeding, verdict
from kvbook.measuring import UNIT_ROUNDOFF
from kvbook.models import decoders, loading, sources

# Plain transformers computes some steps in 32 bits even in float64: what rounding in these can be.
LARGEST_ROUNDING = verdict.ROUNDING["float32"] * UNIT_ROUNDOFF["float32"]
# How a text is cut, by path.
_CUTS = {
    "token by token": [(4, 1), (4, 1, 1, 1), (2, *[1] * 10), (2, *[1] * 22)],
    "in two parts": [(4, 4), (6, 6), (12, 12)],
}
# Layers and words of a model with random weights.
_LAYERS, _WORDS = (1, 2, 4), 128
# What a configuration says of its own file, and not of the model.
_NOT_OF_THE_MODEL = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "model_type")

_PROGRAM = Path(__file__).with_name("repro_program.txt").read_text("utf-8")
_RANDOM = Path(__file__).with_name("repro_random.txt").read_text("utf-8").strip()
_TRAINED = "model = AutoModelForCausalLM.from_pretrained({path!r})"


def write(asked: CheckSettings, path: str, to: Path) -> str:
    """Write the smallest program that shows a fault on a path; return what it prints, and refuse where none does."""
    if path not in _CUTS:
        raise UserError(f"--repro knows no program for {path!r}: report the lines of the check")
    where = sources.resolve(asked.model, asked.weights)
    if decoders.has_encoder(where.config):
        raise UserError("--repro writes no program of an encoder-decoder: report the lines of the check")
    # It stands in the program's first line, where a quotation mark could end the words and begin code.
    if not re.fullmatch(r"[\w.-]+", where.config.model_type):
        raise UserError(f"--repro: {where.config.model_type!r} is no name of a model type of transformers")
    checkpoint = "" if where.source in sources.DRAWN else where.path
    for program in _programs(where.config, path, checkpoint, feeding.cache_name(loading.shape(where.config))):
        printed, drift = _run(program)
        if drift is not None and not drift <= LARGEST_ROUNDING:
            to.write_text(program, "utf-8")
            return printed
    raise UserError(f"--repro: no small program of plain transformers shows the fault {path!r}; nothing is written")


def _programs(config: PretrainedConfig, path: str, checkpoint: str, cache: str) -> Iterator[str]:
    said = getattr(config.get_text_config(), "use_cache", None)
    about = check.VERSIONS | {
        "model_type": config.model_type, "path": path, "cache": cache, "limit": LARGEST_ROUNDING,
        "use_cache": "" if said is not None else ", use_cache=True",
    }
    small = (pformat(_small(config, layers), sort_dicts=True).replace("\n", "\n    ") for layers in _LAYERS)
    random = (_RANDOM.format(model_type=config.model_type, values=values) for values in small)
    makes = [(make, "AutoConfig, AutoModelForCausalLM") for make in random]
    makes += [(_TRAINED.format(path=checkpoint), "AutoModelForCausalLM")] if checkpoint else []
    for make, imports in makes:
        for cut in _CUTS[path]:
            yield _PROGRAM.format(make=make, imports=imports, cut=cut, stop=5 + sum(cut), **about)


def _small(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """Return what tells a configuration from its class's own values, with few layers and words."""
    values = {name: value for name, value in config.to_diff_dict().items() if name not in _NOT_OF_THE_MODEL}
    named = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    values |= {named: layers, "vocab_size": _WORDS}
    values |= {name: None for name in values if name.endswith("_token_id")}
    # A list with an entry for each layer.
    n_layers = config.get_text_config().num_hidden_layers
    return {
        name: value[:layers] if isinstance(value, list) and len(value) == n_layers else value
        for name, value in values.items()
    }


def _run(program: str) -> tuple[str, float | None]:
    names: dict[str, Any] = {}
    printed = io.StringIO()
    # A shape that a class does not allow raises whatever its code makes of it: then it is no candidate.
    with (
        tempfile.TemporaryDirectory(prefix="kvbook-") as folder, contextlib.suppress(Exception),
        contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]),
    ):
        file = Path(folder) / "repro.py"
        file.write_text(program, "utf-8")
        names = runpy.run_path(str(file))
    return printed.getvalue().strip(), names.get("drift")
