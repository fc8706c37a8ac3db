"""The book: its chapters, how they run, and the site that shows them."""

import warnings
from pathlib import Path

from kvbook import fingerprint

# A library's remark on bars that it would like to draw; in a notebook that somebody runs by hand it would be an output.
warnings.filterwarnings("ignore", message="IProgress not found")

# A run's hash holds the source that measured it, and that lies in both packages.
fingerprint.PACKAGES[__name__] = Path(__file__).resolve().parent
