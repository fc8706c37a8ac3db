"""Who reported which symptom, and where: what is counted as reported, and what was found while repeating it."""

from dataclasses import dataclass
from typing import Literal

from kvreport.chapters.blog_past import past_tables
from kvreport.chapters.bug_or_rounding import symptoms
from kvreport.chapters.bug_or_rounding.symptoms import BLOG, BLOG_NAMES, ISSUE, REUSE, SCRATCH, STATIC

Whose = Literal["reported", "found while repeating", "cause removed"]
REPORTED, FOUND, REMOVED = "reported", "found while repeating", "cause removed"
LIES = FED, PAST_BLOCK, IN_MODEL = "in what is fed", "in a cache past its block", "in the model or its configuration"


@dataclass(frozen=True)
class Symptom:
    """Two computations that should agree, and whether a document shows that theirs did not.

    Attributes
    ----------
    document, name : str
        As the rows call them.
    place : str
        Where the document reports the difference; empty where it does not.
    claim : str
        The document's claim about it in the ledger; empty where there is none.
    lies : str
        Where the bug lies that the prose speaks of; empty where it speaks of rounding.
    inferred : bool
        Whether its cause is inferred: no verdict of the ledger stands behind it.
    without : str
        The symptom whose cause is removed.
    """

    document: str
    name: str
    place: str = ""
    claim: str = ""
    lies: str = ""
    inferred: bool = False
    without: str = ""

    @property
    def whose(self) -> Whose:
        """Tell what a document reports from what it does not."""
        return REMOVED if self.without else REPORTED if self.place else FOUND


def _blog(family: str, variant: str) -> str:
    return BLOG_NAMES[family, variant]


_ROBERTA, _MPT = _blog("roberta", past_tables.NO_PAST), _blog("mpt", past_tables.CACHE_OFF)
_FALCON = _blog("falcon", past_tables.BOTH)
SYMPTOMS = (
    Symptom(ISSUE, symptoms.DRIFT, "comment of 23 October 2023, tables", "drift-everywhere"),
    Symptom(ISSUE, symptoms.FED_AGAIN, "opening post", "positions-missing", FED),
    Symptom(REUSE, symptoms.KEYS, "first post, output", "first-layer-differs"),
    Symptom(REUSE, symptoms.ANEW, "first post, update", "reused-cache-changes-text", FED, inferred=True),
    Symptom(REUSE, symptoms.CUT, without=symptoms.ANEW),
    Symptom(REUSE, symptoms.WHOLE, lies=FED),
    Symptom(SCRATCH, symptoms.WITHIN, without=symptoms.PAST_BLOCK),
    Symptom(SCRATCH, symptoms.PAST_BLOCK, "the post", "cached-is-worse", PAST_BLOCK),
    Symptom(SCRATCH, symptoms.REPLY, lies=PAST_BLOCK),
    Symptom(SCRATCH, symptoms.LAST_ONLY, lies=FED),
    Symptom(BLOG, _blog("gpt2", past_tables.NATIVE), "“GPT2 as a baseline”", "gpt2-compatible"),
    Symptom(BLOG, _ROBERTA, "“RoBERTa as a failure”", "", IN_MODEL, inferred=True),
    Symptom(BLOG, _blog("roberta", past_tables.DECODER), without=_ROBERTA),
    Symptom(BLOG, _blog("roberta", past_tables.HANDED), lies=IN_MODEL),
    Symptom(BLOG, _MPT, "“MPT 7B”", "mpt-cannot", IN_MODEL, inferred=True),
    Symptom(BLOG, _blog("mpt", past_tables.NATIVE), without=_MPT),
    Symptom(BLOG, _FALCON, "“Falcon 7B”", "falcon-cannot", IN_MODEL, inferred=True),
    Symptom(BLOG, _blog("falcon", past_tables.NATIVE), without=_FALCON),
    Symptom(STATIC, symptoms.STATIC_NONE, "outputs of “No cache” and “Static cache”"),
    Symptom(STATIC, symptoms.STATIC_DYNAMIC, "outputs of “Dynamic cache” and “Static cache”"),
)
BY_NAME = {symptom.name: symptom for symptom in SYMPTOMS}


def names(whose: Whose, *lies: str) -> tuple[str, ...]:
    """List symptoms by who reported them and by where the prose says that they lie."""
    return tuple(one.name for one in SYMPTOMS if one.whose == whose and (not lies or one.lies in lies))
