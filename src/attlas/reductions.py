"""Reductions of a matrix over any of its axes, of the weights themselves and of a function of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from attlas.engine import tiled
from attlas.engine.autodiff import graph
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, Statistic
from attlas.errors import ShapeError
from attlas.lazy import LazyTensor, check_size, like_tensors
from attlas.stats import columns, largest, rows
from attlas.tiles import Tile

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix

__all__ = ["Cellwise", "Dim", "argmax_of_rows", "axes_of", "axis_of", "counted", "exchanged", "max_along", "reduced"]

Dim: TypeAlias = "int | tuple[int, ...] | list[int] | None"
Reduction: TypeAlias = Literal["sum", "mean", "amax", "argmax"]


def axis_of(A: LazyTensor, name: str, dim: Any) -> int:
    """Return an axis counted from 0."""
    if isinstance(dim, int) and not isinstance(dim, bool) and -A.ndim <= dim < A.ndim:
        return dim % A.ndim
    raise ShapeError(
        f"A.{name}()",
        "dim must be an axis of the matrix, or several.",
        {"A": f"shape {tuple(A.shape)}"},
        found=f"dim = {dim!r}",
        fix=f"A.{name}(-1) over keys, A.{name}(-2) over queries, A.{name}({A.ndim - 3}) over heads."
        if A.ndim > 2
        else f"A.{name}(-1) over keys, A.{name}(-2) over queries.",
    )


def axes_of(A: LazyTensor, name: str, dim: Dim) -> set[int]:
    """Return axes counted from 0; without `dim`, all."""
    named = range(A.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    return {axis_of(A, name, one) for one in named}


def counted(A: LazyTensor, name: str, dim: Dim) -> int:
    """Return the number of cells that a reduction takes together."""
    return math.prod(A.shape[axis] for axis in axes_of(A, name, dim))


def _without(shape: torch.Size, dims: set[int], keepdim: bool) -> list[int]:
    return [1 if axis in dims else size for axis, size in enumerate(shape) if keepdim or axis not in dims]


def reduced(A: AttentionMatrix, name: Reduction, dim: Dim, keepdim: bool) -> Tensor:
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
            found: Tensor = A._call("argmax", dim, keepdim)
            return found
    elif A.needs_graph and (name != "amax" or not dims & {keys, queries}):
        return _recorded(A, name, dims, keepdim)
    if not dims & {keys, queries}:
        out = _over_leading(A, name, dims)
    else:
        first = keys if keys in dims else queries
        out = A.collect(_STATISTICS[name][first == keys]())[0].unsqueeze(first)
        rest = sorted(dims - {first})
        if rest:
            out = out.amax(rest, keepdim=True) if name == "amax" else out.sum(rest, keepdim=True)
    if name == "mean":
        out = out / counted(A, name, dim)
    return out.reshape(_without(A.shape, dims, keepdim))


def _recorded(A: AttentionMatrix, name: str, dims: set[int], keepdim: bool) -> Tensor:
    """Return a sum, mean or maximum with its graph: sums over rows or columns are products, at any length."""
    keys, queries = A.ndim - 1, A.ndim - 2
    if not dims & {keys, queries}:
        found: Tensor = getattr(A.to_dense(), name)(sorted(dims), keepdim)
        return found
    first = keys if keys in dims else queries
    ones = torch.ones(A.shape[first], 1, dtype=A.problem.q.dtype, device=A.device)
    out = (A @ ones if first == keys else (A.mT @ ones).mT).to(A.dtype)
    out = out.sum(sorted(dims - {first}), keepdim=True) if len(dims) > 1 else out
    out = out / math.prod(A.shape[axis] for axis in dims) if name == "mean" else out
    return out.reshape(_without(A.shape, dims, keepdim))


_STATISTICS: dict[str, tuple[type[Statistic], type[Statistic]]] = {
    "sum": (columns.ColumnMass, rows.RowMass),
    "mean": (columns.ColumnMass, rows.RowMass),
    "amax": (columns.ColumnMax, rows.MaxWeight),
    "argmax": (columns.ColumnArgMax, largest.ArgMax),
}


def _over_leading(A: AttentionMatrix, name: str, dims: set[int]) -> Tensor:
    """Return the sum or the maximum over leading axes, kept with size 1."""
    lead, (m, n) = A.shape[:-2], A.shape[-2:]
    kept = [1 if axis in dims else size for axis, size in enumerate(lead)]
    size = math.prod(kept) * m * n * A.dtype.itemsize
    few = f"A[..., :64, :].{name}({min(dims)})"
    fix = f"stats.picture(A, 512, 512).{name}({min(dims)}), or a window of queries, {few}."
    check_size(f"A.{name}()", [A], size, fix)
    group = torch.arange(math.prod(kept), device="cpu").reshape(kept).expand(lead).reshape(A.problem.shape[:2])
    (found,), _ = tiled.collect(A.problem, [_Gathered(group, name == "amax")], A.plan, A._lse)
    total: Tensor = found.reshape(*kept, m, n)
    return total


class _Gathered(Statistic):
    """Sum or maximum of the matrices of some heads, a whole matrix for each group of them."""

    def __init__(self, group: Tensor, take_max: bool) -> None:
        self.group = group.tolist()
        self.groups = int(group.max()) + 1 if group.numel() else 0
        self.take_max = take_max

    def start(self, problem: Problem) -> Tensor:
        return torch.zeros(self.groups, *problem.shape[2:], dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        for b, batch in enumerate(at.batches):
            for h, head in enumerate(at.heads):
                group = self.group[batch][head]
                into = carry[group, at.rows.start : at.rows.stop, at.columns.start : at.columns.stop]
                if self.take_max:
                    torch.maximum(into, part.weights[b, h], out=into)
                else:
                    into += part.weights[b, h]
        return carry

    def finish(self, carry: Tensor) -> Tensor:
        return carry


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


class Cellwise(LazyTensor):
    """A function of each weight, ``f(A)``, lazy: its sums take one pass over the matrix.

    Parameters
    ----------
    matrix : AttentionMatrix, shape (..., m, n)
        The weights.
    f : callable
        ``f(cells, centre)``, the function of a tensor of weights.
    centre : Tensor, optional, shape (..., m or 1, n or 1)
        A second argument that is constant along the axes which are summed.
    """

    label = "f(A)"

    def __init__(self, matrix: AttentionMatrix, f: Callable[..., Tensor], centre: Tensor | None = None) -> None:
        self.matrix, self.f, self.centre = matrix, f, centre
        self.shape, self.device = matrix.shape, matrix.device
        self.dtype = f(torch.zeros((), dtype=matrix.dtype), torch.zeros((), dtype=matrix.dtype)).dtype

    def __repr__(self) -> str:
        return f"Cellwise({self.matrix!r}, {self.dtype})"

    @property
    def requires_grad(self) -> bool:
        """Whether the weights record a graph, and the function has a gradient."""
        return self.matrix.requires_grad and self.dtype.is_floating_point

    def detach(self) -> Cellwise:
        """Return the same numbers without a graph."""
        return Cellwise(self.matrix.detach(), self.f, None if self.centre is None else self.centre.detach())

    def to_dense(self, limit: int | None = graph.DENSE_LIMIT) -> Tensor:
        """Return the function of all weights as a Tensor; refused above `limit` bytes."""
        return self.f(self.matrix.to_dense(limit), self.centre)

    def lazily(self, function: str) -> Callable[..., Any] | None:
        """Return what computes a function of torch without the dense tensor."""
        return {"sum": Cellwise.sum, "mean": Cellwise.mean, "any": Cellwise.any, "all": Cellwise.all}.get(function)

    @like_tensors
    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Sum over axes; over rows or columns in one pass and linear memory. Truths are counted."""
        A, dims = self.matrix, axes_of(self, "sum", dim)
        keys, queries = A.ndim - 1, A.ndim - 2
        if not dims & {keys, queries} or (self.dtype.is_floating_point and A.needs_graph):
            dense: Tensor = self.to_dense().sum(sorted(dims), keepdim)
            return dense
        first = keys if keys in dims else queries
        centre = None if self.centre is None else self.centre.expand(*A.shape[:-2], *self.centre.shape[-2:])
        centre = None if centre is None else centre.reshape(*A.problem.shape[:2], *centre.shape[-2:])
        found = A.collect(_CellSums(self.f, self.dtype, centre, over_keys=first == keys))[0].unsqueeze(first)
        total: Tensor = found.sum(sorted(dims), keepdim=True)
        return total.reshape(_without(A.shape, dims, keepdim))

    @like_tensors
    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Mean over axes; see `sum`."""
        return self.sum(dim, keepdim) / counted(self, "mean", dim)

    @like_tensors
    def any(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Whether any cell along the axes is true."""
        return Cellwise(self.matrix, lambda *cells: self.f(*cells).bool(), self.centre).sum(dim, keepdim) > 0

    @like_tensors
    def all(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Whether all cells along the axes are true."""
        return ~Cellwise(self.matrix, lambda *cells: ~self.f(*cells).bool(), self.centre).any(dim, keepdim)


class _CellSums(Statistic):
    """Sum of a function of each weight over the keys of each row, or over the queries of each column."""

    differentiable = False

    def __init__(self, f: Callable[..., Tensor], dtype: torch.dtype, centre: Tensor | None, *, over_keys: bool) -> None:
        self.f, self.centre, self.over_keys = f, centre, over_keys
        self.dtype = dtype if dtype.is_floating_point else torch.int64

    def start(self, problem: Problem) -> tuple[Tensor, Tensor, int]:
        batch, heads, m, n = problem.shape
        total = torch.zeros(batch, heads, m if self.over_keys else n, dtype=self.dtype, device=problem.device)
        return total, torch.zeros_like(total, dtype=torch.int64), n if self.over_keys else m

    def step(self, carry: tuple[Tensor, Tensor, int], part: Part, at: Tile) -> tuple[Tensor, Tensor, int]:
        total, visited, _ = carry
        b, h, i = at.place
        j = slice(at.columns.start, at.columns.stop)
        into = (b, h, i if self.over_keys else j)
        centre = self.centre
        if centre is not None:
            centre = centre[b, h, i if centre.shape[2] > 1 else slice(None), j if centre.shape[3] > 1 else slice(None)]
        total[into] += self.f(part.weights, centre).sum(dim=-1 if self.over_keys else -2)
        visited[into] += len(at.columns) if self.over_keys else len(at.rows)
        return carry

    def finish(self, carry: tuple[Tensor, Tensor, int]) -> Tensor:
        # Cells that nothing may see are not visited, and have weight 0.
        total, visited, size = carry
        centre = None if self.centre is None else self.centre.flatten(2)
        zeros = torch.zeros((1, 1, 1) if centre is None else centre.shape, device=total.device, dtype=torch.float32)
        zeros = zeros if centre is None else zeros.to(centre.dtype)
        return total + self.f(zeros, centre) * (size - visited)
