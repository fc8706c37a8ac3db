"""What the chapter on the atlas measured, and its tables."""

from dataclasses import dataclass

from kvbook.runs.records import Run
from kvreport.chapters.atlas import survey

EXPERIMENTS = (survey.EXPERIMENT,)


@dataclass(frozen=True)
class Results:
    """The chapter's runs.

    Attributes
    ----------
    own, recorded : Run
        Of the experiment ``atlas``: this machine's, and the one that the book cites.
    """

    own: Run
    recorded: Run
