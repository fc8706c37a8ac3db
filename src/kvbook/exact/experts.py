"""Mixtures of experts: which are chosen, and a token's product with an expert's matrix, whoever else went there."""

import torch

from kvbook.exact import kernels, rows


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Stand in for ``aten::_grouped_mm``; the arguments are its own."""
    kernels.no_gradients("_grouped_mm", x, weights)
    if x.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None or out_dtype not in (None, x.dtype):
        what = "_grouped_mm of rows that are not sorted by expert, or with more than a matrix an expert"
        raise kernels.met(what, "load the model with experts_implementation='eager'")
    start, found = 0, []
    # Of fewer rows than experts, as in a decode step, most are alone at theirs.
    single = rows.for_one_of(weights) if len(x) < len(weights) else None
    for expert, stop in enumerate(offs.tolist()):
        if stop - start == 1 and single:
            found.append(single(x[start:stop], weights[expert]))
        elif stop > start:
            found.append(rows.product(x[start:stop], weights[expert]))
        start = stop
    if start < len(x) or not found:
        # Rows after the last expert's are nobody's.
        found.append(x.new_zeros(len(x) - start, weights.shape[2]))
    return torch.cat(found) if len(found) > 1 else found[0]


# Elements of which all are sorted at once: quicker than to look first whether there are equals.
_FEW = 64


def _has_equals(values: torch.Tensor, dim: int) -> bool:
    one, next_one = (values.narrow(dim, start, values.shape[dim] - 1) for start in (0, 1))
    return bool((one == next_one).any())


def topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[torch.Tensor, ...]:
    """Stand in for ``aten::topk``; the arguments are its own.

    Among equals torch takes any, and other ones where more elements come with them: experts in 16 bits, or chosen keys.
    Here the first are taken, in their order.
    """
    size = x.shape[dim] if x.dim() else 1
    if not x.dim() or not x.numel() or not 0 < k <= size:
        return kernels.base("aten::topk", kernels.key_of(x))(x, k, dim, largest, sorted)
    if size > _FEW:
        values, indices = kernels.base("aten::topk", kernels.key_of(x))(x, min(k + 1, size), dim, largest, True)
    if size <= _FEW or _has_equals(values, dim):
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
