"""The tool that says of a checkpoint whether its cache is exact, within rounding, or wrong.

It runs the checkpoint as it is, at every roundoff that fits, and says in a few lines what it found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbook import progress
from kvbook.diagnosis import probe, verdict
from kvbook.diagnosis.settings import CheckSettings
from kvbook.errors import UserError
from kvbook.measuring import caches
from kvbook.measuring.agreement import UNIT_ROUNDOFF
from kvbook.models import corpus, hub, loading

# Exit statuses.
SOUND, BUG, COULD_NOT = 0, 1, 2

_NO_CACHE = (
    "no cache was returned: use_cache is false in the configuration, as it is by default in MPT's, so that what is fed next\n"
    '  has no context; pass use_cache=True in the call, or write "use_cache": true into config.json\n'
    "  (generate() asks for a cache by itself, and so does not show this)"
)
_NO_CACHE_ANYWAY = (
    "no cache was returned, though the configuration asks for one: look at what the model's forward returns"
)


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes
    ----------
    lines : list of str
        To be printed.
    status : int
        0 for rounding or exact, 1 for a bug, 2 where nothing was decided.
    finding : Finding
        The verdict that counts.
    """

    lines: list[str]
    status: int
    finding: verdict.Finding


def samples_of(
    tokenizer: PreTrainedTokenizerBase, corpus_name: str, n_samples: int, n_tokens: int
) -> list[corpus.Sample]:
    """Cut the texts of a check.

    Raises
    ------
    UserError
        When the corpus holds too few, or a text is too short to be fed in parts.
    """
    found = list(corpus.samples(corpus_name, tokenizer, n_samples, n_tokens))
    if short := [sample for sample in found if len(sample.ids) < probe.SHORTEST]:
        raise UserError(
            f"{short[0].source} has {len(short[0].ids)} tokens, fewer than {probe.SHORTEST}: name a folder of longer texts"
        )
    return found


