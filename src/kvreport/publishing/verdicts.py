"""The ledger: every claim of a document beside its verdict."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from kvbook import paths
from kvbook.models import registry
from kvreport.publishing import documents
from kvreport.publishing.judging import DOCUMENTS, OTHERS, Check

Results = TypeVar("Results")

# What a page shows of a verdict, in this order.
SHOWN = ("verdict", "claim", "n", "here", "published", "rule")
_MARKUP = re.compile(r"([\\`*_\[\]<>${}])")


def verdicts(
    document: str,
    checks: Mapping[str, Check[Results]],
    results: Results,
    chapter: str | None = None,
) -> pd.DataFrame:
    """Check every claim of a document that a chapter answers for.

    Parameters
    ----------
    document : str
        Its short name.
    checks : mapping of str to Check
        One check a claim, by the claim's id.
    results : object
        What the checks measure.
    chapter : str, optional
        The chapter, where it is not the document's own: it answers for the claims that name it, the document's own for
        those that name none.

    Returns
    -------
    DataFrame
        ``document``, ``verdict``, ``claim``, ``quote``, ``place``, ``n``, ``here``, ``published`` and ``rule``, in the
        document's order.

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
        check = checks[claim["id"]]
        verdict = check(results)
        rows.append(
            {
                "document": document,
                "verdict": verdict.verdict,
                **{key: claim[key] for key in ("claim", "quote", "place")},
                "n": verdict.n,
                "here": verdict.here,
                "published": verdict.published or claim["published"],
                "rule": check.rule.text(),
            }
        )
    return pd.DataFrame(rows)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Lay `verdicts` out for a page: each claim with the words of the document that it rests on."""
    quotes = table["quote"].str.replace(_MARKUP, r"\\\1", regex=True)
    return table.assign(claim=table["claim"] + " “" + quotes + "” (" + table["place"] + ")")[list(SHOWN)]


def judge(
    document: str,
    checks: Mapping[str, Check[Results]],
    results: Results,
    chapter: str | None = None,
) -> pd.DataFrame:
    """Check a document's claims, and keep the result for the ledger.

    The verdicts go to ``_build/claims/<document>.json``, with a chapter named to ``<document>.<chapter>.json``, and those on
    all documents to ``_build/claims.json``.  Parameters, result and errors as for `verdicts`.
    """
    table = verdicts(document, checks, results, chapter)
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
