"""Feeding a model the same tokens in different ways, whatever its class calls its cache."""

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvbook import older
from kvbook.diagnosis import verdict
from kvbook.diagnosis.execution_paths import NoCache
from kvbook.diagnosis.outcome import PADDING_COUNTS
from kvbook.measuring import agreement

# What classes call the cache that they return, and take back under the same name.
_NAMES = ("past_key_values", "cache_params", "state", "past_buckets_states", "mems")
# Tokens of padding before a text, and of what `generate` writes.
PADDING, NEW = 3, 6

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
    taken = inspect.signature(model.forward).parameters
    try:
        output = model(ids, use_cache=True)
    except Exception as error:
        # Some class may run without a cache and not with one.
        model(ids, use_cache=False)
        return Fed(model, None, f"raises {type(error).__name__}")
    # An empty cache that a class passes through is none.
    name = next((name for name in _NAMES if output.get(name) is not None and name in taken), None)
    return Fed(model, name, "none" if name is None else type(output[name]).__name__)


def held(cache: object) -> int | None:
    """Count the tokens that a cache holds; None where it does not count them, as one of recurrent states alone."""
    try:
        return int(cache.get_seq_length()) if isinstance(cache, Cache) else None
    except ValueError:
        return None


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
    """

    model: PreTrainedModel
    name: str | None = "past_key_values"
    kind: str = "DynamicCache"

    def agree(self, expected: torch.Tensor, found: torch.Tensor) -> bool:
        """Tell whether two passes differ by rounding at most, in the coarser dtype: some logits are always fp32."""
        coarser = max(expected.dtype, self.model.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return is_small(largest_drift(expected, found), coarser)

    def full(self, ids: torch.Tensor, **options: torch.Tensor | int) -> torch.Tensor:
        """Run one pass without a cache."""
        return self.model(ids, use_cache=False, **options).logits

    def _last(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last token's logits alone; those of a long text would take more memory than the model."""
        # Some classes hand it on without naming it, or compute all of them all the same.
        kept = {"logits_to_keep": 1} if self._takes("logits_to_keep") else {}
        return self.full(ids, **kept)[:, -1:]

    def _takes(self, name: str) -> bool:
        return takes(self.model, name)

    def _needs_dynamic(self, lacks: str) -> None:
        if self.name is None or not self.kind.endswith("DynamicCache"):
            raise NoCache(f"{lacks}its cache is {self.kind}")

    def in_parts(
        self, ids: torch.Tensor, sizes: list[int], cache: Any = None,
        more: Callable[[int, int], dict[str, torch.Tensor]] = lambda _start, _stop: {},
    ) -> tuple[torch.Tensor, Any]:
        """Feed tokens part by part on top of a cache; return the logits and the cache.

        `more` returns further arguments for the part from one place to another.
        """
        if self.name is None:
            # Where a cache cannot even be asked for, this raises the error again.
            self.model(ids, use_cache=True)
            raise NoCache("no cache is returned")
        parts, stop = [], 0
        # Before release 5.4, some recurrent classes do not find out by themselves where a part begins.
        counted = cache is None and self._takes("cache_position")
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

    def in_batch(self, ids: torch.Tensor) -> torch.Tensor:
        """Run a text at once, as the middle one of three."""
        return self.full(torch.cat([ids.flip(1), ids, ids.roll(1, 1)]))[1:2]

    def left_padded(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed the padded text with positions from the first real token, or as the class finds them by itself.

        Classes of absolute positions count the padding, or know it by its id; each is given what it expects, if
        anything is.
        """
        padded, mask = self._with_padding(ids)
        expected = self.full(ids)
        found = [self.full(padded, attention_mask=mask)]
        # Some classes hand them on without naming them.
        with contextlib.suppress(TypeError):
            found.append(self.full(padded, attention_mask=mask, position_ids=_places(mask)))
        found = [logits[:, PADDING:] for logits in found]
        return min(found, key=lambda logits: (logits - expected).abs().max().nan_to_num(torch.inf).item())

    def left_padded_in_parts(self, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Feed a padded text part by part onto a cache, its mask and positions growing with it, as ``generate`` does.

        Some classes count positions from the mask by themselves, or start after the padding's id; those without
        positions want the mask in the first call alone.  Each is given what it expects, if anything is.
        """
        if self.name is None:
            # Says why there is none.
            self.in_parts(ids, sizes)
        padded, mask = self._with_padding(ids)
        expected = self.full(ids)
        if not self.agree(expected, self.left_padded(ids)):
            raise NoCache(PADDING_COUNTS)

        def feed(places: torch.Tensor | None, only_first_masked: bool = False) -> torch.Tensor:
            def more(start: int, stop: int) -> dict[str, torch.Tensor]:
                masked = {} if start and only_first_masked else {"attention_mask": mask[:, :stop]}
                return masked if places is None else masked | {"position_ids": places[:, start:stop]}

            return self.in_parts(padded, [PADDING + sizes[0], *sizes[1:]], more=more)[0][:, PADDING:]

        tried = [feed(None)]
        if not self._takes("position_ids"):
            tried.append(feed(None, only_first_masked=True))
        # Some classes hand them on without naming them.
        with contextlib.suppress(TypeError):
            after_its_id = (getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0) + 1
            tried += [feed(_places(mask)), feed(_places(mask) + after_its_id)]
        return min(tried, key=lambda logits: largest_drift(expected, logits))

    def _with_padding(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._takes("attention_mask"):
            raise NoCache("takes no attention mask")
        padded = torch.cat([ids.new_zeros(1, PADDING), ids], 1)
        mask = torch.ones_like(padded)
        mask[:, :PADDING] = 0
        return padded, mask

    def cropped(self, ids: torch.Tensor, at: int, wrong: int) -> torch.Tensor:
        """Feed a few wrong tokens after so many right ones, crop them away, and go on."""
        if not self.kind.endswith("DynamicCache"):
            raise NoCache(f"cannot be cropped: its cache is {self.kind}")
        first, cache = self.in_parts(ids[:, :at], [at], older.dynamic_cache(self.model.config))
        if not all(getattr(layer, "is_croppable", True) for layer in getattr(cache, "layers", ())):
            raise NoCache("cannot be cropped: it holds a recurrent state")
        if older.REMEMBERS:
            cache.activate_past_recording()
        self.in_parts(ids[:, :wrong], [wrong], cache)
        cache.crop(-wrong)
        for part in ids[:, at:].split(3, 1):
            first = torch.cat([first, self.in_parts(part, [part.shape[1]], cache)[0]], 1)
            if older.REMEMBERS:
                cache.crop(0)
        return first

    def copied(self, ids: torch.Tensor) -> torch.Tensor:
        """Continue a copy of a filled cache with other tokens, then the cache itself with the text's own."""
        half = ids.shape[1] // 2
        steps = [1] * (ids.shape[1] - half)
        first, cache = self.in_parts(ids[:, :half], [half])
        self.in_parts(ids[:, :half].flip(1), steps, copy.deepcopy(cache))
        return torch.cat([first, self.in_parts(ids[:, half:], steps, cache)[0]], 1)

    def across(self, ids: torch.Tensor, start: int) -> Compared:
        """Fill a cache with so many tokens, go on token by token, and run each of these lengths at once."""
        lengths = range(start + 1, ids.shape[1] + 1)
        expected = [self._last(ids[:, :length]) for length in lengths]
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
        if not held(cache):
            raise NoCache("its cache does not count tokens")
        compared = self._generated(ids, **{self.name: cache})
        if (held(cache) or 0) > ids.shape[1] + NEW:
            raise NoCache("generate() feeds the whole prompt a second time: crop the cache by one token first")
        return compared

    def onto_its_own_prompt(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Let ``generate`` write a token after a prompt that the cache holds whole; count the tokens that it feeds.

        Of the logits the last are those that ``generate`` chose by, the others those of the pass that filled the cache.
        """
        self._needs_dynamic("takes no filled cache in generate: ")
        filled, cache = self.in_parts(ids, [ids.shape[1]])
        counts: list[int] = []
        with self.model.register_forward_pre_hook(
            lambda _, __, given: counts.append(given["input_ids"].shape[1]), with_kwargs=True
        ):
            written = self._generate(ids, 1, **{self.name: cache})
        return torch.cat([filled[:, :-1], written.logits[0][:, None]], 1), counts[0]


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Count positions from the first real token."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
