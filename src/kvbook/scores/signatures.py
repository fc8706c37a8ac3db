"""What a fault looks like in log-probabilities: one flat list, `SIGNATURES`, from the most to the least specific.

Each entry has a test, which returns what it saw as half a sentence, or None; what to do; and what it cannot be told
apart from.  A signature names a fault that the verdict found.  Where controls decide nothing, one that is plain makes
the verdict a fault by itself, for rounding cannot look like it.  Rounding can begin at a position, or strike the last
token alone, where a shape changes there; so a place is plain only where its tokens move by more than rounding can.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from kvbook.scores.verdict import FLOOR, PLAIN, Gaps
from kvbook.settings import read_yaml

# Fewer tokens than this are no pattern.
_FEW = 10


class Signature(NamedTuple):
    """One kind of fault.

    Attributes
    ----------
    key, name : str
        For programs, and for people.
    saw : callable
        The test.
    remedy : str
        What to do first.
    not_apart_from : str
        What gives the same pattern.
    plain : {"always", "where large", "never"}
        Whether it decides without a control; large is a mean above `PLAIN` over the suspicious tokens.
    """

    key: str
    name: str
    saw: Callable[[Gaps], str | None]
    remedy: str
    not_apart_from: str
    plain: Literal["always", "where large", "never"] = "where large"

    def decides(self, found: Gaps) -> bool:
        """Tell whether this signature needs no control."""
        large = found.size[found.size > found.limit]
        return self.plain == "always" or (self.plain == "where large" and large.size > 0 and large.mean() > PLAIN)


def _other_tokens(found: Gaps) -> str | None:
    differ = found.joined.token != found.joined.other_token
    if not differ.any():
        return None
    first = int(np.argmax(differ))
    where = f"id {found.joined.ids[found.joined.sequence[first]]}, position {found.joined.position[first]}"
    return f"{differ.mean():.0%} of tokens are other ones in B, from {where} on"


def _shift(found: Gaps) -> str | None:
    joined, size = found.joined, float(found.size.mean())
    for by in (1, -1, 2, -2):
        here, there = (slice(None, -by), slice(by, None)) if by > 0 else (slice(-by, None), slice(None, by))
        same = joined.sequence[here] == joined.sequence[there]
        if same.sum() >= _FEW:
            left = float(np.abs(joined.trainer[there] - joined.rollout[here])[same].mean())
            if left < size / 5:
                return f"moved by {by:+d} the rollout's differ by {left:.1e} nats, as they are by {size:.2g}"
    return None


def _stale(found: Gaps) -> str | None:
    if found.joined.step is None:
        return None
    steps = np.unique(found.joined.step)
    means = [float(found.size[found.joined.step == step].mean()) for step in steps]
    if len(steps) < 2 or not means[0] < min(means[1:]) / 3:
        return None
    return f"{means[0]:.1e} nats at step {steps[0]}, and {min(means[1:]):.2g} or more at each later one"


def _special(found: Gaps) -> str | None:
    beyond = found.size > found.limit
    if not 0 < beyond.sum() <= len(beyond) / 4:
        return None
    tokens, counts = np.unique(found.joined.token[beyond], return_counts=True)
    last = np.r_[found.joined.sequence[1:] != found.joined.sequence[:-1], True]
    common = tokens[np.argmax(counts)]
    for where, name in ((last, "the last token of a sequence"), (found.joined.token == common, f"token {common!r}")):
        if where[beyond].mean() >= 0.9 and beyond[where].mean() >= 0.5 and where.sum() >= 3:
            return f"{where[beyond].mean():.0%} of the {beyond.sum()} suspicious tokens are {name}"
    return None


def _from_a_position(found: Gaps) -> str | None:
    joined, beyond = found.joined, found.size > found.limit
    if beyond.sum() < _FEW:
        return None
    for at, name in ((joined.position, "position"), (joined.place, "scored token")):
        first = int(at[beyond].min())
        before, after = at < first, at >= first
        early = len(np.unique(joined.sequence[before])) >= found.n / 3 and before.sum() >= _FEW
        if early and beyond[after].mean() > 0.25 and found.size[before].mean() < found.size[after].mean() / 5:
            share = f"{beyond[after].mean():.0%} from there on"
            return f"none of {before.sum()} tokens before {name} {first} is suspicious, {share}"
    return None


def _by_padding(found: Gaps) -> str | None:
    starts = found.joined.position[found.joined.place == 0]
    padded = starts < starts.max()
    if not padded.any() or (~padded).sum() > found.n / 2:
        return None
    gaps = found.by_sequence(found.size)
    whole, part = float(gaps[~padded].max()), float(np.median(gaps[padded]))
    if whole * 5 > part or gaps[padded].min() < whole:
        return None
    return f"{whole:.1e} nats after the longest prompts, {part:.2g} after those that padding fills up"


def _one_sided(found: Gaps) -> str | None:
    up, down = np.maximum(found.log_ratio, 0), np.maximum(-found.log_ratio, 0)
    more, less, side = (up, down, "B") if up.sum() > down.sum() else (down, up, "A")
    # Rounding is on both sides; what is left on the other one may be no more than it.
    both_sides = less.sum() * 5 > more.sum() or np.quantile(less, 0.99) * 4 > np.quantile(more, 0.99)
    # A renormalization that takes a token to 20 times its probability keeps less than a twentieth of it all.
    if both_sides or (more > FLOOR).mean() < 0.05 or more.max() > np.log(20):
        return None
    share = np.exp(-np.quantile(more, 0.99))
    return f"{side}'s are larger wherever they differ, as if renormalized over {share:.0%} of the probability or more"


def _temperature(found: Gaps) -> str | None:
    a, b = found.joined.rollout, found.joined.trainer
    if found.joined.top is not None and (said := _temperature_of_top(found)):
        return said
    confident, rare = b > np.log(0.5), b < np.log(0.1)
    if confident.sum() < _FEW or rare.sum() < _FEW:
        return None
    # A lower temperature gives to what is likely and takes from what is not.
    gain, loss = float((a - b)[confident].mean()), float((a - b)[rare].mean())
    slope = float(np.cov(a, b)[0, 1] / b.var(ddof=1))
    fit = np.corrcoef(a, b)[0, 1] ** 2
    if gain * loss >= 0 or fit < 0.9 or abs(slope - 1) < 0.03 or min(abs(gain), abs(loss)) < found.limit / 40:
        return None
    return f"A gives {gain:+.2g} nats to tokens of probability above a half and {loss:+.2g} to those below a tenth"


def _temperature_of_top(found: Gaps) -> str | None:
    ratios = []
    for one, other in zip(*found.joined.top, strict=True):
        both = [token for token in one if token in other]
        pairs = [(one[x] - one[y], other[x] - other[y]) for x, y in itertools.pairwise(both)]
        ratios += [first / second for first, second in pairs if abs(second) > 0.1]
    if len(ratios) < _FEW:
        return None
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    if abs(middle - 1) < 0.02 or high - low > abs(middle - 1) / 2:
        return None
    return f"log-probabilities of the likeliest tokens lie {middle:.2f} times as far apart in A"


def _early(found: Gaps) -> str | None:
    place, n = found.joined.place, int(found.joined.place.max()) + 1
    first, last = place < n / 3, place >= 2 * n / 3
    gaps = found.by_sequence(found.size, first), found.by_sequence(found.size, last)
    both = ~np.isnan(gaps[0]) & ~np.isnan(gaps[1])
    if both.sum() < 4:
        return None
    logs = np.log(np.maximum(gaps[0][both], 1e-12) / np.maximum(gaps[1][both], 1e-12))
    if logs.mean() - 2 * logs.std(ddof=1) / np.sqrt(len(logs)) < np.log(1.2):
        return None
    return f"the first third of each answer differs {np.exp(logs.mean()):.1f} times as far as the last"


def _even(found: Gaps) -> str | None:
    gaps, mean, largest = found.by_sequence(found.size), float(found.size.mean()), float(found.size.max())
    side = abs(float(found.log_ratio.mean()))
    if not FLOOR / 10 < mean < 0.3 or side > 0.4 * mean or largest > 15 * mean or gaps.min() < gaps.max() / 6:
        return None
    return f"all sequences differ alike, on both sides, by {mean:.1e} nats in the mean and {largest:.2g} at most"


# The table beside this module names the tests above.
SIGNATURES = tuple(
    Signature(**row | {"saw": globals()[row["saw"]]}) for row in read_yaml(Path(__file__).with_suffix(".tables.yaml"))
)


def named(found: Gaps) -> list[tuple[Signature, str]]:
    """List the signatures that are seen, each with what was."""
    seen = ((signature, signature.saw(found)) for signature in SIGNATURES)
    return [(signature, said) for signature, said in seen if said]
