"""The book: its chapters, how they run, and the site that shows them."""

from pathlib import Path

from kvbook import fingerprint

# A run's hash holds the source that measured it, and that lies in both packages.
fingerprint.PACKAGES[__name__] = Path(__file__).resolve().parent
