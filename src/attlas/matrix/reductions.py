"""Reductions of a matrix over any of its axes, of the weights themselves and of a function of each."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attlas.engine.autodiff import graph
from attlas.engine.statistic import Statistic
from attlas.errors import ShapeError, public
from attlas.foundation.checks import is_integer
from attlas.foundation.compat import transforming
from attlas.matrix import reads
from attlas.matrix.kinds import algebra
from attlas.matrix.protocol import LazyTensor, Matrix, check_size
from attlas.stats import columns, largest, rows

Dim: TypeAlias = "int | tuple[int, ...] | list[int] | None"
Reduction: TypeAlias = Literal["sum", "mean", "amax", "argmax"]


def axis_of(A: LazyTensor | Matrix, name: str, dim: Any) -> int:
    """Return an axis counted from 0."""
    if is_integer(dim) and -A.ndim <= dim < A.ndim:
        return dim % A.ndim
    rule, heads = "dim must be an axis of the matrix, or several.", f", A.{name}({A.ndim - 3}) over heads"
    fix = f"A.{name}(-1) over keys, A.{name}(-2) over queries{heads if A.ndim > 2 else ''}."
    raise ShapeError(rule, f"dim = {dim!r}", fix, A=f"shape {tuple(A.shape)}", where=f"A.{name}()")


def axes_of(A: LazyTensor | Matrix, name: str, dim: Dim) -> set[int]:
    """Return axes counted from 0; without `dim`, all."""
    named = range(A.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    return {axis_of(A, name, one) for one in named}


def cells_reduced(A: LazyTensor | Matrix, name: str, dim: Dim) -> int:
    """Return the number of cells that a reduction takes together."""
    return math.prod([A.shape[axis] for axis in axes_of(A, name, dim)])


def reduced_shape(shape: torch.Size, dims: set[int], keepdim: bool) -> list[int]:
    """Return a shape without some axes, or with size 1 along them."""
    return [1 if axis in dims else size for axis, size in enumerate(shape) if keepdim or axis not in dims]


def reduced(A: Matrix, name: Reduction, dim: Dim, keepdim: bool) -> Any:
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
        A lazy matrix for a sum or mean over leading axes of more than 1 GiB.

    Raises
    ------
    ShapeError
        If `dim` is no axis.
    TooLargeError
        If the result is a whole matrix of maxima, of more than 1 GiB.

    Notes
    -----
    Cost: one pass over the matrix, and the memory of the result and a few tiles.
    """
    dims = axes_of(A, name, dim)
    keys, queries = A.ndim - 1, A.ndim - 2
    if name == "argmax":
        if len(dims) > 1 or not dims & {keys, queries}:
            return A.on_dense("argmax", dim, keepdim)
    elif A.weights.needs_graph and (name != "amax" and dims & {keys, queries}):
        return _reduction_with_graph(A, name, dims, keepdim)
    if not dims & {keys, queries}:
        if dims and name != "amax" and _is_large_sum(A, dims):
            return algebra.mean_over(A, dims, keepdim, cells_reduced(A, name, dim) if name == "mean" else 1)
        out = over_leading(A, name, dims)
    else:
        first = keys if keys in dims else queries
        out = A.collect(_STATISTICS_OF_REDUCTION[name][first == keys]())[0].unsqueeze(first)
        rest = sorted(dims - {first})
        if rest:
            out = out.amax(rest, keepdim=True) if name == "amax" else out.sum(rest, keepdim=True)
    if name == "mean":
        out = out / cells_reduced(A, name, dim)
    return out.reshape(reduced_shape(A.shape, dims, keepdim))


def _is_large_sum(A: Matrix, dims: set[int]) -> bool:
    """Return whether a sum over leading axes is too large to be written out: then it stays lazy."""
    kept = math.prod([size for axis, size in enumerate(A.shape) if axis not in dims])
    return kept * A.dtype.itemsize > graph.DENSE_LIMIT


def _reduction_with_graph(A: Matrix, name: str, dims: set[int], keepdim: bool) -> Tensor:
    """Return a sum or mean over rows or columns with its graph, at full precision; `A.grad` takes it as a product."""
    keys, queries = A.ndim - 1, A.ndim - 2
    first = keys if keys in dims else queries
    out = A.axes.restore(A.weights.sums(over_keys=first == keys))
    out = out if first == keys else out.mT
    out = out.sum(sorted(dims - {first}), keepdim=True) if len(dims) > 1 else out
    out = out / math.prod([A.shape[axis] for axis in dims]) if name == "mean" else out
    return out.reshape(reduced_shape(A.shape, dims, keepdim))


_STATISTICS_OF_REDUCTION: dict[str, tuple[type[Statistic], type[Statistic]]] = {
    "sum": (columns.ColumnMass, rows.RowMass),
    "mean": (columns.ColumnMass, rows.RowMass),
    "amax": (columns.ColumnMax, rows.MaxWeight),
    "argmax": (columns.ColumnArgMax, largest.ArgMax),
}


def over_leading(A: Matrix, name: str, dims: set[int], cells: Any = None, *, limited: bool = True) -> Tensor:
    """Return the sum or the maximum over leading axes, kept with size 1, of the weights or a function of each.

    Where it is `limited`, a result above 1 GiB is refused.
    """
    nothing = name == "amax" and not math.prod([A.shape[axis] for axis in dims])  # torch raises
    if A.weights.is_symbolic or transforming() or nothing:
        dense = A.to_dense()
        found: Tensor = getattr(dense, name if name == "amax" else "sum")(sorted(dims), keepdim=True)
        return found
    lead, (m, n) = A.shape[:-2], A.shape[-2:]
    kept = [1 if axis in dims else size for axis, size in enumerate(lead)]
    size = math.prod(kept) * m * n * A.dtype.itemsize
    few = f"A[..., :64, :].{name}({min(dims)})"
    fix = f"stats.picture(A, 512, 512).{name}({min(dims)}), or a window of queries, {few}."
    with public(f"A.{name}()"):
        check_size([A], size, graph.DENSE_LIMIT if limited else None, fix)
    group = torch.arange(math.prod(kept), device="cpu").reshape(kept).expand(lead).reshape(A.weights.shape[:2])
    of_cells = () if cells is None else cells.in_problem_axes()
    statistic = reads.LeadingSums(group, math.prod(kept), name == "amax", *of_cells)
    total: Tensor = A.weights.collect([statistic])[0][0].reshape(*kept, m, n)
    return total


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


def variance(A: Any, dim: Dim, correction: Any, keepdim: bool) -> Tensor:
    """Return the variance of the weights over axes, masked cells counted as 0, in two passes."""
    mean, count = A.mean(dim, keepdim=True), cells_reduced(A, "var", dim)
    centre = mean.detach()
    # Autograd sees the centre as a constant. The second term is 0, and so is its derivative; it gives the second
    # derivative what the constant takes from it.
    squares = (A - centre).square().sum(dim, keepdim=True) - count * (mean - centre).square()
    found: Tensor = squares / max(count - correction, 0)
    return found.reshape(reduced_shape(A.shape, axes_of(A, "var", dim), keepdim))


def square_root(t: Tensor) -> Tensor:
    """Return the square root, whose slope at 0 counts as 0, as that of `torch.std` and `torch.norm`."""
    return torch.where(t == 0, 0.0, t.where(t != 0, 1.0).sqrt())
