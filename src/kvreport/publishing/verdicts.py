"""The ledger: every claim of a document beside its verdict."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd

from kvbook import paths
from kvbook.models import registry
from kvreport.publishing import documents

ANOTHER = "reproduced on another real model"
Word = Literal[
    "reproduced", "reproduced on another real model", "reproduced in kind", "refuted", "other cause",
    "needs the real weights", "undecided", "not run",
]  # fmt: skip

# Whose weights they are: the documents' models, or other trained models of a real size.
DOCUMENTS, OTHERS = ("hub", "local"), ("package", "gguf")

Evidence = TypeVar("Evidence")


@dataclass(frozen=True)
class Verdict:
    """What our rows say of a claim.

    Attributes
    ----------
    here : str
        The numbers that decided, with their interval.
    verdict : str
        One of `Word`.  "On another real model" is said where the rows come from a trained model of a real size that is
        not the document's.  "In kind" is said where they come from stand-in or random weights: the mechanism is shown,
        the document's magnitude is not.  "Undecided" is said where the interval holds both answers.
    published : str, optional
        What the document's own numbers give in the same arithmetic, where it published numbers.
    """

    here: str
    verdict: Word
    published: str | None = None


def holds(borne_out: bool, contradicted: bool, weights: str) -> Word:
    """Give the word for a claim; to contradict it takes evidence of its own, not the lack of evidence for it.

    Parameters
    ----------
    borne_out : bool
        Whether the whole interval is where the claim says.
    contradicted : bool
        Whether the whole interval is where the claim excludes it.
    weights : str
        Of the model that made the rows: what `weights_of` says, or the source of one model's weights.
    """
    if borne_out and weights in DOCUMENTS:
        return "reproduced"
    if borne_out and weights in OTHERS:
        return ANOTHER
    if borne_out:
        return "reproduced in kind"
    return "refuted" if contradicted else "undecided"


def verdicts(
    document: str,
    checks: Mapping[str, Callable[[Evidence], Verdict]],
    evidence: Evidence,
    chapter: str | None = None,
) -> pd.DataFrame:
    """Check every claim of a document that a chapter answers for.

    Parameters
    ----------
    document : str
        Its short name.
    checks : mapping of str to callable
        One check a claim, by the claim's id.
    evidence : object
        What the checks take.
    chapter : str, optional
        The chapter, where it is not the document's own: it answers for the claims that name it, the document's own for
        those that name none.

    Returns
    -------
    DataFrame
        ``document``, ``claim``, ``published``, ``here``, ``verdict``, in the document's order.

    Raises
    ------
    ValueError
        When a claim has no check, or a check no claim.
    """
    claims = [claim for claim in documents.published(document)["claims"] if claim.get("chapter") == chapter]
    if (named := {claim["id"] for claim in claims}) != set(checks):
        raise ValueError(f"{document}: claims and checks differ in {sorted(named ^ set(checks))}")
    rows = []
    for claim in claims:
        verdict = checks[claim["id"]](evidence)
        rows.append(
            {
                "document": document,
                "claim": claim["claim"],
                "published": verdict.published or claim["published"],
                "here": verdict.here,
                "verdict": verdict.verdict,
            }
        )
    return pd.DataFrame(rows)


def judge(
    document: str,
    checks: Mapping[str, Callable[[Evidence], Verdict]],
    evidence: Evidence,
    chapter: str | None = None,
) -> pd.DataFrame:
    """Check a document's claims, and keep the result for the ledger.

    The verdicts go to ``_build/claims/<document>.json``, with a chapter named to ``<document>.<chapter>.json``, and those on
    all documents to ``_build/claims.json``.  Parameters, result and errors as for `verdicts`.
    """
    table = verdicts(document, checks, evidence, chapter)
    folder = paths.BUILD / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    name = document if chapter is None else f"{document}.{chapter}"
    _write(folder / f"{name}.json", table.to_dict("records"))
    merge()
    return table


def merge() -> None:
    """Join the verdicts on all documents judged so far into ``_build/claims.json``, in the documents' name order."""

    def judged() -> list[dict[str, str]]:
        files = sorted((paths.BUILD / "claims").glob("*.json"))
        return [row for file in files for row in json.loads(file.read_text("utf-8"))]

    rows = None
    # Another chapter may end between our reading and our writing; whoever writes last looks again, and finds both.
    while rows != (now := judged()):
        _write(paths.BUILD / "claims.json", now)
        rows = now


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    # A name of its own for each process, so that two that write at once never mix their halves.
    part = file.with_suffix(f".{os.getpid()}.partial")
    part.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", "utf-8")
    part.replace(file)


def weights_of(models: Iterable[dict[str, Any]]) -> str:
    """Say whose weights a run has: "hub" when each model is one of the documents', "package" when each is real, else "stand-in".

    Parameters
    ----------
    models : iterable of dict
        What `models.loading.identify` says of them.
    """
    kinds = {_kind(model) for model in models}
    return max(kinds, key=("hub", "package", "stand-in").index, default="stand-in")


def _kind(model: dict[str, Any]) -> str:
    """Tell a document's model, another real one, and what is neither apart, by where the weights came from and their number."""
    theirs = [architecture for family in registry.families().values() for architecture in family.architectures]
    sizes = {architecture.parameters for architecture in theirs}
    if model["weights"] == "hub" and model["hub_id"] in {architecture.hub_id for architecture in theirs}:
        return "hub"
    # A local folder is taken for a real checkpoint when it has as many parameters as one.
    if model["weights"] == "local" and model["parameters"] in sizes:
        return "hub"
    trained = model["weights"] in (*DOCUMENTS, *OTHERS)
    # What is smaller than each of the documents' models is a toy, in whatever file it comes.
    return "package" if trained and model["parameters"] >= min(sizes) else "stand-in"
