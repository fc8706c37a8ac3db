"""What is compared: the same tokens, once by a cold request and once by another.

Controls reuse nothing; they show what the server does anyway.  A prefix of L tokens and a question make a prompt.

=========  ========================================================================================
control
=========  ========================================================================================
again      the same request, cold once more: nothing changes, unless the server is not deterministic
batch      the same request, cold, beside others: more rows are computed together
split      the prompt and the first tokens of its answer, cold: what was decoded is now prefilled
=========  ========================================================================================

Reuse computes a few tokens on a filled cache.  Its shapes lie between those of a prefill and of a decode step, and
`split` compares these two.

==========  =======================================================================================
reuse
==========  =======================================================================================
shared      another question about the same prefix went before
repeat      the same request went before
edited      the same prefix went before, but for one word in it
continued   the conversation goes on: the prompt, its answer, another question
two at once two conversations go on at the same time: does one leak into the other?
==========  =======================================================================================
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvbook.server import prompts
from kvbook.server.client import Answer
from kvbook.server.session import NEW_TOKENS, Session

CONTROLS = ("again", "batch", "split")
REUSE = ("shared", "repeat", "edited", "continued", "two at once")
# Tokens of the answer that `split` moves into the prompt.
SPLIT = NEW_TOKENS // 2
# Where in the prefix the question's word stands, by turns.
_SHARES = (0.95, 0.1, 0.5)


class Comparison(NamedTuple):
    """Two answers to the same prompt.

    Attributes
    ----------
    kind : str
        One of `CONTROLS` or `REUSE`.
    length : int
        Tokens of the prefix.
    prompts : tuple of str
        What was sent, in order; the last was answered twice.
    cold, other : Answer
        The two answers.
    skipped : int
        Tokens of the cold answer that stand in the other's prompt.
    """

    kind: str
    length: int
    prompts: tuple[str, ...]
    cold: Answer
    other: Answer
    skipped: int = 0

    def differences(self) -> np.ndarray:
        """Return |Δ log p| of every token that both answers tell, up to the first position where another is chosen.

        There the text before is still the same.  A token that is not among the likeliest of the other answer has at
        most the log-probability of the last of them, so their difference is at least as large as the one given.
        """
        found, skipped, other = [], self.skipped, self.other
        both = zip(self.cold.tokens[skipped:], self.cold.top[skipped:], other.tokens, other.top, strict=False)
        for chosen, mine, theirs, yours in both:
            for token in dict.fromkeys((chosen, *mine)):
                if token in yours or token == chosen:
                    told = yours.get(token, min(*yours.values(), mine[token]))
                    # Both may be −∞, which are equal though their difference is no number.
                    found.append(0.0 if told == mine[token] else told - mine[token])
            if chosen != theirs:
                break
        return np.abs(found)


def made(session: Session, first: str, length: int, count: int, more: bool) -> Iterator[Comparison]:
    """Ask for all comparisons of one length, and yield each when it is there.

    No earlier run has had the first line; `count` pieces make `length` tokens; `more` tries conversations too.
    """
    prefix = prompts.pieces(first, length, count)
    text, share = "".join(prefix), _SHARES[length % len(_SHARES)]
    prompt = text + prompts.question(prefix, share)
    cold = session.cold(prompt)
    if not session.repeats:
        yield Comparison("repeat", length, (prompt, prompt), cold, session.warm(prompt))
        return
    yield Comparison("again", length, (prompt,), cold, session.cold(prompt))
    beside = [_text(prompts.pieces(first, length + place, count)) for place in (1000, 2000)]
    yield Comparison("batch", length, (prompt,), cold, session.together(session.cold, [prompt, *beside])[0])
    moved = session.cold(longer := prompt + "".join(cold.tokens[:SPLIT]), NEW_TOKENS - SPLIT)
    if _adds(cold, moved):
        yield Comparison("split", length, (longer,), cold, moved, SPLIT)
    earlier = text + prompts.question(prefix, 0, " Then")
    session.warm(earlier, 1)
    yield Comparison("shared", length, (earlier, prompt), cold, session.warm(prompt))
    yield Comparison("repeat", length, (prompt, prompt), cold, answer := session.warm(prompt))
    if not more:
        return
    # What goes on from the cache is asked first: a cold request may leave the whole prompt there.
    changed = _text(prompts.edited(prefix), share)
    warm = session.warm(changed)
    yield Comparison("edited", length, (earlier, changed), session.cold(changed), warm)
    goes_on = prompt + answer.text + prompts.question(prefix, 0.3, " Then")
    warm = session.warm(goes_on)
    yield Comparison("continued", length, (prompt, goes_on), session.cold(goes_on), warm)
    session.warm(prompt, 1)
    session.warm(beside[0], 1)
    both = [start + prompts.question(prefix, 0.4, " Then") for start in (prompt, beside[0])]
    for each, warm in zip(both, session.together(session.warm, both), strict=True):
        yield Comparison("two at once", length, (prompt, beside[0], *both), session.cold(each), warm)


def _text(prefix: list[str], share: float = 0.5) -> str:
    return "".join(prefix) + prompts.question(prefix, share)


def _adds(cold: Answer, moved: Answer) -> bool:
    """Tell whether tokens that became part of the prompt are still the same tokens, as far as their number shows it."""
    if len(cold.tokens) <= SPLIT or "\ufffd" in "".join(cold.tokens[:SPLIT]):
        return False
    return None in (cold.prompt_tokens, moved.prompt_tokens) or moved.prompt_tokens == cold.prompt_tokens + SPLIT
