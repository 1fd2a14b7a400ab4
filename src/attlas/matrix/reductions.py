"""Reductions of a matrix over any of its axes, of the weights themselves and of a function of each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.autodiff import graph
from attlas.engine.backends import tiled
from attlas.engine.statistic import Statistic
from attlas.errors import ShapeError
from attlas.foundation.checks import is_integer, tracing
from attlas.foundation.compat import transforming
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.matrix import reads
from attlas.matrix.protocol import LazyTensor, check_size
from attlas.matrix.weights import SoftmaxMatrix
from attlas.stats import columns, largest, rows

Dim: TypeAlias = "int | tuple[int, ...] | list[int] | None"
Reduction: TypeAlias = Literal["sum", "mean", "amax", "argmax"]


def axis_of(A: LazyTensor, name: str, dim: Any) -> int:
    """Return an axis counted from 0."""
    if is_integer(dim) and -A.ndim <= dim < A.ndim:
        return dim % A.ndim
    rule, heads = "dim must be an axis of the matrix, or several.", f", A.{name}({A.ndim - 3}) over heads"
    fix = f"A.{name}(-1) over keys, A.{name}(-2) over queries{heads if A.ndim > 2 else ''}."
    raise ShapeError(f"A.{name}()", rule, {"A": f"shape {tuple(A.shape)}"}, found=f"dim = {dim!r}", fix=fix)


def axes_of(A: LazyTensor, name: str, dim: Dim) -> set[int]:
    """Return axes counted from 0; without `dim`, all."""
    named = range(A.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    return {axis_of(A, name, one) for one in named}


def cells_reduced(A: LazyTensor, name: str, dim: Dim) -> int:
    """Return the number of cells that a reduction takes together."""
    return math.prod(A.shape[axis] for axis in axes_of(A, name, dim))


def reduced_shape(shape: torch.Size, dims: set[int], keepdim: bool) -> list[int]:
    """Return a shape without some axes, or with size 1 along them."""
    return [1 if axis in dims else size for axis, size in enumerate(shape) if keepdim or axis not in dims]


def reduced(A: SoftmaxMatrix, name: Reduction, dim: Dim, keepdim: bool) -> Tensor:
    """Reduce a matrix over any of its axes, tile by tile.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix.
    name : {"sum", "mean", "amax", "argmax"}
        What is taken.
    dim : int, tuple of int, or None
        The axes; None is all of them.
    keepdim : bool
        Whether the axes are kept with size 1.

    Returns
    -------
    Tensor, shape of A without the axes

    Raises
    ------
    ShapeError
        If `dim` is no axis.
    TooLargeError
        If the result still is a whole matrix, of more than 1 GiB.

    Notes
    -----
    Cost: one pass over the matrix, and the memory of the result and a few tiles.
    """
    dims = axes_of(A, name, dim)
    keys, queries = A.ndim - 1, A.ndim - 2
    if name == "argmax":
        if len(dims) > 1 or not dims & {keys, queries}:
            return A._call("argmax", dim, keepdim)
    elif A.needs_graph and (name != "amax" and dims & {keys, queries}):
        return _recorded(A, name, dims, keepdim)
    if not dims & {keys, queries}:
        out = over_leading(A, name, dims)
    else:
        first = keys if keys in dims else queries
        out = A.collect(_STATISTICS[name][first == keys]())[0].unsqueeze(first)
        rest = sorted(dims - {first})
        if rest:
            out = out.amax(rest, keepdim=True) if name == "amax" else out.sum(rest, keepdim=True)
    if name == "mean":
        out = out / cells_reduced(A, name, dim)
    return out.reshape(reduced_shape(A.shape, dims, keepdim))


def _recorded(A: SoftmaxMatrix, name: str, dims: set[int], keepdim: bool) -> Tensor:
    """Return a sum or mean over rows or columns with its graph, at full precision; `A.grad` takes it as a product."""
    keys, queries = A.ndim - 1, A.ndim - 2
    first = keys if keys in dims else queries
    problem = A.checked_problem(f"A.{name}()")
    out = A._record(problem, [_STATISTICS["sum"][first == keys]()])[0].unsqueeze(-1)
    if out.requires_grad and not tracing():
        A._gradient.add_product(out, out.new_ones(1, 1, A.shape[first], 1), transposed=first == queries)
    out = A._axes.restore(out)
    out = out if first == keys else out.mT
    out = out.sum(sorted(dims - {first}), keepdim=True) if len(dims) > 1 else out
    out = out / math.prod(A.shape[axis] for axis in dims) if name == "mean" else out
    return out.reshape(reduced_shape(A.shape, dims, keepdim))


_STATISTICS: dict[str, tuple[type[Statistic], type[Statistic]]] = {
    "sum": (columns.ColumnMass, rows.RowMass),
    "mean": (columns.ColumnMass, rows.RowMass),
    "amax": (columns.ColumnMax, rows.MaxWeight),
    "argmax": (columns.ColumnArgMax, largest.ArgMax),
}


def over_leading(A: SoftmaxMatrix, name: str, dims: set[int], cells: Any = None, *, limited: bool = True) -> Tensor:
    """Return the sum or the maximum over leading axes, kept with size 1, of the weights or a function of each.

    Where it is `limited`, a result above 1 GiB is refused.
    """
    nothing = name == "amax" and not math.prod(A.shape[axis] for axis in dims)  # torch raises
    if A.problem.is_symbolic or transforming() or nothing:
        dense = A.to_dense()
        found: Tensor = getattr(dense, name if name == "amax" else "sum")(sorted(dims), keepdim=True)
        return found
    lead, (m, n) = A.shape[:-2], A.shape[-2:]
    kept = [1 if axis in dims else size for axis, size in enumerate(lead)]
    size = math.prod(kept) * m * n * A.dtype.itemsize
    few = f"A[..., :64, :].{name}({min(dims)})"
    fix = f"stats.picture(A, 512, 512).{name}({min(dims)}), or a window of queries, {few}."
    check_size(f"A.{name}()", [A], size, graph.DENSE_LIMIT if limited else None, fix)
    group = torch.arange(math.prod(kept), device="cpu").reshape(kept).expand(lead).reshape(A.problem.shape[:2])
    of_cells = () if cells is None else cells.in_problem_axes()
    statistic = reads.LeadingSums(group, math.prod(kept), name == "amax", *of_cells)
    if cells is not None:
        A = unskipped(A, statistic)

    def compute() -> tuple[list[Any], Tensor]:
        return tiled.collect(A.problem, [statistic], A.plan, A._lse)[0], A._exact_lse()

    if A.needs_graph and statistic.differentiable:
        A._gradient.mark_incomplete("heads were summed")
        (result,), _ = operations.record(A.problem, [statistic], A.plan, compute)
    else:
        (result,), _ = tiled.collect(A.problem, [statistic], A.plan, A._lse)
    total: Tensor = result[0].reshape(*kept, m, n)
    return total


def unskipped(A: SoftmaxMatrix, statistic: Any) -> SoftmaxMatrix:
    """Return the matrix whose pass gives a statistic of functions of the weights all cells that it counts."""
    if A.mask is None or statistic.may_skip_tiles(A.problem):
        return A
    return A._derived(replace(A.problem, mask=_NoTileSkipped(A.mask)), A._axes, A._exact_lse())


class _NoTileSkipped(Mask):
    """The same mask without `coverage`, so that a pass also visits tiles in which it hides every cell."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def allows(self, at: Tile) -> Tensor:
        return self.mask.allows(at)


def exchanged(name: str, A: Any, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Reduce a transposed matrix (`A.mT`) over any of its axes, in one pass over the matrix."""
    m, n = A.ndim - 2, A.ndim - 1
    dims = axes_of(A, name, dim)
    if name == "argmax" and len(dims) > 1:  # it counts the cells of the transposed matrix
        return NotImplemented  # type: ignore[no-any-return]
    own = [{m: n, n: m}.get(axis, axis) for axis in dims]
    found: Tensor = getattr(A.matrix, name)(own if len(own) > 1 else own[0], True).mT
    return found if keepdim else found.squeeze(tuple(dims))


def max_along(A: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the largest number, or with `dim` the largest along an axis and their positions, as `torch.max` does."""
    if dim is None:
        return A.amax(tuple(range(A.ndim)))
    if not isinstance(dim, int):  # the larger of two tensors
        return NotImplemented
    return torch.return_types.max((A.amax(dim, keepdim), A.argmax(dim, keepdim)))


def argmax_of_rows(A: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the position of the largest log-weight of each row of `A.logits`: that of the largest weight."""
    if dim not in (-1, A.ndim - 1):
        return NotImplemented  # type: ignore[no-any-return]
    found: Tensor = A.matrix.argmax(-1, keepdim)
    return found
