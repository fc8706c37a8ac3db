"""Matrix products in which a row's bits do not depend on how many rows come with it.

A library picks another algorithm, so another order of additions, for another number of rows.  Here a product only ever
runs on row counts of a short list.  One of them, the tile, is the reference.  Every other count is compared with it
bit for bit the first time that it is wanted, with the shapes, strides, dtype and threads of the product at hand, and is
used only if no bit differs.  A count that is refused is tried again with the matrix cut into fewer columns, for what a
library chooses depends on these too.  What the machine does not grant is paid for with padding.

In fp32 on a CPU, and in 16 bits where its processor has no products in them, a kernel of our own is faster, see
`fp32_products`; all of this is for other dtypes, for GPUs, and for machines without a compiler.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvbook.exact import fp32_products
from kvbook.exact.kernels import base, cancel, draw, key_of
from kvbook.exact.visible import Seen, alike


class Sizes(NamedTuple):
    """Row counts of products.

    Attributes
    ----------
    tile : int
        The reference, which every product may run on.
    small : tuple of int
        Below it, ascending: what a decode step would like to run on.
    large : tuple of int
        Above it, descending: what keeps a prefill fast.
    cuts : tuple of int
        Into how many pieces a matrix's columns may be cut for a large count, ascending.
    """

    tile: int
    small: tuple[int, ...]
    large: tuple[int, ...]
    cuts: tuple[int, ...] = (1,)


class Piece(NamedTuple):
    """Rows that are multiplied at once.

    Attributes
    ----------
    start, count : int
        The first of them, and how many.
    size : int
        How many rows they are made up to.
    cuts : int
        Into how many pieces the matrix's columns are cut.
    """

    start: int
    count: int
    size: int
    cuts: int = 1


TILE = 16
HOST = Sizes(TILE, (1, 2, 4, 8), (512, 384, 256, 192, 128, 64, 32), (1, 2, 4))
# Reading the weights takes as long for this many rows as for one, and starting a kernel is what many small products
# cost.
GPU = Sizes(128, (1, 16, 64), (1024, 512, 256))
# Vector units and caches work on lines of this many bytes; a library may start differently inside one.  cuBLAS looks at
# up to so many.
_LINE, _LINE_ON_A_GPU = 64, 256
# Matrices of fewer columns are cheap on any number of rows.
_CUT_COLUMNS = 256
# How many rows of plain random numbers are compared at the least.
_PLAIN_ROWS = 64


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    key = key_of(x)
    return base("aten::mm", key)(x, weight) if bias is None else base("aten::addmm", key)(bias, x, weight)


def _in_columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cuts: int) -> torch.Tensor:
    """Multiply with one piece of the columns after the other."""
    if cuts == 1:
        return _product(x, weight, bias)
    pieces = zip(weight.chunk(cuts, 1), [None] * cuts if bias is None else bias.chunk(cuts), strict=True)
    return torch.cat([_product(x, some, summand) for some, summand in pieces], 1)


def _into_line(x: torch.Tensor) -> int:
    """Return how many bytes into a line a tensor begins."""
    return x.data_ptr() % (_LINE_ON_A_GPU if x.is_cuda else _LINE)


def lined_up(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that begins at the beginning of a line."""
    x = x.contiguous()
    return x.clone() if _into_line(x) else x


def _modes(weight: torch.Tensor) -> tuple[object, ...]:
    """List what a user can set that makes a GPU's library choose or compute otherwise."""
    if not weight.is_cuda:
        return ()
    given, library = torch.backends.cuda.matmul, str(torch.backends.cuda.preferred_blas_library())
    reduced = given.allow_fp16_reduced_precision_reduction, given.allow_bf16_reduced_precision_reduction
    return given.fp32_precision, *reduced, library


