"""Checking a loop of one's own: any function ``(ids, state) -> (logits, state)`` against one call on all tokens."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from kvbook import UserError, refusing
from kvbook.diagnosis import execution_paths, storage, verdict
from kvbook.diagnosis.outcome import INTENDED, STATUS, PathFound, Verdict
from kvbook.measuring import UNIT_ROUNDOFF, agreement

# What the user's function is: the state is None before the first call.
Step = Callable[[Any, Any], tuple[Any, Any]]

_PATHS = execution_paths.of(execution_paths.LOOP)
STEPS, CHUNKS, BETWEEN = _PATHS
_FEWEST = 6
# Submodules' names and outputs, in the order of execution.
_Outputs = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class StepReport:
    """What `check_step` found.

    Attributes
    ----------
    verdict : {"exact", "rounding", "intended storage precision", "bug", "undecided"}
        Of the worst path.
    why : str
        The rule that decided, with its number.
    path : str
        The execution path on which the verdict rests.
    first_wrong : int or None
        The first position whose logits are off by more than rounding, from 0.
    module : str or None
        The first submodule whose output is, in the order of execution; None without a bug or without modules.
    cause : str or None
        What the pattern of wrong positions points to.
    paths : list of PathFound
        One verdict each.
    """

    verdict: Verdict
    why: str
    path: str
    first_wrong: int | None = None
    module: str | None = None
    cause: str | None = None
    paths: list[PathFound] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0 for exact, rounding or intended storage precision, 1 for a bug, 2 where nothing was decided."""
        return STATUS[self.verdict]

    @property
    def lines(self) -> list[str]:
        """Say it in a few lines."""
        rows = [
            ("verdict", f"{self.verdict}: {self.why}"),
            ("paths", "; ".join(f"{found.path}: {found.verdict}" for found in self.paths)),
            ("position", self.first_wrong is not None and f"{self.first_wrong} is the first wrong one ({self.path})"),
            ("module", self.module and f"{self.module} is the first whose output differs"),
            ("cause", self.cause),
        ]
        return [f"{name:9s} {text}" for name, text in rows if text]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def check_step(
    step: Step, ids: Any, *, modules: torch.nn.Module | None = None, dtype: str | None = None,
    cache_dtype: str | None = None,
) -> StepReport:
    """Compare a decoding loop with one call on all tokens.

    Parameters
    ----------
    step : callable
        Takes token ids and a state, which is None before the first call, and returns logits and the new state.  Logits
        of every token it was given, or of the last one alone; of torch or of numpy, with a batch dimension of 1 or
        without.
    ids : sequence of int, or array of shape (n,) or (1, n)
        The text, 6 tokens or more, longer than the model's window if it has one.  Arrays are handed over in slices, a
        list as a tensor of shape (1, n).
    modules : Module, optional
        What `step` runs: its submodules' outputs are compared too, so that a bug is located.
    dtype : str, optional
        That `step` computes in, where it is not that of its logits.
    cache_dtype : {"float32", "float16", "bfloat16", "fp8", "int8", "int4", "int2"}, optional
        What the state is meant to keep its numbers in, where these are fewer bits than `step` computes with.  A
        quantized cache of transformers says so itself.

    Returns
    -------
    StepReport
        Print it.

    Raises
    ------
    UserError
        When `ids` are no tokens or too few, what `step` returns is no logits, or a state of the declared kind cannot be
        changed.

    Examples
    --------
    >>> import kvbook, torch
    >>> table = torch.randn(9, 9)
    >>> def step(ids, state):
    ...     seen = ids if state is None else torch.cat([state, ids], 1)
    ...     return table[seen].cumsum(1)[:, -ids.shape[1]:], seen
    >>> kvbook.check_step(step, [1, 2, 3, 4, 5, 6]).status
    0
    """
    if isinstance(ids, list | tuple | range):
        ids = torch.tensor([list(ids)])
    are_ids = "int" in str(getattr(ids, "dtype", "")) and ids.shape[:-1] in ((), (1,))
    if not are_ids or ids.shape[-1] < _FEWEST:
        raise UserError(f"ids must be {_FEWEST} or more tokens of one text: ints, in a list or of shape (n,) or (1, n)")
    if cache_dtype not in (None, *storage.DECLARABLE):
        raise UserError(f"cache_dtype {cache_dtype!r} is none of {', '.join(storage.DECLARABLE)}")
    with torch.no_grad():
        run = _Run(step, ids, modules)
        if (dtype or run.dtype) not in UNIT_ROUNDOFF:
            known = f"is none of {', '.join(UNIT_ROUNDOFF)}"
            raise UserError(f"dtype {dtype!r} {known}" if dtype else f"{run.dtype} of the logits {known}: name dtype=")
        return _report(run, dtype, cache_dtype or run.declared)


