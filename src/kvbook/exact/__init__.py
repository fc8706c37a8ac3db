"""Row-invariant arithmetic: the switch under which a KV cache changes no bit.

>>> from kvbook.exact import row_invariant
>>> with torch.inference_mode(), row_invariant():
...     ...   # any stock transformers model, no edit to it

`row_invariant` says what it promises and what it does not; `verify` tries it on a model of one's own.
"""

from kvbook.exact.kernels import NotInvariant
from kvbook.exact.switch import PARTS, TRIED, is_on, row_invariant
from kvbook.exact.verification import Difference, verify

__all__ = ["PARTS", "TRIED", "Difference", "NotInvariant", "is_on", "row_invariant", "verify"]
