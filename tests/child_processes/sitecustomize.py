"""What every Python that a test starts does first: it looks for garbage seldom, see `kvbook.garbage`.

Most of them live for seconds, of which a third would pass with looking through what they have imported.
"""

import atexit
import gc

gc.set_threshold(50_000, 5, 2)
atexit.register(gc.freeze)