def _report(run: "_Run", named: str | None, declared: str | None) -> StepReport:
    dtype = named or run.dtype
    tried = {path: run.off(path) for path in _PATHS}
    offs = {path: off for path, off in tried.items() if isinstance(off, np.ndarray)}
    findings = {path: verdict.of_one(float(off.max()), dtype) for path, off in offs.items()}
    worst = max(findings, key=lambda path: verdict.ORDER.index(findings[path].kind))
    finding = findings[worst]
    said = {path: ("not supported", why) for path, why in tried.items()}
    said |= {path: (found.kind, found.why) for path, found in findings.items()}
    paths = [PathFound(path=path, verdict=kind, detail=why) for path, (kind, why) in said.items()]
    limit = verdict.LIMIT * UNIT_ROUNDOFF[dtype]
    if finding.kind == "bug" and (why := run.disagrees_with_itself(limit)):
        return StepReport("undecided", why, worst, paths=paths)
    explainable = finding.kind == "bug" or (finding.kind == "undecided" and declared)
    like = _storage(run, list(offs.values()), dtype, declared) if explainable else None
    if declared and like and like.explains:
        wrong = ("bug", "undecided")
        paths = [each.model_copy(update={"verdict": INTENDED}) if each.verdict in wrong else each for each in paths]
        return StepReport(INTENDED, like.why(finding), worst, paths=paths)
    if finding.kind != "bug":
        return StepReport(finding.kind, finding.why, worst, paths=paths)
    if not named and (narrow := run.narrow) and offs[worst].max() <= verdict.LIMIT * UNIT_ROUNDOFF[narrow]:
        held = f"all logits are numbers of {narrow}, held in {dtype}"
        which = f"name dtype={narrow!r} if step computes in it, dtype={dtype!r} if not"
        return StepReport("undecided", f"{held}: {which}", worst, paths=paths)
    first = int(np.argmax(~(offs[worst] <= limit)))
    place, cause = run.located(worst, limit), _cause(worst, first, run)
    if like:
        meant = f"{like.looks_like}; if that is meant, pass cache_dtype={like.name!r}"
        cause = f"{cause}; {like.excess}" if declared else f"{meant}; if not: {cause}"
    return StepReport("bug", finding.why, worst, first, place, cause, paths)


def _cause(path: str, first: int, run: "_Run") -> str:
    """Say what it points to where a path first goes wrong."""
    if path == CHUNKS:
        return "single tokens are right, several on a filled state are not: shift the causal mask by the state's length"
    if path == BETWEEN:
        return "another text changes this one's state: the state is shared, not returned"
    if run.ignores_state():
        return "what was fed before has no effect: the state is not used, or not returned"
    if first > 1:
        look = "look at what is dropped or moved when it is full"
        return f"right as long as the state holds {first} tokens, wrong from there: {look}"
    often = "positions that begin again at 0, the whole text fed again, keys cached before they are rotated, or a mask"
    return f"wrong from the first cached token on, often from {often}"


def _storage(run: "_Run", offs: list[np.ndarray], dtype: str, declared: str | None) -> storage.Storage | None:
    """Compare the differences with those of storage: in the declared format, or in the one that they are most like."""
    if not (names := storage.narrower(dtype, declared)):
        return None
    try:
        of_formats = run.moved(names)
    # A state may be anything; without a declaration this would only have explained a verdict.
    except Exception as error:
        if declared:
            why = f"the state cannot be copied and changed ({type(error).__name__})"
            raise UserError(f"storage in {storage.said(declared)}: {why}") from error
        return None
    if declared and not of_formats[declared].any():
        lacks = "the state holds no numbers of floating point or of 8 bits to be changed"
        raise UserError(f"storage in {storage.said(declared)}: {lacks}")
    found = [_ends(off) for off in offs]
    compared = [storage.compared(name, found, _ends(off)) for name, off in of_formats.items()]
    return compared[0] if declared else storage.nearest(compared)


def _ends(offs: np.ndarray) -> np.ndarray:
    """Return the mean over the positions that differ, and the largest."""
    return np.array([offs[offs > 0].mean() if (offs > 0).any() else 0.0, offs.max()])


