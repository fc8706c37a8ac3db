"""One validated settings class an experiment; what cannot be compared is refused before anything is loaded.

The field names are the names of the notebooks' parameters.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_serializer

from kvbook import UserError, lengths

DType = Literal["float64", "float32", "float16", "bfloat16"]
Weights = Literal["stand-in", "hub", "package", "random", "untrained"]

# What people type for the four.
_DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def _dtype(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def read_yaml(file: Path) -> Any:
    """Read a YAML file, or say in one line why it cannot be read."""
    try:
        # Ten times as fast as the loader in Python, where libyaml is there.
        return yaml.load(file.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}: name a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None


def faults_of(error: ValidationError) -> str:
    """Say in one line what is wrong, and where."""
    return "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'content'}: {_why(fault)}" for fault in error.errors())


def _why(fault: Mapping[str, Any]) -> str:
    unknown = fault["type"] == "extra_forbidden"
    return "no such name is known: is it misspelt?" if unknown else fault["msg"].removeprefix("Value error, ")


def several(value: Any) -> Any:
    """Split what a command line can only pass as one string, as in `papermill -p dtypes float32,bfloat16`."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


DTypeName = Annotated[DType, BeforeValidator(_dtype)]
# Those that quantized weights run in.
SmallDType = Annotated[Literal["float32", "float16", "bfloat16"], BeforeValidator(_dtype)]
HalfDType = Annotated[Literal["float16", "bfloat16"], BeforeValidator(_dtype)]
# What a cache may be meant to keep its numbers in.
CacheFormat = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4", "int2"]
CacheDType = Annotated[CacheFormat, BeforeValidator(_dtype)]


def at_least(least: int) -> Any:
    """Make the type of a number of something."""
    return Annotated[int, Field(ge=least)]


def some(kind: Any, least: int = 1) -> Any:
    """Make the type of several of a kind, one of them at the least."""
    return Annotated[tuple[kind, ...], BeforeValidator(several), Field(min_length=least)]


Count = at_least(1)
Text = Annotated[str, Field(min_length=1)]
Names = some(str, 0)
DTypes = some(DTypeName)


class Strict(BaseModel, frozen=True, extra="forbid"):
    """What is not changed once it is there, and has no fields but its own."""


class Settings(Strict, protected_namespaces=()):
    """What every experiment takes.

    Attributes
    ----------
    model : str
        A family's name, a hub id, a local folder, or a GGUF file.
    weights : {"stand-in", "hub", "package", "random", "untrained"}
        For a family's name: its stand-in, its first hub id, the trained model that ``kvbook models fetch`` fetched, or
        its true architecture with seeded random weights. A folder, a file and a hub id bring their own; ``"random"``
        then keeps the architecture and draws the weights. ``"untrained"`` is a family's stand-in with random weights.
    device : str
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
    seed : int
        Of random weights, of which texts are taken, and of whatever else is drawn.
    """

    model: Text = "llama"
    weights: Weights = "stand-in"
    device: Text = "cpu"
    seed: at_least(0) = 0

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Build the settings, or raise one line that names what is wrong."""
        try:
            return cls(**values)
        except ValidationError as error:
            known = ", ".join(cls.model_fields)
            faults = []
            for fault in error.errors():
                name = ".".join(map(str, fault["loc"])) or "settings"
                if fault["type"] == "extra_forbidden":
                    faults.append(f"unknown parameter {name!r} (choose from: {known})")
                else:
                    faults.append(f"{name} = {fault['input']!r}: {_why(fault)}")
            raise UserError("; ".join(faults)) from None

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """Build the settings from a notebook's own names, refusing a parameter that it does not have.

        papermill injects unknown parameters without complaint; here each name that is neither a module, a function, nor
        one of IPython's own must be a field.
        """
        shell_names = {"In", "Out", "exit", "quit", "open", "get_ipython"}
        values = {
            name: value for name, value in namespace.items()
            if not (name.startswith("_") or name in shell_names or isinstance(value, ModuleType) or callable(value))
        }
        return cls.checked(**values)


def text_length(at_least: int) -> Any:
    """Make the type of a text's length: a number of tokens, or a range as text from which each text draws its own."""
    return Annotated[lengths.Length, BeforeValidator(lambda value: lengths.parsed(value, at_least))]


def counts(least: int) -> Any:
    """Make the type of one or several numbers of something."""
    return some(at_least(least))


Counts = counts(1)


class TextSettings(Settings):
    """What experiments on texts take besides.

    Attributes
    ----------
    dtypes : tuple of str
        Among float64, float32, float16, bfloat16.
    corpus : str
        ``"stdlib"``, ``"english"``, ``"chat"`` or a folder of text files; see `kvbook.models.corpus`.
    """

    dtypes: DTypes = ("float32", "float16", "bfloat16")
    corpus: Text = "stdlib"


_UNITS = {"MB": 1e6, "GB": 1e9, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: Any) -> Any:
    """Read 8GB as a number of bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([\d.]+)\s*([A-Z]+)", value.strip().upper())
    if not found or found[2] not in _UNITS:
        raise ValueError("write it as 8GB")
    return float(found[1]) * _UNITS[found[2]]


class StreamedSettings(Settings):
    """What takes a limit of memory besides.

    Attributes
    ----------
    memory : float or None
        Bytes in which it is to run, as a number or as "8GB": weights that take too much of it are streamed. None loads
        whole models.
    """

    memory: Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_bytes)] = None

    @model_serializer(mode="wrap")
    def _as_asked(self, values_of: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        """Leave out a limit that is none: runs that were recorded before there was one have these settings."""
        values = values_of(self)
        return values if self.memory is not None else {key: value for key, value in values.items() if key != "memory"}


def memory_of(settings: Settings) -> float | None:
    """Return the limit of memory, where these settings have one."""
    return settings.memory if isinstance(settings, StreamedSettings) else None
