"""The check of a running server, from its first request to the verdict.

Reuse must not move log-probabilities further than the server moves them without it.
The bounds are those of `kvbook scores`.  A reused prefix is wrong for single requests, so each comparison is judged by
itself, by its largest |Δ log p| and its mean, against the largest over all controls.

- No log-probability moves: exact.
- None moves by more than `FLOOR`: rounding of fp32, for which no control is needed.
- The mean is above `PLAIN`: a fault, for which no control is needed either.
- At most `FAR` times the controls' largest: rounding, or batching.  More: a fault.
- No control moved, or none could be made: nothing shows how much is usual in the shapes of reuse, so the answer is
  "cannot tell".  So it is where the controls' own mean is above `PLAIN`, which would hide everything.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvbook import UserError, progress
from kvbook.scores.verdict import FAR, FLOOR, PLAIN
from kvbook.server import client, comparisons, prompts
from kvbook.server.comparisons import CONTROLS, Comparison
from kvbook.server.outcome import STATUS, Compared, Outcome, Shortest, Verdict
from kvbook.server.session import BEGINNING, FIRST, NotCold, Session

# Around the blocks in which servers keep keys and values: 16 tokens in vLLM, 64 and 256 elsewhere.
LENGTHS = (15, 16, 17, 63, 64, 65, 255, 256, 257)
_MOST_LENGTHS, _SHORTEST, _LONGEST = 16, 8, 8192
_BLOCK = 16
_NOT_TRIED = "sampling, adapters, images, eviction while requests wait, more than three requests at once"

_NONE = "none needed; for equal answers switch on batch invariance, where the server has it"
_OFF = (
    "switch prefix caching off until it is mended: --no-enable-prefix-caching (vLLM), --disable-radix-cache (SGLang), "
    '"cache_prompt": false (llama.cpp); report the requests'
)
_COUNT = (
    "let the server count what it reuses: --enable-prompt-tokens-details (vLLM), --enable-cache-report (SGLang); "
    "is prefix caching on?"
)
_SECOND = "start the same server a second time, without prefix caching, and name it: --control http://127.0.0.1:8001/v1"
_REFUSED = "mend that, or use a server, or a mode of it, that returns log-probabilities from /completions"
_COLD = "see what was not tried: each length was left out"
_NOISE = "look at this first: answers differ without any reuse, so nothing can be said of the cache"
_AGAIN = "look at the server's log, start it and the check again"


def lengths_of(text: str) -> tuple[int, ...]:
    """Read the lengths of prefixes from the command line."""
    try:
        found = tuple(sorted({int(part) for part in text.replace(",", " ").split()}))
    except ValueError:
        found = ()
    if not 1 <= len(found) <= _MOST_LENGTHS or found[0] < _SHORTEST or found[-1] > _LONGEST:
        wanted = f"1 to {_MOST_LENGTHS} numbers from {_SHORTEST} to {_LONGEST}"
        raise UserError(f"--lengths {text}: name {wanted}, such as 15,16,17")
    return found


def check(
    server: client.Client, control: client.Client | None = None, lengths: Sequence[int] = LENGTHS,
    rows: Path | None = None,
) -> Outcome:
    """Check a server, whose control is the same one without prefix caching.

    Without a model it is asked for its only one.  Every request and its answer are written to `rows` as they come, and
    what it said until it stops answering is judged.
    """
    started = time.monotonic()
    server = server._replace(model=server.model or _only_model(server))
    session = Session(server, control and control._replace(model=control.model or _only_model(control)))
    found: list[Comparison] = []
    not_tried: list[str] = []
    failed = None
    try:
        for comparison in _all(session, prompts.opening(), lengths, not_tried):
            found.append(comparison)
            _keep(session, rows)
    except client.Unanswered as error:
        if not any("text" in each for each in session.asked):
            raise UserError(f"{server.address} does not answer: {error}") from None
        failed = f"the server stopped answering after request {len(session.asked)} ({error})", _AGAIN
    except client.Refused as error:
        found, failed = [], (f"the server refuses what the check needs: {error}", _REFUSED)
    finally:
        _keep(session, rows)
    usual = [each.differences() for each in found if each.kind in CONTROLS]
    # Largest and mean |Δ log p| without reuse.
    without = float(np.max([moved.max() for moved in usual])) if usual else None
    noise = float(np.max([moved.mean() for moved in usual], initial=0.0))
    compared = [_compared(each, without, noise) for each in found]
    verdict, why, remedy = _judged(session, compared, without, noise, failed)
    wrong = next((of for of, each in zip(found, compared, strict=True) if each.verdict == "fault"), None)
    if not session.repeats:
        not_tried.append(f"controls: {FIRST} is cold")
    return Outcome(
        address=server.address, model=server.model, verdict=verdict, status=STATUS[verdict], why=why, cold=session.way,
        reused=session.reused if session.reports else None, without_reuse=without, comparisons=compared,
        shortest=wrong and Shortest(kind=wrong.kind, prefix_tokens=wrong.length, prompts=list(wrong.prompts)),
        remedy=remedy, not_tried=[*not_tried, _NOT_TRIED], requests=len(session.asked),
        seconds=round(time.monotonic() - started, 1),
    )


def _only_model(server: client.Client) -> str:
    try:
        names = server.models()
    except client.Unanswered as error:
        raise UserError(f"no server answers at {server.address}: {error}") from None
    except client.Refused as error:
        raise UserError(f"{server.address} does not list its models ({error}): name one with --model") from None
    if len(names) != 1:
        listed = ", ".join(names[:10]) or "none"
        raise UserError(f"{server.address} serves {len(names)} models ({listed}): name one with --model")
    return names[0]


def _all(session: Session, first: str, lengths: Sequence[int], not_tried: list[str]) -> Iterator[Comparison]:
    """Find out how to ask, then compare at one length after the other, the shortest first."""
    probe = prompts.pieces(first, 0, max(lengths))
    session.settle("".join(probe) + prompts.question(probe, 0.5))
    short, long = (prompts.pieces(first, place, count) for place, count in ((1, 32), (2, 96)))
    fewer, more = (session.warm("".join(each), 1).prompt_tokens for each in (short, long))
    # Tokens per piece, and those that the server puts in front.
    rate = (more - fewer) / (len(long) - len(short)) if fewer and more and more > fewer else 1.0
    added = fewer - rate * len(short) if fewer else 0.0
    for length in progress.track(lengths, label="check: length"):
        count = max(_SHORTEST, round((length - added) / rate))
        try:
            yield from comparisons.made(session, first, length, count, length % _BLOCK == 0)
        except (client.Refused, NotCold) as error:
            not_tried.append(f"{length} tokens ({error})")


def _keep(session: Session, rows: Path | None) -> None:
    if rows:
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in list(session.asked)), "utf-8")


def _judged(
    session: Session, compared: Sequence[Compared], without: float | None, noise: float, failed: tuple[str, str] | None
) -> tuple[Verdict, str, str]:
    """Return the verdict, why, and the remedy; a fault that was seen is told even where nothing else can be."""
    reuse = [each for each in compared if each.verdict]
    kinds = {each.verdict for each in reuse}
    moved = float(np.max([each.largest for each in reuse], initial=0.0))
    said = f"reuse moves log-probabilities by {moved:.2g}"
    if "fault" in kinds:
        limit = f"{without:.2g}" if without else "none that could be measured"
        return "fault", f"{said}, requests without reuse by {limit}", _OFF
    if failed:
        return "cannot tell", *failed
    if not reuse:
        return "cannot tell", "no two answers could be compared", _COLD
    if not noise <= PLAIN:
        return "cannot tell", f"log-probabilities differ by {noise:.2g} in the mean where nothing is reused", _NOISE
    if session.reused <= BEGINNING:
        count = "reused nothing" if session.reports else "does not count it"
        return "cannot tell", f"no reuse seen: the server {count}", _COUNT
    if "cannot tell" in kinds:
        return "cannot tell", f"{said}, and no request without reuse shows how much is usual", _SECOND
    if "rounding" in kinds:
        allowed = f"{FAR:g} times the {without:.2g} without reuse" if moved > FLOOR else f"the {FLOOR:g} of fp32"
        return "rounding", f"{said}, no more than {allowed}", _NONE
    return "exact", "with reuse and without, every log-probability is equal in every digit", "none needed"


def _compared(comparison: Comparison, without: float | None, noise: float) -> Compared:
    moved = comparison.differences()
    largest, mean = float(moved.max()), float(moved.mean())
    return Compared(
        kind=comparison.kind, prefix_tokens=comparison.length, cached_tokens=comparison.other.cached,
        compared=len(moved), largest=largest, mean=mean,
        verdict=None if comparison.kind in CONTROLS else judge(largest, mean, without, noise),
    )


def judge(largest: float, mean: float, usual: float | None, noise: float = 0.0) -> Verdict:
    """Judge one comparison by how far the server moves log-probabilities without reuse."""
    if largest == 0:
        return "exact"
    # What is no number is within no bound.
    if not noise <= PLAIN:
        return "cannot tell"
    if largest <= FLOOR:
        return "rounding"
    if not mean <= PLAIN:
        return "fault"
    if not usual:
        return "cannot tell"
    return "rounding" if largest <= FAR * usual else "fault"
