"""What chapters publish: figures, tables, numbers, rules, verdicts and citations."""

import re
from pathlib import Path

# The look of every figure; here, so that whoever asks whether a chapter is fresh need not import what draws.
STYLE = Path(__file__).with_name("kvbook.mplstyle")

# Set by kvreport.running.execution: the folder that the running chapter's files go to, and which chapter that is.
FOLDER_VARIABLE = "KVBOOK_FIGURES"
CHAPTER_VARIABLE = "KVBOOK_CHAPTER"
# Set by it too, when the chapter runs with the book's own parameters: then figures and tables show what is published.
BOOK_VARIABLE = "KVBOOK_SHOWS_PUBLISHED"
# And where only what draws has changed: the runs that the chapter's copy was made from, as JSON.
MEASURED_VARIABLE = "KVBOOK_MEASURED"
# And the experiments that a default build leaves out, with commas between them.
LEFT_OUT_VARIABLE = "KVBOOK_LEFT_OUT"


def chapter_name(stem: str) -> str:
    """Name the folder of code of a notebook: its own name without the number in front."""
    return re.sub(r"^\d+_", "", stem)
