"""Attention taken apart: the same rows, computed in every form that a decode step or a prefill could take.

Each kernel is held against itself: a causal pass over all queries is the reference, and each form gives some of its
rows from equal numbers.  Rows, one a (kernel, dtype, number of keys, form): see ``data/README.md``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention, softmax

from kvbook import progress
from kvbook.measuring import agreement
from kvbook.models import placement
from kvbook.runs import records
from kvbook.runs.experiment import Experiment
from kvreport.chapters.where_drift_begins import rows as named
from kvreport.chapters.where_drift_begins.settings import WhereDriftBeginsSettings

HEADS, HEAD_DIM, DRAWS = 4, 32, 4
# Positions behind the last key that a mask hides, as a static cache has them.
HIDDEN_KEYS = 64

Mask = torch.Tensor | None
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask, bool], torch.Tensor]


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, is_causal: bool) -> torch.Tensor:
    # What transformers calls eager: two products, the softmax in at least fp32.
    if is_causal:
        mask = _causal(q.shape[-2], k.shape[-2], q.device)
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(mask, q.dtype)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    return softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def _sdpa(backend: SDPBackend) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, is_causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

    return attend


KERNELS: dict[str, Attention] = {
    "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA math": _sdpa(SDPBackend.MATH),
    "eager": _eager,
}


def _causal(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def _one(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q[..., -1:, :], k, v, None, False)


def _few(rows: int, hidden: int = 0, additive: bool = False) -> Callable:
    """Attend from the last rows (0: all) with a mask, and with keys behind that it hides."""

    def form(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        count = rows or q.shape[-2]
        if count > q.shape[-2] or (rows > 1 and count == q.shape[-2]):
            return None
        mask = pad(_causal(count, k.shape[-2], q.device), (0, hidden))
        if additive:
            mask = _additive(mask, q.dtype)
        return attend(q[..., -count:, :], pad(k, (0, 0, 0, hidden)), pad(v, (0, 0, 0, hidden)), mask, False)

    return form


def _longer(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with one more query and key behind, as a text of one more token has them; the rows before it are ours."""
    q, k, v = (torch.cat([t, t[..., :1, :]], -2) for t in (q, k, v))
    return attend(q, k, v, None, True)[..., :-1, :]


FORMS: dict[str, Callable] = {
    named.BOOLEAN: _few(0),
    named.ADDITIVE: _few(0, additive=True),
    named.ALONE: _one,
    named.ALONE_MASKED: _few(1),
    named.THREE: _few(3),
    named.SIXTEEN: _few(16),
    named.ALONE_HIDDEN: _few(1, hidden=HIDDEN_KEYS),
    named.HIDDEN: _few(0, hidden=HIDDEN_KEYS),
    named.LONGER: _longer,
}


def compare(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Compute rows in every form and hold them against the causal pass."""
    everything = attend(q, k, v, None, True)
    exact = _eager(q.double(), k.double(), v.double(), None, True)
    for form, compute in FORMS.items():
        try:
            found = compute(attend, q, k, v)
        except RuntimeError:
            # Not every kernel takes a mask.
            continue
        if found is None:
            continue
        reference, right = (t[..., -found.shape[-2] :, :] for t in (everything, exact))
        equal = agreement.bits_equal(reference, found).all(-1)
        drift = agreement.drift(reference.flatten(), found.flatten())
        yield {
            "form": form,
            "compared_rows": equal.numel(),
            "equal_rows": int(equal.sum()),
            "max_abs": drift.max_abs.item(),
            "relative_rms": drift.relative_rms.item(),
            "reference_error": agreement.drift(right.flatten(), reference.flatten()).relative_rms.item(),
            "form_error": agreement.drift(right.flatten(), found.flatten()).relative_rms.item(),
        }


def available(attend: Attention, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a kernel runs on a device in a dtype at all."""
    few = torch.zeros(1, 1, 2, HEAD_DIM, dtype=dtype, device=device)
    try:
        attend(few, few, few, None, True)
    except RuntimeError:
        return False
    return True


def inputs(settings: WhereDriftBeginsSettings) -> dict[str, Any]:
    """Refuse a device or dtype that is not there; no model is read."""
    placement.check(settings.device, settings.dtypes)
    return {"models": []}


def measure(settings: WhereDriftBeginsSettings, _made_of: dict[str, Any], writer: records.Writer) -> None:
    """Take every kernel of the device apart."""
    device = placement.device_of(settings.device)
    cases = [(dtype, keys) for dtype in settings.dtypes for keys in settings.key_lengths]
    for name, keys in progress.track(cases, len(cases), "attention taken apart: case"):
        unit = f"{name}|{keys}"
        if unit in writer.done:
            continue
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(settings.seed)
        q, k, v = (torch.randn(DRAWS, HEADS, keys, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3))
        rows = []
        with torch.inference_mode():
            for kernel, attend in KERNELS.items():
                if available(attend, device, dtype):
                    about = {"kernel": kernel, "dtype": name, "keys": keys, "heads": HEADS, "head_dim": HEAD_DIM}
                    rows += [about | row for row in compare(attend, q, k, v)]
        writer.append(unit, rows)


EXPERIMENT = Experiment(
    "attention_forms", WhereDriftBeginsSettings, inputs, measure,
    fields=frozenset({"device", "seed", "dtypes", "key_lengths"}),
)
