"""Attention taken apart: the same rows, computed in every form that a decode step or a prefill could take.

Each kernel is compared with itself: a causal pass over all queries is the reference, and each form computes some of its
rows from equal numbers.  Rows, one a (kernel, dtype, number of keys, form): see ``data/README.md``.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention, softmax

from kvbook.measuring import agreement
from kvbook.models import placement
from kvbook.runs import Experiment, Inputs, Rows, Writer
from kvreport.chapters.where_drift_begins import WhereDriftBeginsSettings
from kvreport.chapters.where_drift_begins import rows as named
from kvreport.chapters.where_drift_begins.products import inputs

HEADS, HEAD_DIM, DRAWS = 4, 32, 4
# Positions after the last key that a mask hides, as a static cache has them.
HIDDEN_KEYS = 64

# Takes queries, keys, values, a mask or None, and whether the pass is causal.
Attention = Callable[..., torch.Tensor]


def _eager(q, k, v, mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
    """Attend as transformers' eager attention: two products, and the softmax in fp32 or finer."""
    mask = _causal(q.shape[-2], k.shape[-2], q.device) if is_causal else mask
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + (_additive(mask, q.dtype) if mask.dtype == torch.bool else mask)
    return softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def _sdpa(backend: SDPBackend, q, k, v, mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


KERNELS: dict[str, Attention] = {
    "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "SDPA cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION), "SDPA math": partial(_sdpa, SDPBackend.MATH),
    "eager": _eager,
}


def _causal(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def _alone(attend: Attention, q, k, v) -> torch.Tensor:
    return attend(q[..., -1:, :], k, v)


def _masked(attend: Attention, q, k, v, rows: int = 0, hidden: int = 0, additive: bool = False) -> torch.Tensor | None:
    """Attend from the last rows (0: all) with a mask, which may hide further keys; None where these are all."""
    if rows > 1 and rows >= q.shape[-2]:
        return None
    rows = rows or q.shape[-2]
    mask = pad(_causal(rows, k.shape[-2], q.device), (0, hidden))
    mask = _additive(mask, q.dtype) if additive else mask
    return attend(q[..., -rows:, :], *(pad(t, (0, 0, 0, hidden)) for t in (k, v)), mask)


def _longer(attend: Attention, q, k, v) -> torch.Tensor:
    """Attend with one more query and key at the end, as in a text of one more token, and leave its row out."""
    q, k, v = (torch.cat([t, t[..., :1, :]], -2) for t in (q, k, v))
    return attend(q, k, v, is_causal=True)[..., :-1, :]


FORMS: dict[str, Callable[..., torch.Tensor | None]] = {
    named.BOOLEAN: _masked, named.ADDITIVE: partial(_masked, additive=True), named.ALONE: _alone,
    named.ALONE_MASKED: partial(_masked, rows=1), named.THREE: partial(_masked, rows=3),
    named.SIXTEEN: partial(_masked, rows=16), named.ALONE_HIDDEN: partial(_masked, rows=1, hidden=HIDDEN_KEYS),
    named.HIDDEN: partial(_masked, hidden=HIDDEN_KEYS), named.LONGER: _longer,
}


def compare(attend: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Rows:
    """Compute rows in every form and compare them with the causal pass."""
    everything = attend(q, k, v, is_causal=True)
    exact = _eager(q.double(), k.double(), v.double(), is_causal=True)
    for form, compute in FORMS.items():
        try:
            found = compute(attend, q, k, v)
        except RuntimeError:
            # Not every kernel takes a mask.
            continue
        if found is not None:
            reference, right = (t[..., -found.shape[-2] :, :] for t in (everything, exact))
            equal = agreement.bits_equal(reference, found).all(-1)
            drift = agreement.drift(reference.flatten(), found.flatten())
            yield {
                "form": form, "compared_rows": equal.numel(), "equal_rows": int(equal.sum()),
                "max_abs": drift.max_abs.item(), "relative_rms": drift.relative_rms.item(),
                "reference_error": agreement.drift(right.flatten(), reference.flatten()).relative_rms.item(),
                "form_error": agreement.drift(right.flatten(), found.flatten()).relative_rms.item(),
            }


def available(attend: Attention, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a kernel runs on a device in a dtype at all."""
    few = torch.zeros(1, 1, 2, HEAD_DIM, dtype=dtype, device=device)
    try:
        attend(few, few, few, is_causal=True)
    except RuntimeError:
        return False
    return True


def measure(settings: WhereDriftBeginsSettings, _made_of: Inputs, writer: Writer) -> None:
    """Take every kernel of the device apart."""
    device = placement.device_of(settings.device)
    units = {f"{dtype}|{keys}": (dtype, keys) for dtype in settings.dtypes for keys in settings.key_lengths}
    for unit, (name, keys) in writer.pending(units, "attention taken apart: case"):
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(settings.seed)
        q, k, v = (torch.randn(DRAWS, HEADS, keys, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3))
        about = {"dtype": name, "keys": keys, "heads": HEADS, "head_dim": HEAD_DIM}
        writer.keep(unit, {}, (
            {"kernel": kernel} | about | row for kernel, attend in KERNELS.items()
            if available(attend, device, dtype) for row in compare(attend, q, k, v)
        ))


EXPERIMENT = Experiment(
    "attention_forms", WhereDriftBeginsSettings, inputs, measure, frozenset({"device", "seed", "dtypes", "key_lengths"})
)
