"""Feeding a model the same tokens in different ways, whatever its class calls its cache."""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbook import older
from kvbook.diagnosis import outcome, verdict
from kvbook.diagnosis.execution_paths import NoCache
from kvbook.measuring import agreement

# What classes call the cache that they return, and take back under the same name.
_NAMES = ("past_key_values", "cache", "cache_params", "state", "past_buckets_states", "mems")
# Tokens of padding before a text, and of what `generate` writes.
PADDING, NEW = 3, 6
# Tokens of a cache that is cropped, and wrong ones that are cropped away.
FILLED, WRONG = 10, 4

# Logits that should agree: of full passes, and of a path.
Compared = tuple[torch.Tensor, torch.Tensor]


def largest_drift(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the drift of the worst position: over the spread of all logits, which is what one roundoff scales with."""
    return agreement.over_spread(expected, found, expected.cpu().double().std()).max().item()


def is_small(drift: float, dtype: torch.dtype) -> bool:
    """Tell whether one drift alone may be rounding."""
    return drift <= verdict.LIMIT * torch.finfo(dtype).eps / 2


def takes(model: PreTrainedModel, name: str) -> bool:
    """Tell whether a class's forward has an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def cache_name(model: PreTrainedModel) -> str:
    """Find what a class calls the cache that it takes."""
    return next((name for name in _NAMES if takes(model, name)), _NAMES[0])


def look_at(model: PreTrainedModel, ids: torch.Tensor) -> "Fed":
    """Find out what a model's cache is called and what it is, on a few tokens."""
    try:
        output = model(ids, use_cache=True)
    except Exception as error:
        # Some class may run without a cache and not with one.
        model(ids, use_cache=False)
        return Fed(model, None, f"raises {type(error).__name__}")
    # An empty cache that a class passes through is none.
    name = next((name for name in _NAMES if output.get(name) is not None and takes(model, name)), None)
    return Fed(model, name, "none" if name is None else type(output[name]).__name__)


@dataclass
class Fed:
    """A model that can be fed in parts; ids have shape (1, n), logits (1, n, vocabulary).

    Attributes
    ----------
    model : PreTrainedModel
        The model.
    name : str or None
        What its class calls the cache; None where none comes back.
    kind : str
        Class of the cache; "none" without one.
    refed : int or None
        Tokens that ``generate`` fed after a prompt that the cache held whole; None until it has.
    """

    model: PreTrainedModel
    name: str | None = "past_key_values"
    kind: str = "DynamicCache"
    refed: int | None = None

    def agree(self, expected: torch.Tensor, found: torch.Tensor) -> bool:
        """Tell whether two passes differ by rounding at most, in the coarser dtype: some logits are always fp32."""
        coarser = max(expected.dtype, self.model.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return is_small(largest_drift(expected, found), coarser)

    def full(self, ids: torch.Tensor, **options: torch.Tensor | int) -> torch.Tensor:
        """Run one pass without a cache."""
        return self.model(ids, use_cache=False, **options).logits

    def _needs_dynamic(self, lacks: str) -> None:
        if self.name is None or not self.kind.endswith("DynamicCache"):
            raise NoCache(f"{lacks}its cache is {self.kind}")

    def in_parts(
        self, ids: torch.Tensor, sizes: list[int], cache: Any = None,
        more: Callable[[int, int], dict[str, torch.Tensor]] = lambda _start, _stop: {},
    ) -> tuple[torch.Tensor, Any]:
        """Feed tokens part by part onto a cache, with what `more` gives from one place to another; return both."""
        if self.name is None:
            # Where a cache cannot even be asked for, this raises the error again.
            self.model(ids, use_cache=True)
            raise NoCache("no cache is returned")
        parts, stop = [], 0
        # Before release 5.4, some recurrent classes do not find out by themselves where a part begins.
        counted = cache is None and takes(self.model, "cache_position")
        for part in ids.split(sizes, 1):
            start, stop = stop, stop + part.shape[1]
            given = {} if cache is None else {self.name: cache}
            if counted:
                given["cache_position"] = torch.arange(start, stop, device=ids.device)
            output = self.model(part, use_cache=True, **given, **more(start, stop))
            cache = output[self.name]
            parts.append(output.logits)
        return torch.cat(parts, 1), cache

    def static(self, ids: torch.Tensor, sizes: list[int], max_cache_len: int) -> torch.Tensor:
        """Feed a static cache."""
        self._needs_dynamic("takes no StaticCache: ")
        return self.in_parts(ids, sizes, older.static_cache(self.model, max_cache_len))[0]

    def quantized(self, ids: torch.Tensor, half: int, ones: list[int]) -> torch.Tensor:
        """Feed the library's quantized cache with nothing lost by quantization."""
        self._needs_dynamic("takes no quantized cache: ")
        if (cache := older.lossless_cache(self.model.config)) is None:
            raise NoCache("takes no quantized cache: the library has no such form of its layers")
        return self.in_parts(ids, [half, *ones], cache)[0]

    def in_batch(self, ids: torch.Tensor) -> torch.Tensor:
        """Run a text at once, as the middle one of three."""
        return self.full(torch.cat([ids.flip(1), ids, ids.roll(1, 1)]))[1:2]

    def left_padded(self, ids: torch.Tensor) -> Compared:
        """Feed the padded text with positions from the first real token, or as the class finds them by itself.

        Classes of absolute positions count the padding, or know it by its id; each is given what it expects, if
        anything is.
        """
        whole = self.full(ids)
        return _nearest((whole, found) for found in self._padded_at_once(ids, 0))

    def padded_in_parts(self, ids: torch.Tensor, at: int, sizes: list[int]) -> Compared:
        """Feed a text part by part onto a cache, with padding in the first part; mask and positions grow with it.

        Some classes count positions from the mask by themselves, or start after the padding's id; those without
        positions want the mask in the first call alone.  Each is given what it expects, if anything is.
        """
        expected = self._unless_padding_counts(ids, at)
        fed = self._padded_in_parts(ids, at, [PADDING + sizes[0], *sizes[1:]])
        return _nearest((expected, found) for found in fed)

    def right_padded(self, ids: torch.Tensor, half: int, ones: list[int]) -> Compared:
        """Fill a cache with a text that is padded on its right, and go on."""
        return self.padded_in_parts(ids, half, [half, *ones])

    def padded_later(self, ids: torch.Tensor, half: int, ones: list[int]) -> Compared:
        """Pad a second part on its left, on top of a cache, and run the same padded text at once."""
        in_parts = self._padded_in_parts(ids, half, [half, PADDING + 1, *ones[1:]])
        # Both count positions by themselves, or both are given them.
        return _nearest(zip(self._padded_at_once(ids, half), in_parts, strict=False))

    def padded_alone(self, ids: torch.Tensor) -> Compared:
        """Run a padded text alone, and as one of two equal ones."""
        padded, mask = self._with_padding(ids, 0)
        twice = self.full(torch.cat([padded, padded]), attention_mask=torch.cat([mask, mask]))
        return twice[:1, PADDING:], self.full(padded, attention_mask=mask)[:, PADDING:]

    def unequal_lengths(self, ids: torch.Tensor, half: int, ones: list[int]) -> Compared:
        """Feed two texts, the shorter one padded on its left, part by part, and each of them alone at once."""
        shorter = ids.flip(1)[:, PADDING:]
        self._unless_padding_counts(shorter, 0)
        padded, mask = self._with_padding(shorter, 0)
        both, masks = torch.cat([ids, padded]), torch.cat([torch.ones_like(mask), mask])
        expected = torch.cat([self.full(ids), self.full(shorter)], 1)
        fed = self._parts_with(both, masks, [half, *ones])
        return _nearest((expected, torch.cat([logits[:1], logits[1:, PADDING:]], 1)) for logits in fed)

    def _unless_padding_counts(self, ids: torch.Tensor, at: int) -> torch.Tensor:
        """Return the full pass; refuse a class whose full pass changes with padding, which is not its cache's doing."""
        if self.name is None:
            # Says why there is none.
            self.in_parts(ids, [ids.shape[1]])
        expected = self.full(ids)
        if not self.agree(*_nearest((expected, found) for found in self._padded_at_once(ids, at))):
            raise NoCache(outcome.PADDING_COUNTS)
        return expected

    def _padded_at_once(self, ids: torch.Tensor, at: int) -> Iterator[torch.Tensor]:
        """Run a text with padding in one pass, its positions found by the class and then given to it."""
        padded, mask = self._with_padding(ids, at)
        yield _without(self.full(padded, attention_mask=mask), at)
        # Some classes hand them on without naming them.
        with contextlib.suppress(TypeError):
            yield _without(self.full(padded, attention_mask=mask, position_ids=_places(mask)), at)

    def _padded_in_parts(self, ids: torch.Tensor, at: int, sizes: list[int]) -> Iterator[torch.Tensor]:
        return (_without(logits, at) for logits in self._parts_with(*self._with_padding(ids, at), sizes))

    def _parts_with(self, padded: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> Iterator[torch.Tensor]:
        """Feed texts with padding part by part, with the positions and masks that some class expects."""

        def feed(places: torch.Tensor | None, only_first_masked: bool = False) -> torch.Tensor:
            def more(start: int, stop: int) -> dict[str, torch.Tensor]:
                masked = {} if start and only_first_masked else {"attention_mask": mask[:, :stop]}
                return masked if places is None else masked | {"position_ids": places[:, start:stop]}

            return self.in_parts(padded, sizes, more=more)[0]

        yield feed(None)
        with contextlib.suppress(TypeError):
            yield feed(_places(mask))
            after_its_id = (getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0) + 1
            yield feed(_places(mask) + after_its_id)
        if not takes(self.model, "position_ids"):
            yield feed(None, only_first_masked=True)

    def _with_padding(self, ids: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not takes(self.model, "attention_mask"):
            raise NoCache("takes no attention mask")
        padded = torch.cat([ids[:, :at], ids.new_zeros(1, PADDING), ids[:, at:]], 1)
        mask = torch.ones_like(padded)
        mask[:, at : at + PADDING] = 0
        return padded, mask

    def with_positions(self, ids: torch.Tensor, half: int, ones: list[int]) -> Compared:
        """Feed a text part by part with its positions, and at once with the same positions."""
        if not takes(self.model, "position_ids"):
            raise NoCache("takes no position_ids")
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        found, _ = self.in_parts(ids, [half, *ones], more=lambda start, stop: {"position_ids": places[:, start:stop]})
        return self.full(ids, position_ids=places), found

    def reordered(self, ids: torch.Tensor, half: int, ones: list[int]) -> torch.Tensor:
        """Let two beams change places in a cache, and go on with the one that the other began."""
        first, cache = self.in_parts(torch.cat([ids[:, :half].flip(1), ids[:, :half]]), [half])
        if not hasattr(cache, "reorder_cache"):
            raise NoCache(f"cannot be reordered: its cache is {self.kind}")
        cache.reorder_cache(torch.tensor([1, 0], device=ids.device))
        rest = torch.cat([ids[:, half:], ids[:, half:].flip(1)])
        return torch.cat([first[1:], self.in_parts(rest, ones, cache)[0][:1]], 1)

    def rolled_back(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed two right and two wrong tokens at a time, and roll the wrong ones back, as speculation does."""
        logits, cache = self._croppable(ids)
        for part in ids[:, FILLED:].split(2, 1):
            # The tokens of the beginning are wrong there.
            drafted = torch.cat([part, ids[:, :2]], 1)
            logits = torch.cat([logits, self.in_parts(drafted, [drafted.shape[1]], cache)[0][:, : part.shape[1]]], 1)
            cache.crop(-2)
        return logits

    def _croppable(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Fill a cache that can be cropped."""
        self._needs_dynamic("cannot be cropped: ")
        first, cache = self.in_parts(ids[:, :FILLED], [FILLED], older.dynamic_cache(self.model.config))
        if not all(getattr(layer, "is_croppable", True) for layer in getattr(cache, "layers", ())):
            raise NoCache("cannot be cropped: it holds a recurrent state")
        if older.REMEMBERS:
            cache.activate_past_recording()
        return first, cache

    def cropped(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed a few wrong tokens, crop them away, and go on."""
        first, cache = self._croppable(ids)
        self.in_parts(ids[:, :WRONG], [WRONG], cache)
        cache.crop(-WRONG)
        for part in ids[:, FILLED:].split(3, 1):
            first = torch.cat([first, self.in_parts(part, [part.shape[1]], cache)[0]], 1)
            if older.REMEMBERS:
                cache.crop(0)
        return first

    def copied(self, ids: torch.Tensor, half: int, ones: list[int]) -> torch.Tensor:
        """Continue a copy of a filled cache with other tokens, then the cache itself with the text's own."""
        first, cache = self.in_parts(ids[:, :half], [half])
        self.in_parts(ids[:, half:].flip(1), ones, copy.deepcopy(cache))
        return torch.cat([first, self.in_parts(ids[:, half:], ones, cache)[0]], 1)

    def across(self, ids: torch.Tensor, start: int) -> Compared:
        """Fill a cache with so many tokens, go on token by token, and run each of these lengths at once."""
        lengths = range(start + 1, ids.shape[1] + 1)
        # The last token's logits alone: those of a long text would take more memory than the model.  Some classes hand
        # it on without naming it, or compute all of them all the same.
        kept = {"logits_to_keep": 1} if takes(self.model, "logits_to_keep") else {}
        expected = [self.full(ids[:, :length], **kept)[:, -1:] for length in lengths]
        _, cache = self.in_parts(ids[:, :start], [start])
        # Fed on what each call returns: older caches are tuples, which do not grow in place.
        return torch.cat(expected, 1), self.in_parts(ids[:, start:], [1] * len(lengths), cache)[0]

    # What `generate` does.

    def _generate(self, ids: torch.Tensor, new: int, **options: Any) -> Any:
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            num_beams=1, pad_token_id=0, output_logits=True, return_dict_in_generate=True, disable_compile=True,
            **options,
        )

    def generated_with(self, ids: torch.Tensor, kind: str) -> Compared:
        """Let ``generate`` write with one of its kinds of caches."""
        if "offloaded" in kind and ids.device.type == "cpu":
            raise NoCache("offloading is from a GPU to the host")
        return self._generated(ids, cache_implementation=kind)

    def _generated(self, ids: torch.Tensor, **options: Any) -> Compared:
        """Let ``generate`` write, and run what it wrote at once."""

        def write(**options: Any) -> Compared:
            written = self._generate(ids, NEW, **options)
            return self.full(written.sequences[:, :-1])[:, -NEW:], torch.stack(written.logits, 1)

        compared = write(**options)
        if not self.agree(*compared) and not self.agree(*write(use_cache=False)):
            why = "it passes other positions or masks"
            raise NoCache(f"generate() without a cache differs from a direct call too: {why}")
        return compared

    def generated_on_its_prompt(self, ids: torch.Tensor) -> Compared:
        """Let ``generate`` write after a prompt that the cache holds whole."""
        self._needs_dynamic("")
        cache = self.in_parts(ids, [ids.shape[1]])[1]
        if not older.held(cache, 0):
            raise NoCache("its cache does not count tokens")
        compared = self._generated(ids, **{self.name: cache})
        if older.held(cache, 0) > ids.shape[1] + NEW:
            raise NoCache("generate() feeds the whole prompt a second time: crop the cache by one token first")
        return compared

    def onto_its_own_prompt(self, ids: torch.Tensor) -> torch.Tensor:
        """Let ``generate`` write a token after a prompt that the cache holds whole; `refed` counts what it feeds.

        Of the logits the last are those that ``generate`` chose by, the others those of the pass that filled the cache.
        """
        self._needs_dynamic("takes no filled cache in generate: ")
        filled, cache = self.in_parts(ids, [ids.shape[1]])
        counts: list[int] = []
        with self.model.register_forward_pre_hook(
            lambda _, __, given: counts.append(given["input_ids"].shape[1]), with_kwargs=True
        ):
            written = self._generate(ids, 1, **{self.name: cache})
        self.refed = counts[0]
        return torch.cat([filled[:, :-1], written.logits[0][:, None]], 1)


def _nearest(tried: Iterable[Compared]) -> Compared:
    """Return the pair that is nearest; the first that is equal in every bit ends the search."""
    found = {}
    for pair in tried:
        drift = largest_drift(*pair)
        found.setdefault(float("inf") if math.isnan(drift) else drift, pair)
        if drift == 0:
            break
    return found[min(found)]


def _without(logits: torch.Tensor, at: int) -> torch.Tensor:
    """Leave out the logits of the padding."""
    return torch.cat([logits[:, :at], logits[:, at + PADDING :]], 1)


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Count positions from the first real token."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