class _Run:
    """Calls of the user's function on one text, beside the call on all of it."""

    def __init__(self, step: Step, ids: Any, modules: torch.nn.Module | None) -> None:
        self.step, self.ids, self.modules = step, ids, modules
        self.length = ids.shape[-1]
        returned = step(ids, None)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise UserError(f"step returned {type(returned).__name__}, not a pair: return (logits, state)")
        logits, state = returned
        logits, self.declared = self._logits(logits, self.length), storage.declared_by(state)
        self.dtype = str(logits.dtype).removeprefix("torch.")
        # Of the last token alone: then the call on all tokens is one on the tokens up to each.
        self._expected = dict(enumerate(logits)) if logits.shape[0] == self.length else {}
        # What a model computes in may be narrower than what its logits are returned in; whole numbers fit in any dtype.
        wide, self.narrow = logits.double(), None
        for name in ("float16", "bfloat16"):
            if name != self.dtype and (wide != wide.round()).any() and (wide.to(getattr(torch, name)) == wide).all():
                self.narrow = name
        # All equal where a model knows nothing yet.
        self._scale = logits.double().std(-1, correction=0).mean().item() or 1.0

    def _logits(self, logits: Any, size: int) -> torch.Tensor:
        refusal = f"step returned no logits ({type(logits).__name__}): return (logits, state)"
        with refusing(refusal, TypeError, ValueError, RuntimeError):
            tensor = torch.as_tensor(logits).detach().cpu()
            rows = tensor.reshape(-1, tensor.shape[-1])
        if len(rows) not in (1, size):
            raise UserError(f"step returned logits of {len(rows)} tokens for {size}: return all or the last alone")
        return rows

    def _call(self, ids: Any, state: Any = None) -> torch.Tensor:
        return self._logits(self.step(ids, state)[0], ids.shape[-1])

    def expected(self, position: int) -> torch.Tensor:
        if position not in self._expected:
            self._expected[position] = self._call(self.ids[..., : position + 1])[-1]
        return self._expected[position]

    def _fed(self, path: str) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Feed the text in parts: where each starts, its size and its logits."""
        state, start = None, 0
        for size in _PATHS[path].cut(self.length, None):
            logits, state = self.step(self.ids[..., start : start + size], state)
            if path == BETWEEN and not start:
                # Another text: the other half, which numpy and torch cut alike.
                self.step(self.ids[..., self.length // 2 :], None)
            yield start, size, self._logits(logits, size)
            start += size

    def off(self, path: str) -> np.ndarray | str:
        """Return each position's difference over the spread of the logits, or why a path is not taken."""
        found = np.zeros(self.length)
        try:
            for start, size, logits in self._fed(path):
                for row, position in enumerate(range(start, start + size)[-logits.shape[0] :]):
                    found[position] = self._distance(self.expected(position), logits[row])
        except Exception as error:
            # A loop that takes one token at a time has no chunks; without single tokens it is no loop.
            if path == STEPS:
                raise
            return f"raises {type(error).__name__}: {error}".splitlines()[0]
        return found

    def _distance(self, expected: torch.Tensor, found: torch.Tensor) -> float:
        return agreement.over_spread(expected, found, self._scale).item()

    def disagrees_with_itself(self, limit: float) -> str | None:
        """Say why no loop could agree with the call on all tokens, if so."""
        half = self.length // 2
        if not self._distance(self.expected(self.length - 1), self._call(self.ids)[-1]) <= limit:
            kept = "a state is kept outside of what step returns, or dropout is on (call .eval())"
            return f"the same call on all tokens, made twice, gives other logits: {kept}"
        if not self._distance(self.expected(half - 1), self._call(self.ids[..., :half])[-1]) <= limit:
            other = "one call on all tokens gives earlier tokens other logits when later ones follow"
            return f"{other}: nothing can agree with it"
        return None

    def moved(self, names: list[str]) -> dict[str, np.ndarray]:
        """Return each position's difference when the numbers of the state are moved, once, by steps of a format."""
        found = {name: np.zeros(self.length) for name in names}
        state = None
        for position in range(self.length):
            fed = self.ids[..., position : position + 1]
            if position:
                stock = self._call(fed, copy.deepcopy(state))[-1]
                for name in names:
                    other = self._call(fed, storage.moved(state, name, position))[-1]
                    found[name][position] = self._distance(stock, other)
            state = self.step(fed, state)[1]
        return found

    def ignores_state(self) -> bool:
        """Tell whether the last token's logits are those without any context."""
        *_, (start, _, logits) = self._fed(STEPS)
        return bool((self._call(self.ids[..., start:])[-1] == logits[-1]).all())

    def located(self, path: str, limit: float) -> str | None:
        """Name the first submodule, in the order of execution, whose output differs by more than rounding."""
        if self.modules is None:
            return None
        seen: _Outputs = []
        names = {module: name for name, module in self.modules.named_modules()}

        def keep(module: torch.nn.Module, _arguments: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output
            if names.get(module) and isinstance(tensor, torch.Tensor):
                seen.append((names[module], tensor.detach().cpu()))

        with register_module_forward_hook(keep):
            self.step(self.ids, None)
            whole = list(seen)
            seen.clear()
            for start, size, _ in self._fed(path):
                # What the other text left after the part's own.
                part = seen[: len(whole)]
                seen.clear()
                if start and (found := self._first_different(whole, part, start, size, limit)):
                    return found
        return None

    def _first_different(self, whole: _Outputs, part: _Outputs, start: int, size: int, limit: float) -> str | None:
        for (name, full), (other_name, cut) in zip(whole, part, strict=False):
            if name != other_name or full.dim() != cut.dim():
                return None
            # The first dimension that counts tokens.
            sizes = zip(full.shape, cut.shape, strict=True)
            place = next((d for d, pair in enumerate(sizes) if pair == (self.length, size)), None)
            if place is None or (expected := full.narrow(place, start, size).double()).shape != cut.shape:
                continue
            scale = expected.square().mean().sqrt().item() or 1.0
            if not (cut.double() - expected).square().mean().sqrt().item() <= limit * scale:
                return name
        return None
