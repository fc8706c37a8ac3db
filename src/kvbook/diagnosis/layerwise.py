"""`kvbook check --memory`: rows as without it from streamed weights, all calls of one layer before the next is loaded.

Each call is the model's own forward.  It runs to the first part whose weights are not there and stops.  When they are,
it is run again from its start, with the outputs that the earlier parts gave.  So glue code between layers needs no
knowledge of ours, and every part computes once.

A call on a filled cache begins before the calls before it have reached the last layer.  Until a layer is reached, the
cache that the model sees has the right lengths and no numbers; the layers get the true one.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree
from transformers import Cache, PretrainedConfig

from kvbook import UserError, fingerprint, older, paths, progress
from kvbook.diagnosis import CheckSettings, feeding, kept_calls, probe
from kvbook.measuring import costs, in_fp64
from kvbook.models import corpus, loading, placement, sources, streamed

# Layers of a cache whose lengths follow from the tokens alone.
_FORESEEN = ("DynamicLayer", "DynamicSlidingWindowLayer")
# Parameters from which on time and memory are said before anything is loaded.
LARGE = 1e9

Rows = list[dict[str, Any]]


class NotLayerByLayer(Exception):
    """An architecture whose layers cannot be run for all calls at once; the message says why."""


class _Stopped(BaseException):
    """The part that comes next is not loaded; no error, so that nothing handles it on the way."""


@dataclass
class Chain:
    """What the calls on one cache share.

    Attributes
    ----------
    empty, cache : Cache or None
        As the first call makes it, and as layers fill it.
    filled : list of dict
        What its layers held when an earlier run was stopped.
    """

    empty: Cache | None = None
    cache: Cache | None = None
    filled: list[dict[str, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """One call of a model.

    Attributes
    ----------
    ids : Tensor of int64, shape (n_texts, n_tokens)
        What is fed.
    options : dict
        Further arguments.
    keeps : callable
        What is wanted of what the model returns.
    chain : Chain
        The cache that it takes part in; one of its own for a call without a cache.
    before : list of Call
        The calls before it on that cache.
    outputs : list of pairs
        Name and output of each part that has run.
    waits_for : str or None
        The part that comes next.
    result : object
        What it keeps; None until it has ended.
    seen : Cache or None
        What the model sees of the cache, right in its lengths alone.
    """

    ids: torch.Tensor
    options: dict[str, Any]
    keeps: Callable[[Any], Any] = bool
    chain: Chain = field(default_factory=Chain)
    before: list["Call"] = field(default_factory=list)
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    waits_for: str | None = None
    result: Any = None
    seen: Cache | None = None

    @property
    def is_ready(self) -> bool:
        """Tell whether it has reached a layer, and so shown its cache."""
        parts = [*(part for part, _ in self.outputs), self.waits_for or ""]
        return self.result is not None or any(map(streamed.is_layer, parts))

    def fed_before(self) -> list[torch.Tensor]:
        """Return what the earlier calls fed to the same cache."""
        return [call.ids for call in self.before]


class Runner:
    """Runs calls of a model in one dtype as far as the parts that are loaded allow.

    Parameters
    ----------
    one : Streamed
        The model.
    """

    def __init__(self, one: streamed.Streamed) -> None:
        self.streamed, self.calls = one, []
        self.name = feeding.cache_name(one.model)

    def next_part(self) -> str | None:
        """Name the part that the call which is least far waits for; None where all have ended."""
        for call in self.calls:
            if call.result is None and call.waits_for is None:
                self._advance(call, None)
        waiting = [call for call in self.calls if call.result is None and call.waits_for]
        return min(waiting, key=lambda call: len(call.outputs)).waits_for if waiting else None

    def run(self, part: str) -> None:
        """Run a part for all calls that wait for it, in their order."""
        far = self._far()
        with self.streamed.holding(part):
            for call in self.calls:
                if call.result is None and call.waits_for in (part, None):
                    self._advance(call, part)
        if self._far() == far:
            raise NotLayerByLayer(f"its calls wait for one another at {part}")

    def _far(self) -> int:
        return sum(len(call.outputs) + (call.result is not None) for call in self.calls)

    def _advance(self, call: Call, loaded: str | None) -> None:
        if call.before and not call.before[0].is_ready:
            return
        self.streamed.run = functools.partial(self._part, call, loaded, iter(list(call.outputs)))
        model = self.streamed.model
        given = dict(call.options)
        if call.before:
            # A cache that has the lengths which the calls before leave.
            if call.seen is None and call.chain.empty is not None:
                call.seen = self._filled(call.chain.empty, call.fed_before())
            given[self.name] = call.seen
        with contextlib.suppress(_Stopped), torch.inference_mode(), in_fp64.widened(self.streamed.dtype):
            self._end(call, model(call.ids, **given))

    def _part(
        self, call: Call, loaded: str | None, earlier: Iterator, part: str, forward: Callable[..., Any], given: tuple,
        named: dict[str, Any],
    ) -> Any:
        """Return what a part returned before, run it, or stop where it is not loaded."""
        if known := next(earlier, None):
            name, output = known
            if name != part:
                raise NotLayerByLayer(f"{part} came where {name} had come before")
            return _copied(output)
        if streamed.is_layer(part):
            self._look_at_cache(call, (*given, *named.values()))
        if part != loaded:
            call.waits_for = part
            raise _Stopped
        given = tuple(self._true(call, value) for value in given)
        named = {name: self._true(call, value) for name, value in named.items()}
        output = forward(*given, **named)
        call.outputs.append((part, _copied(output)))
        return output

    def _look_at_cache(self, call: Call, values: tuple) -> None:
        found = next((value for value in values if isinstance(value, Cache)), None)
        if found is None or call.before or call.chain.empty is not None:
            return
        kinds = [type(layer).__name__ for layer in getattr(found, "layers", ())]
        unknown = [kind for kind in kinds if kind not in _FORESEEN]
        if unknown or not hasattr(found, "layers"):
            raise NotLayerByLayer(f"its cache holds {unknown[0] if unknown else 'no layers'}")
        call.chain.empty, call.chain.cache = copy.deepcopy(found), found
        for layer, state in zip(found.layers, call.chain.filled, strict=False):
            vars(layer).update(state)

    def _true(self, call: Call, value: Any) -> Any:
        return call.chain.cache if isinstance(value, Cache) else value

    def _filled(self, empty: Cache, fed: list[torch.Tensor]) -> Cache:
        cache = copy.deepcopy(empty)
        n_layers = len(cache.layers) or self.streamed.model.config.get_text_config().num_hidden_layers
        for ids in fed:
            nothing = torch.zeros(ids.shape[0], 1, ids.shape[1], 1, dtype=self.streamed.dtype)
            for layer in range(n_layers):
                cache.update(nothing, nothing, layer)
        return cache

    def _end(self, call: Call, output: Any) -> None:
        call.result, call.waits_for, call.outputs = call.keeps(output), None, []
        if (output.get(self.name) is None) != (call.chain.cache is None):
            raise NotLayerByLayer("its layers do not take the cache that it returns")
        if call.chain.cache is not None and not any(call in other.before for other in self.calls):
            foreseen = self._filled(call.chain.empty, [*call.fed_before(), call.ids]).layers
            pairs = zip(foreseen, call.chain.cache.layers, strict=True)
            if any(one.get_seq_length() != other.get_seq_length() for one, other in pairs):
                raise NotLayerByLayer("its cache has other lengths than were foreseen")


def _copied(output: Any) -> Any:
    return _pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, output)


def _planned(runner: Runner, ids: torch.Tensor, sizes: list[int], options: dict[str, Any]) -> Call:
    """Add the calls of one execution path on one batch; return the last."""
    chain, first = Chain(), len(runner.calls)
    for part in ids.split(sizes, 1):
        runner.calls.append(Call(part, options, chain=chain, before=runner.calls[first:]))
    last = runner.calls[-1]
    last.options, last.keeps = options | {"output_hidden_states": True}, probe.last_tokens
    return last


def rows_of(
    models: dict[str, streamed.Streamed], texts: list[corpus.Sample], seed: int, done: Callable[[str], None],
    kept: kept_calls.KeptCalls, *called: dict[str, Any],
) -> list[dict[str, list[dict[str, Any]]]]:
    """Measure what `kvbook.diagnosis.probe.rows_of` measures, in several dtypes and with several options at once."""
    runners = {dtype: Runner(each) for dtype, each in models.items()}
    plan = []
    for dtype, runner in runners.items():
        for batch in probe.in_batches(texts, probe.TOGETHER):
            ids = torch.tensor([text.ids for text in batch])
            full = Call(ids, {"use_cache": False, "output_hidden_states": True}, probe.last_tokens)
            runner.calls.append(full)
            for place, options in enumerate(called):
                generator = np.random.default_rng([seed, batch[0].index])
                for way in probe.WAYS:
                    last = _planned(runner, ids, probe.CUTS[way](ids.shape[1], generator), options)
                    plan.append((place, dtype, batch, way, full, last))
    calls = [call for runner in runners.values() for call in runner.calls]
    kept.restore(calls)
    # All dtypes of a part one after the other.
    while parts := [part for runner in runners.values() if (part := runner.next_part())]:
        for runner in runners.values():
            if runner.next_part() == parts[0]:
                runner.run(parts[0])
        done(parts[0])
        kept.save(calls)
    kept.file.unlink(missing_ok=True)
    found = [{dtype: [] for dtype in models} for _ in called]
    for place, dtype, batch, way, full, last in plan:
        fed = sum(part.shape[1] for part in last.fed_before())
        held = 0 if last.seen is None else older.held(last.seen, fed)
        found[place][dtype] += probe.as_rows(dtype, batch, probe.compared(way, full.result, last.result, held, fed))
    return found


class LittleMemory:
    """The models of a check in all its dtypes, each with one part of its weights in memory at a time.

    Parameters
    ----------
    settings : CheckSettings
        Of the check.
    config : PretrainedConfig
        Of the model.
    texts : list of Sample
        Of the check.
    planned, wanted
        The dtypes in the order of trying, and how many of them.

    Attributes
    ----------
    models : dict of str to Streamed
        By the dtypes that fit; each loads its parts when they are run.
    left_out : dict of str to UserError
        Those that do not, tried first.
    experts_apart : bool
        Whether experts run one after the other in float64.
    """

    def __init__(
        self, settings: CheckSettings, config: PretrainedConfig, texts: list[corpus.Sample], planned: tuple[str, ...],
        wanted: int,
    ) -> None:
        streamed.check(config, settings.device)
        self._asked, self._texts = settings, texts
        dtypes, self.left_out, n_tokens = [], {}, sum(len(text.ids) for text in texts)
        for dtype in planned:
            if len(dtypes) < wanted:
                try:
                    placement.dtype_on(dtype, torch.device("cpu"))
                    costs.check_streamed(config, [*dtypes, dtype], n_tokens, settings.memory)
                    dtypes.append(dtype)
                except UserError as error:
                    self.left_out[dtype] = error
        if dtypes and loading.parameter_count(config) > LARGE:
            needed = costs.streamed_bytes(config, dtypes, n_tokens)
            progress.note(f"{', '.join(dtypes)} at once take about {needed / 1e9:.1f} GB")
        source = streamed.source_of(sources.resolve(settings.model, settings.weights), settings.seed)
        self.models = {dtype: streamed.Streamed(config, getattr(torch, dtype), source) for dtype in dtypes}
        self._files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.all_files()]
        self.experts_apart = "float64" in self.models and in_fp64.experts_one_by_one(self.models["float64"].model)
        self._found: dict[str, dict[str, Rows]] = {}
        self.by_steps = False

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all weights, part by part."""
        one = self.models[dtype]
        for part, module in one.parts.items():
            with one.holding(part):
                for name, value in module.named_parameters():
                    yield f"{part}.{name}", value

    def rows(self, dtype: str, **options: Any) -> Rows | None:
        """Return what was measured layer by layer in a dtype; None where the architecture does not allow that."""
        called = str(options)
        if called not in self._found and not self.by_steps:
            try:
                self._measured(options)
            except NotLayerByLayer as error:
                self.by_steps = True
                progress.note(f"every call reads all weights ({error}); this takes long")
            for each in self.models.values():
                each.run = each.on_demand
        return None if self.by_steps else self._found[called][dtype]

    def _measured(self, *called: dict[str, Any]) -> None:
        one = next(iter(self.models.values()))
        if getattr(one.model.config.get_text_config(), "use_cache", None) is False:
            # Switched off: the check will ask what the cache would have done, and all weights are read once for both.
            called = ({}, {"use_cache": True})
        sizes = {part: sum(value.numel() for value in module.parameters()) for part, module in one.parts.items()}
        work = progress.TimeLeft(sum(sizes.values()), "check, layer by layer")
        about = [self._asked.model_dump(), self._files, list(self.models), called, [text.ids for text in self._texts]]
        named = fingerprint.of_values([*about, torch.__version__, torch.get_num_threads()])[:16]
        kept = kept_calls.KeptCalls(paths.BUILD / "check" / f"{named}.safetensors")
        try:
            found = rows_of(
                self.models, self._texts, self._asked.seed, lambda part: work.advance(sizes.pop(part, 0)), kept,
                *called,
            )
        except KeyboardInterrupt:
            if kept.file.is_file():
                progress.note("the same command goes on from here")
            raise
        self._found |= zip(map(str, called), found, strict=True)

