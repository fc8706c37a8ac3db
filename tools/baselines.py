"""What a language model must beat: token n-grams and a general compressor, in bits per byte of held-out text."""

import lzma

import numpy as np


def unigram_nats(train: np.ndarray, held_out: np.ndarray, vocabulary_size: int) -> float:
    """Mean negative log likelihood of held-out tokens under add-one unigram frequencies."""
    counts = np.bincount(train, minlength=vocabulary_size) + 1.0
    return float(-np.log(counts / counts.sum())[held_out].mean())


def bigram_nats(train: np.ndarray, held_out: np.ndarray, vocabulary_size: int) -> float:
    """Mean negative log likelihood under a bigram model that backs off to the unigram (Witten-Bell interpolation).

    The weight of the unigram after a token v is T(v) / (c(v) + T(v)), with T(v) the number of kinds of tokens seen
    after it: Witten and Bell (1991), in the interpolated form of Chen and Goodman (1999).
    """
    unigram = np.bincount(train, minlength=vocabulary_size) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1].astype(np.int64) * vocabulary_size + train[1:], minlength=vocabulary_size**2)
    pairs = pairs.reshape(vocabulary_size, vocabulary_size)
    kinds, seen = (pairs > 0).sum(1), pairs.sum(1)
    before, after = held_out[:-1], held_out[1:]
    total = seen[before] + kinds[before]
    # A token never seen as a predecessor tells nothing: the unigram alone.
    probability = np.where(
        total > 0,
        (pairs[before, after] + kinds[before] * unigram[after]) / np.maximum(total, 1),
        unigram[after],
    )
    return float(-np.log(probability).mean())


def xz_bits_per_byte(text: bytes) -> float:
    """Bits per byte that ``xz -9`` needs for a text."""
    return len(lzma.compress(text, preset=9)) * 8 / len(text)
