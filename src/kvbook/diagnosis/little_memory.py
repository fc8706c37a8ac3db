"""`kvbook check --memory`: the weights are streamed, all dtypes are measured at once, and rows are as without it."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvbook import UserError, fingerprint, paths, progress
from kvbook.diagnosis import layerwise
from kvbook.diagnosis.kept_calls import KeptCalls
from kvbook.diagnosis.settings import CheckSettings
from kvbook.measuring import costs, in_fp64
from kvbook.models import corpus, loading, placement, sources, streamed

# Parameters from which on time and memory are said before anything is loaded.
LARGE = 1e9

Rows = list[dict[str, Any]]


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
    dtypes : list of str
        Those that fit.
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
        self.dtypes, self.left_out, n_tokens = [], {}, sum(len(text.ids) for text in texts)
        for dtype in planned:
            if len(self.dtypes) < wanted:
                try:
                    placement.dtype_on(dtype, torch.device("cpu"))
                    costs.check_streamed(config, [*self.dtypes, dtype], n_tokens, settings.memory)
                    self.dtypes.append(dtype)
                except UserError as error:
                    self.left_out[dtype] = error
        needed = costs.streamed_bytes(config, self.dtypes, n_tokens) if self.dtypes else 0
        if loading.parameter_count(config) > LARGE:
            progress.note(f"{', '.join(self.dtypes)} at once take about {needed / 1e9:.1f} GB")
        source = streamed.source_of(sources.resolve(settings.model, settings.weights), settings.seed)
        self._models = {dtype: streamed.Streamed(config, getattr(torch, dtype), source) for dtype in self.dtypes}
        self._files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.all_files()]
        self.experts_apart = "float64" in self._models and in_fp64.experts_one_by_one(self._models["float64"].model)
        self._found: dict[str, dict[str, Rows]] = {}
        self.by_steps = False

    def model(self, dtype: str) -> PreTrainedModel:
        """Return the model in a dtype, which loads its parts when they are run."""
        if dtype in self.left_out:
            raise self.left_out[dtype]
        return self._models[dtype].model

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all weights, part by part."""
        one = self._models[dtype]
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
            except layerwise.NotLayerByLayer as error:
                self.by_steps = True
                progress.note(f"every call reads all weights ({error}); this takes long")
            for each in self._models.values():
                each.run = each.on_demand
        return None if self.by_steps else self._found[called][dtype]

    def _measured(self, *called: dict[str, Any]) -> None:
        one = next(iter(self._models.values()))
        if getattr(one.model.config.get_text_config(), "use_cache", None) is False:
            # Switched off: the check will ask what the cache would have done, and all weights are read once for both.
            called = ({}, {"use_cache": True})
        sizes = {part: sum(value.numel() for value in module.parameters()) for part, module in one.parts.items()}
        work = progress.Work(sum(sizes.values()), "check, layer by layer")
        about = [self._asked.model_dump(), self._files, self.dtypes, called, [text.ids for text in self._texts]]
        named = fingerprint.of_values([*about, torch.__version__, torch.get_num_threads()])[:16]
        kept = KeptCalls(paths.BUILD / "check" / f"{named}.safetensors")
        try:
            found = layerwise.rows_of(
                self._models, self._texts, self._asked.seed, lambda part: work.advance(sizes.pop(part, 0)), kept,
                *called,
            )
        except KeyboardInterrupt:
            if kept.file.is_file():
                progress.note("the same command goes on from here")
            raise
        self._found |= zip(map(str, called), found, strict=True)

