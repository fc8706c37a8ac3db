"""The ledger: every claim of a document beside its verdict."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from kvbook.models import registry
from kvbook.runs.evidence import beside_of, texts_of
from kvreport.publishing import documents, wording
from kvreport.publishing.found import Found
from kvreport.publishing.judging import DOCUMENTS, NOT_RECORDED, OTHERS, Check

# What a page shows of a verdict, in this order.
SHOWN = ("verdict", "claim", "n", "here", "published", "rule")
_MARKUP = re.compile(r"([\\`*_\[\]<>${}])")


@dataclass(frozen=True)
class Claims:
    """What a chapter answers of a document.

    Attributes
    ----------
    document : str
        Its short name.
    checks : mapping of str to Check
        One check a claim, by the claim's id.
    chapter : str, optional
        The chapter, where it is not the document's own: it answers for the claims that name it, the document's own for
        those that name none.
    words : str, optional
        What the name of a second chapter's table ends in.
    """

    document: str
    checks: Mapping[str, Check]
    chapter: str | None = None
    words: str | None = None

    @property
    def table(self) -> str:
        """The name of the table that shows the verdicts."""
        return "-".join(filter(None, ["tab-claims", self.document, self.words]))

    def judged(self, results: Found) -> pd.DataFrame:
        """Check every claim against a chapter's results.

        Returns
        -------
        DataFrame
            ``document``, ``verdict``, ``claim``, ``quote``, ``place``, ``n``, ``here``, ``published`` and ``rule``, in
            the document's order.

        Raises
        ------
        ValueError
            When a claim has no check, or a check no claim.
        """
        everything = documents.published(self.document)["claims"]
        claims = [claim for claim in everything if claim.get("chapter") == self.chapter]
        if (named := {claim["id"] for claim in claims}) != set(self.checks):
            raise ValueError(f"{self.document}: claims and checks differ in {sorted(named ^ set(self.checks))}")
        rows = []
        for claim in claims:
            check = self.checks[claim["id"]]
            told = asdict(check(results))
            told["published"] = told["published"] or claim["published"]
            words = {key: claim[key] for key in ("claim", "quote", "place")}
            rows.append({"document": self.document, **words, **told, "rule": check.rule.text()})
        return pd.DataFrame(rows)

    def shown(self, results: Mapping[str, Found], labels: Mapping[str, str] | None = None) -> pd.DataFrame:
        """Lay verdicts out for a page: each claim once, with the words of the document that it rests on.

        Parameters
        ----------
        results : mapping of str to Found
            The chapter's results by processor; a claim is judged on each.
        labels : mapping of str to str, optional
            What the page calls the processors.
        """
        labels = labels or {name: name for name in results}
        tables = {name: self.judged(of) for name, of in results.items()}
        table = next(iter(tables.values()))
        quotes = table["quote"].str.replace(_MARKUP, r"\\\1", regex=True)
        together = [_together({name: each.iloc[k] for name, each in tables.items()}, labels) for k in range(len(table))]
        claims = table["claim"] + " “" + quotes + "” (" + table["place"] + ")"
        return table.assign(claim=claims).assign(**pd.DataFrame(together))[list(SHOWN)]


def _together(rows: Mapping[str, pd.Series], labels: Mapping[str, str]) -> dict[str, str]:
    """Put the verdicts on one claim, by processor, into one row: all of them where they differ."""
    judged = {name: row for name, row in rows.items() if row["verdict"] != "not run"}
    without = [labels[name] for name in rows if judged and name not in judged and not beside_of(name)]
    # Where it was run nowhere, the first processor's row says why.
    judged = judged or dict([next(iter(rows.items()))])
    first, *others = judged
    if len(rows) == 1:
        return dict(rows[first][["verdict", "n", "here"]])
    verdict = _each({name: row["verdict"] for name, row in judged.items()})
    agree = verdict == judged[first]["verdict"]
    here = [f"On the {labels[name]}: {judged[name]['here']}." for name in ([first] if agree else judged)]
    here += [f"The same verdict on the {labels[name]}." for name in others if agree]
    here += [f"On the {label}: {NOT_RECORDED}." for label in without]
    return {"verdict": verdict, "n": _each({name: row["n"] for name, row in judged.items()}), "here": " ".join(here)}


def _each(said: Mapping[str, str]) -> str:
    """Say something of each processor, and once what is the same on all."""
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    places = {name: wording.processor(name.removesuffix(f", {texts_of(name)}")) for name in said}
    on = {name: f" on {texts_of(name)}" if texts_of(name) else "" for name in said}
    return "; ".join(f"{text}{on[name]} on the {places[name]}" for name, text in said.items())


def weights_of(models: Iterable[dict[str, Any]]) -> str:
    """Say whose weights a run has: "hub" if all are the documents', "package" if all are real, else "stand-in".

    Parameters
    ----------
    models : iterable of dict
        What `models.loading.identify` says of them.
    """
    kinds = {_kind(model) for model in models}
    return max(kinds, key=("hub", "package", "stand-in").index, default="stand-in")


def _kind(model: dict[str, Any]) -> str:
    """Tell documents' models, other real ones and toys apart, by the weights' origin and number."""
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