def rows_of(
    model: PreTrainedModel,
    dtype: str,
    texts: list[corpus.Sample],
    seed: int = 0,
    ways: tuple[str, ...] = probe.WAYS,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Measure one dtype.

    Parameters
    ----------
    model : PreTrainedModel
        In that dtype.
    dtype : str
        Its name.
    texts : list of Sample
        What is fed.
    seed : int
        Of the places at which texts fall in two.
    ways : tuple of str
        Among `probe.WAYS`.
    **options
        Of every call on the cached side.

    Yields
    ------
    dict
        ``dtype``, ``source``, ``sample``, ``way``, ``drift``, ``layers`` (list of float), ``held``, ``fed``, ``alone``.
    """
    for text in texts:
        ids = torch.tensor([text.ids], device=model.device)
        generator = np.random.default_rng([seed, text.index])
        for reading in probe.readings(model, ids, ids, generator, ways, **options):
            yield {"dtype": dtype, "source": text.source, "sample": text.index, **vars(reading)}


def suspicious_layer(rows: pd.DataFrame) -> int | None:
    """Find the first place in the model whose drift is no rounding, in the finest dtype that is there.

    Parameters
    ----------
    rows : DataFrame
        From `rows_of`; where no state is beyond `verdict.LIMIT`, that with the largest step up from the one before.

    Returns
    -------
    int or None
        0 for what is behind the embedding, l for what is behind layer l; None where all states agree to the bit.
    """
    dtype = next(name for name in UNIT_ROUNDOFF if name in set(rows["dtype"]))
    roundoff = UNIT_ROUNDOFF[dtype]
    layers = np.array(rows.loc[rows["dtype"] == dtype, "layers"].tolist()).max(0)
    if not layers.any():
        return None
    beyond = np.flatnonzero(~(layers <= verdict.LIMIT * roundoff))
    if len(beyond):
        return int(beyond[0])
    return int(np.argmax(np.diff(np.log(np.maximum(layers, roundoff)), prepend=np.log(roundoff))))


def _worst(rows: pd.DataFrame, seed: int) -> tuple[str, verdict.Finding]:
    order: tuple[verdict.Kind, ...] = ("exact", "rounding", "undecided", "bug")
    found = {way: verdict.judge(part, seed) for way, part in rows.groupby("way", sort=False)}

    def badness(way: str) -> tuple[int, float]:
        # Of the same kind the way with the largest drift in its finest dtype.
        return order.index(found[way].kind), next(iter(found[way].drift.values()), 0.0)

    worst = max(found, key=badness)
    return worst, found[worst]


def _place(layer: int, layers: int) -> str:
    return "the embedding, before layer 1" if layer == 0 else f"layer {layer} of {layers}"


def _numbers(finding: verdict.Finding) -> list[str]:
    lines = [
        f"  {dtype:9s} {drift:8.1e}   largest {finding.roundoffs[dtype]:8.2g} roundoffs"
        for dtype, drift in finding.drift.items()
    ]
    return lines + [f"  {dtype:9s} left out: {why}" for dtype, why in finding.left_out.items()]


def report(rows: pd.DataFrame, about: dict[str, Any], seed: int, again: pd.DataFrame | None = None) -> Report:
    """Put the rows of a check into words.

    Parameters
    ----------
    rows : DataFrame
        From `rows_of`, all dtypes.
    about : dict
        ``model``, ``device``, ``use_cache`` (of the configuration), ``left_out`` (dtype to reason), ``texts``.
    seed : int
        Of the bootstrap.
    again : DataFrame, optional
        The same with the cache asked for, where none came back.
    """
    way, finding = _worst(rows, seed)
    judged = f"{finding.kind}: {finding.why}"
    lines = [
        f"model     {about['model']}, on {about['device']}; {about['texts']}",
        f"verdict   {judged}",
        f"drift of the last token's logits over their spread, full pass against cache ({way}), mean over texts:",
        *_numbers(finding),
        *(f"  {dtype:9s} left out: {why}" for dtype, why in about["left_out"].items()),
    ]
    if finding.slope is not None and "slope" not in finding.why:
        lines.append(f"slope     {verdict.written(finding.slope)} on log-log axes: rounding has 1, a bug has 0")
    if finding.kind == "bug":
        layer = suspicious_layer(rows[rows["way"] == way])
        place = "none: the hidden states agree" if layer is None else _place(layer, len(rows["layers"].iloc[0]) - 1)
        lines.append(f"first suspicious layer: {place}")
        lines += _how(rows, seed)
        lines += _hint(rows, about, again, seed)
    elif finding.kind != "undecided":
        lines.append("first suspicious layer: none")
    status = {"exact": SOUND, "rounding": SOUND, "bug": BUG, "undecided": COULD_NOT}[finding.kind]
    return Report(lines, status, finding)


def _how(rows: pd.DataFrame, seed: int) -> list[str]:
    kinds = {way: verdict.judge(part, seed).kind for way, part in rows.groupby("way", sort=False)}
    return ["ways      " + "; ".join(f"{way}: {kind}" for way, kind in kinds.items())]


def _hint(rows: pd.DataFrame, about: dict[str, Any], again: pd.DataFrame | None, seed: int) -> list[str]:
    if (rows["held"] == 0).all():
        lines = ["cause     " + (_NO_CACHE_ANYWAY if about["use_cache"] else _NO_CACHE)]
        if again is not None:
            lines.append(f"with use_cache=True: {_worst(again, seed)[1].kind}")
        return lines
    if (short := rows[rows["held"] != rows["fed"]]).size:
        first = short.iloc[0]
        return [f"cause     the cache held {first['held']} tokens where {first['fed']} had been fed ({first['way']})"]
    return [
        "look at   positions, mask, and what the cache hands to attention, in that layer and on the first call with a cache"
    ]


def _reason(error: UserError) -> str:
    return str(error).split(": leave ")[0].split(": this check ")[0]


def check(settings: CheckSettings) -> Report:
    """Check a checkpoint.

    Parameters
    ----------
    settings : CheckSettings
        What to run.  Dtypes that the device or the model's own kernels lack, or that do not fit into its memory, are left
        out and named.

    Raises
    ------
    UserError
        When the model is not there, has no causal pass, or fits in no dtype; when the corpus is too small.
    """
    model, seed = settings.model, settings.seed
    tokenizer = loading.tokenizer(model, settings.weights)
    identity = loading.identify(model, settings.weights, seed)
    _refuse_masked(model, identity)
    limit = identity["context_length"]
    texts = samples_of(
        tokenizer, settings.corpus, settings.n_samples, min(settings.n_tokens, limit or settings.n_tokens)
    )
    rows, again, left_out = [], [], {}
    use_cache = None
    for dtype in progress.track(settings.dtypes, len(settings.dtypes), "check: dtype"):
        try:
            loaded = loading.load(model, weights=settings.weights, dtype=dtype, device=settings.device, seed=seed)
            use_cache = getattr(loaded.model.config, "use_cache", None)
            with _in_one_line(identity["name"]):
                found = list(rows_of(loaded.model, dtype, texts, seed))
                if not any(row["held"] for row in found):
                    again += rows_of(loaded.model, dtype, texts, seed, use_cache=True)
        except UserError as error:
            left_out[dtype] = error
            continue
        rows += found
    if not rows:
        raise next(iter(left_out.values()))
    about = {
        "model": _named(identity),
        "device": settings.device,
        "use_cache": use_cache,
        "left_out": {dtype: _reason(error) for dtype, error in left_out.items()},
        "texts": f"{len(texts)} texts of up to {max(len(text.ids) for text in texts)} tokens",
    }
    return report(pd.DataFrame(rows), about, seed, pd.DataFrame(again) if again else None)


@contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """Say in one line what a model's own code raises when it is called."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = hub.first_line(error)
        raise UserError(
            f"{name} cannot be run with past_key_values ({type(error).__name__}: {reason}): this check is for models that take them"
        ) from error


def _named(identity: dict[str, Any]) -> str:
    size = f"{identity['layers']} layers, {identity['parameters'] / 1e6:,.1f} M parameters"
    return f"{identity['name']} ({identity['weights']} weights, {size})"


def _refuse_masked(model: str, identity: dict[str, Any]) -> None:
    config = loading.config_of(model)
    if loading.is_masked(config):
        raise UserError(
            f"{identity['name']} is a masked model: each token sees those behind it too, so a cache of earlier tokens cannot give "
            "what the full pass gives, and its classes return none; set is_decoder=true in its configuration to make it causal"
        )


def seam(model: str, prefix: str, rest: str, weights: str = "stand-in") -> Report:
    """Check one text in two parts for a tokenizer seam.

    Parameters
    ----------
    model : str
        Whose tokenizer.
    prefix, rest : str
        What the cache was filled with, and what follows.
    weights : str
        For a family's name: as for `loading.load`.

    Raises
    ------
    UserError
        When there is no tokenizer.
    """
    tokenizer = loading.tokenizer(model, weights)
    whole = tokenizer(prefix + rest)["input_ids"]
    first = tokenizer(prefix)["input_ids"]
    shared = caches.shared_length(first, whole)
    name = Path(model).name
    if shared == len(first):
        line = (
            f"verdict   no seam: the prefix's {len(first)} ids begin the whole text's ids, so its cache can be reused"
        )
        return Report([f"model     {name}, its tokenizer", line], SOUND, verdict.Finding("exact", line, None, {}, {}))
    there = tokenizer.decode([whole[shared]]) if shared < len(whole) else ""
    line = (
        f"verdict   bug: tokenizer seam at token {shared}: alone the prefix ends with {tokenizer.decode(first[shared:])!r}, "
        f"in the whole text {there!r} stands there"
    )
    remedy = (
        f"remedy    keep of the cache the {shared} tokens that both share (kvbook.measuring.caches.reusable),\n"
        "  or put the rest's own ids behind the prefix's ids in both passes"
    )
    return Report([f"model     {name}, its tokenizer", line, remedy], BUG, verdict.Finding("bug", line, None, {}, {}))
