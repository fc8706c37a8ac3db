"""What chapters import from other libraries: importing this imports it, once for all kernels that are forked afterwards.

Nothing of this package that reads the environment or a file may be among it: each kernel has an environment of its own.
"""

import gc
import importlib
import os

from kvreport.running.kernel import QUIET

# The libraries read these when they are imported; the last one a kernel would have set.
os.environ.update(QUIET)
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
# Not even at the end: here nothing but kernels is made.
gc.disable()
# IPython's kernel last: where it is there, progress bars look for a notebook's and complain.
for _library in ("matplotlib.pyplot", "scipy.stats", "seaborn", "transformers.modeling_utils", "ipykernel.kernelapp"):
    importlib.import_module(_library)
gc.freeze()
