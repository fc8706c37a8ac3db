"""The chapter on where drift begins."""

from kvbook import lengths
from kvbook.settings import Count, Counts, Names, TextSettings, at_least, text_length

# The settings on which the rows depend of all experiments on texts.
FIELDS = frozenset({"model", "weights", "device", "seed", "dtypes", "corpus"})
# A text that is swept takes two passes for every length; over this many a range can be told.
_MOST_SWEPT = 4


class WhereDriftBeginsSettings(TextSettings):
    """Settings of the chapter on where drift begins.

    Attributes
    ----------
    families : tuple of str
        Further models, beside `model`, whose operations are replayed; may be empty. With the same `weights`.
    n_samples : int
        Texts of the factorial.
    n_replayed : int
        How many of them are replayed operation by operation: bits decide, and each text has every layer and chunk.
    n_tokens : int or str
        Tokens of a text, or a range of which each text draws its own; the factorial also runs on one token more.
    max_rows : int
        The map of the matrix product goes from one row to this many.
    chunks : tuple of int
        Rows of the replayed passes, beside all rows; those that do not lie below a text's length are left out.
    inner_sizes : tuple of int
        Inner sizes of the mapped matrix product.
    outer_size : int
        Its number of columns.
    threads : tuple of int
        With how many threads of a CPU products are mapped, and their sums taken apart.
    kernel_rows : tuple of int
        Rows of the products, and queries of the attention, whose kernels are read.
    profiled : bool
        Whether a profiler names the functions behind the products too; takes Linux's `perf`, and minutes.
    key_lengths : tuple of int
        Numbers of keys of the attention that is taken apart.
    """

    families: Names = ("gpt2", "qwen2", "mpt", "falcon", "smollm2")
    n_samples: Count = 6
    n_replayed: Count = 1
    n_tokens: text_length(3) = "33-190"
    max_rows: at_least(2) = 256
    chunks: Counts = (1, 3, 16)
    inner_sizes: Counts = (64, 320, 1536)
    outer_size: Count = 192
    threads: Counts = (1, 2)
    kernel_rows: Counts = (1, 2, 3, 8, 16, 64, 256)
    profiled: bool = False
    key_lengths: Counts = (5, 17, 63, 64, 65, 200, 513)

    @property
    def longest(self) -> int:
        """Longest prefix of the sweep: one token beyond the texts, or half as far again where all have one length."""
        low, high = lengths.bounds(self.n_tokens)
        return high * 3 // 2 + 2 if low == high else high + 1

    @property
    def n_swept(self) -> int:
        """Texts that are cut at every length: half of those of the factorial, and no more than can be paid for."""
        return max(1, min(_MOST_SWEPT, self.n_samples // 2))
