"""The execution paths on which caches go wrong: one list for every tool that tries them, one entry for each path.

`kvbook check` takes two of them and its ``--thorough`` most; the atlas, `kvbook.exact.verify` and `kvbook.check_step`
take theirs.  Reading the list imports no torch, so recorded rows can be read without it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbook.diagnosis.outcome import PADDING_COUNTS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

# The tools.
CHECK, THOROUGH, ATLAS, VERIFY, LOOP = "check", "check --thorough", "atlas", "verify", "check_step"
# Tokens of the short texts of ``--thorough``.
SHORT = 20


class NoCache(Exception):
    """A model has no such path; the message says why."""


class Path(NamedTuple):
    """One execution path.

    Attributes
    ----------
    name : str
        In reports, and in the columns of the atlas.
    control : str
        A fault of `kvbook.diagnosis.faults` that must be called a bug on this path.
    remedy : str
        What to do where the path is wrong.
    cut : callable, optional
        Cuts a text of so many tokens into the parts that are fed one after the other.
    feed : callable, optional
        Where a cut does not say it all: feeds token ids, shape (1, n), to a `kvbook.diagnosis.feeding.Fed`.  Returns
        the logits of the first tokens, which one full pass should give too, or a pair that should agree.  Raises
        `NoCache` where a model has no such path.
    excuse : callable
        Says of a model why a difference is no bug of its cache; None where its class promises that the path works.
    tools : tuple of str
        The tools that try it.
    called : mapping of str to str
        What tools call it that do not use its name.
    n_tokens : int
        Tokens of the text that ``--thorough`` tries it on.
    """

    name: str
    control: str
    remedy: str
    cut: "Callable[[int, np.random.Generator | None], list[int]] | None" = None
    feed: "Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor]] | None" = None
    excuse: "Callable[[PreTrainedModel], str | None]" = lambda _model: None
    tools: tuple[str, ...] = (THOROUGH, ATLAS)
    called: Mapping[str, str] = {}
    n_tokens: int = SHORT

    def compared(self, fed: Any, ids: "Tensor", whole: "Tensor | None" = None) -> "tuple[Tensor, Tensor]":
        """Return what should agree, and what the path gives; `whole` is the full pass, where it is known already."""
        found = self.feed(fed, ids) if self.feed else fed.in_parts(ids, self.cut(ids.shape[1], None))[0]
        if isinstance(found, tuple):
            return found
        whole = fed.full(ids) if whole is None else whole
        return whole[:, : found.shape[1]], found


def steps(length: int, _generator: "np.random.Generator | None" = None) -> list[int]:
    """Cut into single tokens after the first two: transformers' MPT makes no mask for one token on an empty cache."""
    return [2, *[1] * (length - 2)]


