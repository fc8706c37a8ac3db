"""A sweep: which cells a file asks for, each one experiment with one choice of every axis.

A sweep file is YAML::

    experiment: [layer_drift]
    model: [llama, gpt2]
    dtype: [float32, bfloat16]
    length: [32, 64]
    device: [cpu]
    settings: {n_samples: 20}    # of every cell; names as in the experiment's settings
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from kvbook import UserError, fingerprint, refusing
from kvbook.settings import Count, Text, faults_of, read_yaml
from kvreport.running import catalogue


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


Names = Annotated[tuple[Text, ...], BeforeValidator(_listed)]
Lengths = Annotated[tuple[Count, ...], BeforeValidator(_listed)]

# The setting that an axis sets, whichever of these an experiment has.
_FIELDS = {
    "model": ("model",), "dtype": ("dtypes", "dtype", "cost_dtype"),
    "length": ("n_tokens", "n_new_tokens", "n_blocks"), "device": ("device",),
}
# A cell has one model: a further model that would be drawn with it is that one again, and so is measured once.
_FURTHER = ("reference_model", "second_model")


class _File(BaseModel, extra="forbid"):
    experiment: Annotated[Names, Field(min_length=1)]
    model: Names = ()
    dtype: Names = ()
    length: Lengths = ()
    device: Names = ()
    settings: dict[str, Any] = {}


class Cell(NamedTuple):
    """One run of a sweep.

    Attributes
    ----------
    label : str
        The experiment and its place on each axis, for people.
    experiment : str
        Its name in the catalogue.
    settings : dict
        Its settings in full, as JSON holds them.
    """

    label: str
    experiment: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        """A name of its own among all cells of all sweeps."""
        return f"{self.label}|{fingerprint.of_values([self.experiment, self.settings])[:12]}"

    @property
    def on_gpu(self) -> bool:
        """Whether it needs a GPU."""
        return str(self.settings.get("device", "cpu")).startswith("cuda")


def read(path: Path) -> list[Cell]:
    """Read a sweep file, and check every cell's settings before any is run."""
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path} must hold experiment, model, dtype, length, device and settings, by their names")
    with refusing(lambda error: f"{path}: {faults_of(error)}", ValidationError):
        asked = _File.model_validate(dict(content))
    return list({cell.key: cell for cell in _cells(path, asked)}.values())


def _cells(path: Path, asked: _File):
    axes = {axis: values for axis in _FIELDS if (values := getattr(asked, axis))}
    for experiment in asked.experiment:
        if experiment not in catalogue.EXPERIMENTS:
            raise UserError(f"{path}: no experiment {experiment!r}: choose one of {', '.join(catalogue.EXPERIMENTS)}")
        settings_class = catalogue.EXPERIMENTS[experiment].settings
        fields = {axis: _field(path, experiment, axis) for axis in axes}
        for place in itertools.product(*axes.values()):
            chosen = dict(zip(fields.values(), place, strict=True))
            known = settings_class.model_fields if "model" in chosen else ()
            further = {name: chosen["model"] for name in _FURTHER if name in known}
            label = " ".join([experiment, *map(str, place)])
            try:
                settings = settings_class.checked(**(further | asked.settings | chosen))
            except UserError as error:
                raise UserError(f"{path}: {label}: {error}") from None
            yield Cell(label, experiment, settings.model_dump(mode="json"))


def _field(path: Path, experiment: str, axis: str) -> str:
    for name in _FIELDS[axis]:
        if name in catalogue.EXPERIMENTS[experiment].settings.model_fields:
            return name
    raise UserError(f"{path}: {experiment} has no {axis}: leave it out, or sweep that experiment in a file of its own")