@dataclass
class RowCounts:
    """The row counts on which one product may run, found out on the way.

    Attributes
    ----------
    tile : int
        The reference: that of `sizes`, or 1 where the rows of such a tile are not treated alike.
    sizes : Sizes
        Counts to try.
    verdicts : dict of (int, int) to bool
        For every count and number of cuts that was tried, whether the bits equal the reference's.
    """

    tile: int
    sizes: Sizes
    verdicts: dict[tuple[int, int], bool] = field(default_factory=dict)
    _plans: dict[int, list[Piece]] = field(default_factory=dict)

    def allows(self, count: int, weight: torch.Tensor, bias: torch.Tensor | None, cuts: int = 1) -> bool:
        """Tell whether a count gives the reference's bits, by trying it the first time."""
        if count == self.tile:
            return True
        if (count, cuts) not in self.verdicts:
            self.verdicts[count, cuts] = all(
                self._in_pieces(self.tile, 1, *told).equal(self._in_pieces(count, cuts, *told))
                for told in _tellings(max(count, self.tile), weight, bias)
            )
        return self.verdicts[count, cuts]

    def _in_pieces(self, rows: int, cuts: int, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([_in_columns(lined_up(part), *others, cuts) for part in x.split(rows)])

    def plan(self, rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> list[Piece]:
        """Cut a number of rows into pieces."""
        if rows not in self._plans:
            pieces, start = [], 0
            for size in (*self.sizes.large, self.tile):
                if rows - start >= size and (cuts := self._fewest_cuts(size, weight, bias)):
                    pieces += [Piece(at, size, size, cuts) for at in range(start, rows - size + 1, size)]
                    start = rows - (rows - start) % size
            if rest := rows - start:
                fits = (size for size in self.sizes.small if size >= rest and self.allows(size, weight, bias))
                pieces.append(Piece(start, rest, next(fits, self.tile)))
            self._plans[rows] = pieces
        return self._plans[rows]

    def _fewest_cuts(self, size: int, weight: torch.Tensor, bias: torch.Tensor | None) -> int | None:
        """Find into how few pieces the columns must be cut for a count to be allowed; None where no number will do."""
        columns = weight.shape[1]
        # Of the tile itself, and of a narrow matrix, nothing is cut.
        narrow = size == self.tile or columns < _CUT_COLUMNS
        tried = (1,) if narrow else (cuts for cuts in self.sizes.cuts if columns % cuts == 0)
        return next((cuts for cuts in tried if self.allows(size, weight, bias, cuts)), None)


_known: dict[tuple[object, ...], RowCounts] = {}


def _row_counts(weight: torch.Tensor, bias: torch.Tensor | None) -> RowCounts:
    key = (
        weight.dtype, weight.device, weight.shape, weight.stride(), _into_line(weight), bias is None,
        torch.get_num_threads(), *_modes(weight),
    )
    if key not in _known:
        sizes = GPU if weight.is_cuda else HOST
        _known[key] = RowCounts(sizes.tile if _alike(weight, bias, sizes.tile) else 1, sizes)
    return _known[key]


def _tellings(rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Make products of the shapes and strides at hand whose bits tell the order of their additions.

    In 32 bits and more random numbers tell it too, if there are enough; and they tell what sums that are zero do not
    where these have few terms, such as whether products are rounded before they are added.
    """
    inner, columns = weight.shape
    drawn = functools.partial(draw, used_in=weight.dtype)
    # The first has sums that are zero, see `pairs`. A GPU may keep parts of a sum in the 16 bits of its terms, and fp16
    # ends at 65,504.
    scale = 1.0 if weight.is_cuda and weight.dtype == torch.float16 else 16.0
    x, other = drawn((rows, inner), seed=2, scale=scale), drawn((inner, columns), seed=3, scale=scale)
    cancel(x, other.t(), seed=1)
    # As small as what is left of the sum, so that when it is added makes a difference.
    left = 2.0**-24 if weight.dtype != torch.float64 else 2.0**-53
    summand = None if bias is None else drawn((columns,), seed=4, scale=6700 * left).to(bias)
    yield x.to(weight), _placed(other, weight), summand
    if weight.dtype in (torch.float32, torch.float64):
        rows *= -(-_PLAIN_ROWS // rows)
        summand = None if bias is None else drawn((columns,), seed=7).to(bias)
        yield drawn((rows, inner), seed=5).to(weight), _placed(drawn((inner, columns), seed=6), weight), summand


def _placed(other: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Copy a matrix to the strides of a weight, and to the same place within a line."""
    offset = _into_line(weight) // weight.element_size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return weight.new_empty(offset + span).as_strided(weight.shape, weight.stride(), offset).copy_(other)


def _alike(weight: torch.Tensor, bias: torch.Tensor | None, tile: int) -> bool:
    """Tell whether a row has equal bits wherever in a tile it lies and whatever lies beside it."""
    for told, *others in _tellings(tile, weight, bias):
        x = told[:tile]
        mixed = _product(x, *others)
        for place in (0, tile // 2 + 1, tile - 1):
            repeated = _product(x[place].expand(tile, -1).contiguous(), *others)
            if not torch.equal(repeated, mixed[place].expand(tile, -1)):
                return False
    return True


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows with a matrix so that each row's bits are its own affair."""
    rows = x.shape[0]
    if not rows or not weight.numel():
        return _product(x, weight, bias)
    if times := fp32_products.kernel_for(weight):
        return times(x, weight, bias)
    if bias is not None and bias.is_cuda:
        bias = lined_up(bias)
    pieces = _row_counts(weight, bias).plan(rows, weight, bias)
    if len(pieces) == 1:
        _, count, size, cuts = pieces[0]
        if count == size:
            return _in_columns(lined_up(x), weight, bias, cuts)
        if count == 1:
            return for_one(weight, bias)(x, bias)
    out = x.new_empty(rows, weight.shape[1])
    for start, count, size, cuts in pieces:
        piece = x[start : start + count]
        if count < size:
            piece = torch.constant_pad_nd(piece, (0, 0, 0, size - count))
        out[start : start + count] = _in_columns(lined_up(piece), weight, bias, cuts)[:count]
    return out


def for_one(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Return the product of a single row with a matrix, with all that can be looked up beforehand looked up."""
    if weight.numel() and (of_ours := fp32_products.kernel_for(weight)):
        return lambda x, bias: of_ours(x, weight, bias)
    size = _row_counts(weight, bias).plan(1, weight, bias)[0].size if weight.numel() else 1
    kernel = base("aten::mm" if bias is None else "aten::addmm", key_of(weight))
    if size == 1 and not weight.is_cuda:
        return functools.partial(_alone, kernel, weight)

    def times(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        row = x.reshape(1, -1)
        if bias is not None and bias.is_cuda:
            bias = lined_up(bias)
        # Made up to more rows by copies of itself.
        row = lined_up(row) if size == 1 else row.expand(size, -1).contiguous()
        out = kernel(row, weight) if bias is None else kernel(bias, row, weight)
        return (out if size == 1 else out[:1]).view(*x.shape[:-1], weight.shape[1])

    return times


def _alone(kernel: Callable, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply a single row on a CPU that grants one row its own bits; each call here takes as long as the product."""
    row = x.reshape(1, -1)
    if row.data_ptr() % _LINE or not row.is_contiguous():
        row = lined_up(row)
    out = kernel(row, weight) if bias is None else kernel(bias, row, weight)
    return out[None] if x.dim() == 3 else out.view(*x.shape[:-1], weight.shape[1])


# By a stack's dtype, shape, strides, place within a line and threads: whether one row may be multiplied with any of it
# by itself.
_stacks: dict[tuple[object, ...], bool] = {}


def for_one_of(weights: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the product of a single row with any matrix of a stack; None where one row does not serve for all."""
    if not weights.is_cpu or fp32_products.kernel_for(weights):
        return None
    strides = weights.stride()
    about = (weights.dtype, weights.shape, strides, _into_line(weights), torch.get_num_threads())
    if about not in _stacks:
        # They must all begin alike in a line.
        alike = bool(weights.numel()) and not strides[0] * weights.element_size() % _LINE
        _stacks[about] = alike and _row_counts(weights[0], None).plan(1, weights[0], None)[0].size == 1
    return _one_row if _stacks[about] else None


def _one_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    kernel = base("aten::mm", "CPU")
    return kernel(lined_up(x) if x.data_ptr() % _LINE or not x.is_contiguous() else x, weight)


# Inner sizes and columns of a batched product are cut into blocks of this many.
BLOCK = 128


def batched(left: torch.Tensor, right: torch.Tensor, seen: Seen | None = None) -> torch.Tensor:
    """Multiply batches of matrices so that no element depends on rows, columns or zeros that come after its own.

    The inner dimension is summed in blocks of 128, one after the other, in 32 bits or more: a block of zeros adds
    nothing, so masked keys after a row's last one, and a static cache's unused ones, leave its bits alone.
    """
    n, rows, inner = left.shape
    wide = torch.promote_types(left.dtype, torch.float32)
    if inner == 1:
        # One product, rounded once: nothing is added.
        return (left.to(wide) * right.to(wide)).to(left.dtype)
    out = left.new_zeros(n, rows, right.shape[2], dtype=wide)
    for index in range(n):
        if seen is None or seen.visible is None:
            first = seen.skipped[index] if seen else 0
            _add_blocks(out[index], left[index, :, first:], right[index, first:], wide)
            continue
        for queries, keys in alike(seen.visible[index], BLOCK):
            some = slice(keys, None) if isinstance(keys, int) else keys
            part = out.new_zeros(len(queries), right.shape[2])
            _add_blocks(part, left[index, queries][:, some], right[index, some], wide)
            out[index, queries] = part
    return out.to(left.dtype)


def _add_blocks(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, wide: torch.dtype) -> None:
    """Add the product of two matrices to another one, block by block."""
    (rows, inner), columns = left.shape, right.shape[1]
    # A copy, so that blocks begin at the beginning of a line whatever the caller's strides are.
    vectors = left.new_zeros(-(-inner // BLOCK), rows, BLOCK, dtype=wide)
    for block, start in enumerate(range(0, inner, BLOCK)):
        stop = min(start + BLOCK, inner)
        vectors[block, :, : stop - start] = left[:, start:stop]
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        for block, start in enumerate(range(0, inner, BLOCK)):
            stop = min(start + BLOCK, inner)
            matrix = right.new_zeros(BLOCK, BLOCK, dtype=wide)
            matrix[: stop - start, : end - begin] = right[start:stop, begin:end]
            out[:, begin:end] += product(vectors[block], matrix)[:, : end - begin]