def chunks(length: int, _generator: "np.random.Generator | None" = None) -> list[int]:
    """Cut into uneven chunks, a single token among them."""
    rest = length - 13
    return [5, 7, 1, rest - rest // 2, rest // 2] if rest > 1 else thirds(length)


def thirds(length: int, _generator: "np.random.Generator | None" = None) -> list[int]:
    """Cut into a chunk, two tokens, single tokens and another chunk; only the last two of a few tokens."""
    third = length // 3
    return [third, *([2, *[1] * (third - 2)] if third > 1 else [1]), length - 2 * third]


def two_parts(length: int, generator: "np.random.Generator") -> list[int]:
    """Cut at a random place."""
    first = int(generator.integers(2, length - 1))
    return [first, length - first]


def of(tool: str) -> dict[str, Path]:
    """Return the paths of a tool, by what it calls them."""
    return {path.called.get(tool, path.name): path for path in PATHS if tool in path.tools}


def _static(model: "PreTrainedModel") -> str | None:
    # Late: reading the list imports no torch.
    from kvbook import older

    promised = older.promises_static(model)
    return None if promised else "gives other logits; its class makes no promise about static caches"


def _by(name: str) -> "Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor]]":
    """Feed by a method of `Fed`."""
    return lambda fed, ids: getattr(fed, name)(ids)


def _short(name: str) -> "Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor]]":
    """Feed half of a text and a few single tokens alone, so that a fault of a second chunk is not found everywhere."""
    few = 5
    return lambda fed, ids: getattr(fed, name)(ids[:, : ids.shape[1] // 2 + few], ids.shape[1] // 2, [1] * few)


_POSITIONS = "look at positions and mask on a filled cache"

PATHS = (
    Path("token by token", "offset_forgotten", _POSITIONS, steps, tools=(CHECK, ATLAS)),
    Path("in two parts", "offset_forgotten", _POSITIONS, two_parts, tools=(CHECK,)),
    Path("prefix + last token", "offset_forgotten", _POSITIONS, lambda length, _: [length - 1, 1], tools=(VERIFY,)),
    Path("chunks", "offset_forgotten_in_chunks", "feed the prompt in one call", chunks,
         tools=(THOROUGH, ATLAS, VERIFY), called={THOROUGH: "chunked prefill"}),
    Path("single tokens", "offset_forgotten", _POSITIONS, lambda length, _: [1] * length,
         tools=(VERIFY, LOOP), called={VERIFY: "token by token", LOOP: "token by token"}),
    Path("in chunks", "offset_forgotten_in_chunks", "shift the mask by the state's length", thirds, tools=(LOOP,)),
    # `check_step` feeds another text between the first part and the rest.
    Path("with another text in between", "one_cache_for_all", "return the state instead of sharing it",
         lambda length, _: [length // 3, *[1] * (length - length // 3)], tools=(LOOP,)),
    Path("static cache", "offset_forgotten", "use a dynamic cache",
         feed=lambda fed, ids: fed.static(ids, chunks(ids.shape[1]), ids.shape[1] + 7), excuse=_static, tools=(ATLAS,)),
    Path("batch", "texts_swapped", "feed one text at a time", feed=_by("in_batch"), tools=(THOROUGH, ATLAS, VERIFY),
         called={THOROUGH: "batch against single", VERIFY: "in a batch of three"}),
    Path("left padding", "padding_seen", "pass position_ids that count from the first real token",
         feed=_by("left_padded"), excuse=lambda _model: PADDING_COUNTS),
    Path("left padding, token by token", "mask_not_extended",
         "extend attention_mask by each new token, and count position_ids from the first real token",
         feed=lambda fed, ids: fed.padded_in_parts(ids, 0, steps(ids.shape[1]))),
    Path("static cache, full", "last_slot_lost", "use a dynamic cache",
         feed=lambda fed, ids: fed.static(ids, steps(ids.shape[1]), ids.shape[1]), excuse=_static, tools=(THOROUGH,)),
    # What quantization rounds away is meant; what the cache does with its parts is tried without it.
    Path("quantized cache", "offset_forgotten", "use a dynamic cache", feed=_short("quantized")),
    Path("cropped", "crop_one_short", "fill a new cache instead of cropping one", feed=_by("cropped"),
         called={THOROUGH: "cropped cache"}),
    Path("copied cache, used twice", "one_cache_for_all", "fill a new cache for each text", feed=_short("copied")),
    Path("verify and roll back", "crop_one_short", "fill a new cache instead of cropping one", feed=_by("rolled_back")),
    Path("right padding", "mask_not_extended", "pad on the left", feed=_short("right_padded")),
    Path("padding on a continued pass", "mask_not_extended", "continue each text alone, without padding",
         feed=_short("padded_later")),
    Path("padding, batch of 1", "mask_ignored_alone", "leave out the padding of a text that is alone",
         feed=_by("padded_alone")),
    Path("unequal lengths", "mask_not_extended", "feed one text at a time", feed=_short("unequal_lengths")),
    Path("beam reordering", "reorder_forgotten", "use num_beams=1", feed=_short("reordered")),
    Path("positions given", "offset_forgotten", "let the class find its positions", feed=_short("with_positions")),
    Path("use_cache=True", "first_token_hidden", "pass use_cache=False where no cache is needed",
         lambda length, _: [length]),
    *(
        # "quantized" rounds keys and values, by design.
        Path(f"generate, {kind} cache", "offset_forgotten", "use another cache_implementation",
             feed=lambda fed, ids, kind=kind: fed.generated_with(ids, kind),
             excuse=_static if "static" in kind else lambda _model: None, tools=(THOROUGH,))
        for kind in ("dynamic", "static", "offloaded", "offloaded_static")
    ),
    Path("generate, cache as long as the prompt", "last_token_twice", "crop the cache by one token first",
         feed=_by("generated_on_its_prompt"), tools=(THOROUGH,)),
    # Not all tokens: after whole chunks of Llama 4 a prompt that is fed twice changes nothing.
    Path("cache as long as the prompt", "last_token_twice", "crop the cache by one token first",
         feed=lambda fed, ids: fed.onto_its_own_prompt(ids[:, :-1]), tools=(ATLAS,)),
)
