"""What chapters publish: figures, tables, numbers, rules, verdicts and citations."""

from pathlib import Path

# The look of every figure; here, so that whoever asks whether a chapter is fresh need not import what draws.
STYLE = Path(__file__).with_name("kvbook.mplstyle")

# Set by kvreport.running.execution: the folder that the running chapter's files go to, and which chapter that is.
FOLDER_VARIABLE = "KVBOOK_FIGURES"
CHAPTER_VARIABLE = "KVBOOK_CHAPTER"
