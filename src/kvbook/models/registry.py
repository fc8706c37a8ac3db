"""The registry of families: ``data/models/registry.yaml``, read and typed."""

import functools
from dataclasses import dataclass
from typing import Any

import yaml

from kvbook import paths


@dataclass(frozen=True)
class Architecture:
    """The true architecture behind a hub id.

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
    """

    name: str
    title: str
    objective: str
    positions: str
    notes: str
    architectures: tuple[Architecture, ...]

    @property
    def documents(self) -> tuple[str, ...]:
        """Short names of the documents that used any of its architectures."""
        return tuple(dict.fromkeys(document for a in self.architectures for document in a.documents))


@functools.cache
def families() -> dict[str, Family]:
    """Give all families by name, in the registry's order."""
    entries = yaml.safe_load((paths.MODELS / "registry.yaml").read_text("utf-8"))
    return {
        name: Family(
            name=name,
            **entry
            | {
                "architectures": tuple(
                    Architecture(**architecture | {"documents": tuple(architecture["documents"])})
                    for architecture in entry["architectures"]
                )
            },
        )
        for name, entry in entries.items()
    }
