"""Functions of each weight, lazy: their sums, and the gradients of these, take one pass over the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attlas import reads
from attlas._compat import changes, tree_leaves, tree_map_only
from attlas.engine.autodiff import graph
from attlas.errors import ModifiedError
from attlas.inputs import transforming
from attlas.lazy import LazyTensor, like_tensors
from attlas.masks.base import Mask
from attlas.reductions import Dim, axes_of, counted, over_leading, without
from attlas.tiles import Tile

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix

__all__ = ["Cellwise", "cellwise"]

_NUMBERS = int | float | str | torch.dtype | None


def cellwise(function: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    """Return a function of each weight as a lazy tensor; NotImplemented where it needs the dense matrix.

    Parameters
    ----------
    function : callable
        A function of torch that computes each cell of its result from the same cell of its arguments.
    args, kwargs : tuple and dict
        Its arguments. The tensors among them must broadcast to the matrix, and have no gradient of their own.
    """
    given = tree_leaves((args, kwargs))
    lazy = [part for part in given if isinstance(part, LazyTensor)]
    matrices = {id(_matrix(part)): _matrix(part) for part in lazy}
    matrix = next(iter(matrices.values()))
    others = [part for part in given if isinstance(part, Tensor)]
    plain = all(isinstance(part, LazyTensor | Tensor | _NUMBERS) for part in given)
    if matrix is None or len(matrices) > 1 or not plain or "out" in kwargs:
        return NotImplemented
    if matrix.problem.is_symbolic or transforming() or not all(_fits(t, matrix) for t in others):
        return NotImplemented
    tensors: list[Tensor] = []
    for part in given:
        tensors += part.tensors if isinstance(part, Cellwise) else [part] if isinstance(part, Tensor) else []

    def f(cells: Tensor, *values: Tensor) -> Tensor:
        rest = iter(values)

        def value(part: LazyTensor | Tensor) -> Tensor:
            if isinstance(part, Cellwise):
                return part.f(cells, *islice(rest, len(part.tensors)))
            return next(rest) if isinstance(part, Tensor) else cells

        own, named = tree_map_only((LazyTensor, Tensor), value, (args, kwargs))
        return function(*own, **named)

    found = _of_one_cell(matrix, f, tuple(tensors))
    if not isinstance(found, Tensor) or found.is_complex():  # operators do not take everything: A == None
        return NotImplemented
    return Cellwise(matrix, f, tuple(tensors))


def _of_one_cell(matrix: AttentionMatrix, f: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the function of one weight, which tells its dtype and whether it has a gradient."""
    with torch.enable_grad():
        cell = torch.ones((1,) * matrix.ndim, dtype=matrix.dtype, device=matrix.device, requires_grad=True)
        return f(cell, *(t.new_ones((1,) * t.ndim) for t in tensors))


def _matrix(lazy: LazyTensor) -> AttentionMatrix | None:
    """Return the matrix of weights that a lazy tensor is, or is a function of; None for others."""
    if isinstance(lazy, Cellwise):
        return lazy.matrix if lazy.changed is None else None
    return lazy if hasattr(type(lazy), "collect") else None  # type: ignore[return-value]  # then it is one


def _fits(t: Tensor, A: AttentionMatrix) -> bool:
    """Return whether a tensor is a plain one without a gradient that broadcasts to a matrix."""
    if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or t.requires_grad:
        return False
    sizes = zip(reversed(t.shape), reversed(A.shape), strict=False)
    alike = t.ndim <= A.ndim and all(size in (1, own) for size, own in sizes)
    return alike and (t.ndim == 0 or t.device == A.device)


class Cellwise(LazyTensor):
    """A function of each weight, ``f(A)``, lazy: sums over queries or keys take one pass over the matrix.

    What is changed in place is written out first, up to 1 GiB.

    Parameters
    ----------
    matrix : AttentionMatrix, shape (..., m, n)
        The weights.
    f : callable
        ``f(cells, *tensors)``, the function of a tensor of weights.
    tensors : tuple of Tensor
        What else it takes; each broadcasts to the matrix.
    """

    label = "f(A)"

    def __init__(self, matrix: AttentionMatrix, f: Callable[..., Tensor], tensors: tuple[Tensor, ...] = ()) -> None:
        self.matrix, self.f, self.tensors = matrix, f, tensors
        self.shape, self.device = matrix.shape, matrix.device
        self.changed: Tensor | None = None
        self._versions = [None if t.is_inference() else changes(t) for t in tensors]
        found = _of_one_cell(matrix, f, tensors)
        self.dtype, self._has_gradient = found.dtype, found.requires_grad

    def __repr__(self) -> str:
        return f"Cellwise({self.matrix!r}, {self.dtype})"

    @property
    def requires_grad(self) -> bool:
        """Whether the weights record a graph, and the function has a gradient."""
        return self.matrix.requires_grad and self._has_gradient

    def detach(self) -> Any:
        """Return the same numbers without a graph."""
        if self.changed is not None:
            return self.changed.detach()
        return Cellwise(self.matrix.detach(), self.f, self.tensors)

    def to_dense(self, limit: int | None = graph.DENSE_LIMIT) -> Tensor:
        """Return the function of all weights as a Tensor; refused above `limit` bytes."""
        if self.changed is not None:
            return self.changed
        self._check_unchanged()
        return self.f(self.matrix.to_dense(limit), *self.tensors)

    def lazily(self, function: str) -> Callable[..., Any] | None:
        """Return what computes a function of torch without the dense tensor."""
        own = {"sum": Cellwise.sum, "mean": Cellwise.mean, "any": Cellwise.any, "all": Cellwise.all}
        return own.get(function) if self.changed is None else None

    def cellwise(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return a function of each cell as a lazy tensor; see `LazyTensor.cellwise`."""
        return cellwise(function, args, kwargs)

    def __reduce__(self) -> Any:
        return torch.clone, (self.to_dense(),)  # no function can be pickled

    def __setitem__(self, key: Any, value: Any) -> None:
        self._written()[key] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not name.endswith("_") or name in ("requires_grad_", "set_"):
            return super().__getattr__(name)
        method = getattr(self._written(), name)

        def run(*args: Any, **kwargs: Any) -> Cellwise:
            method(*args, **kwargs)
            return self

        return run

    def _written(self) -> Tensor:
        """Return the dense tensor, which this one is from now on."""
        self.changed = self.to_dense()
        return self.changed

    def _check_unchanged(self) -> None:
        for t, version in zip(self.tensors, self._versions, strict=True):
            if version is not None and changes(t) != version:
                rule = "the tensors of a function of a matrix must not change before it is computed."
                fix = "take the sum before they change, or (A * t).to_dense()."
                raise ModifiedError(self.label, rule, {"t": t}, found="t was changed in place", fix=fix)

    def of_problem(self) -> tuple[Callable[..., Tensor], tuple[Tensor, ...], torch.dtype, bool]:
        """Return the function, its tensors with the axes of the problem, its dtype, and whether it has a gradient."""
        self._check_unchanged()
        A = self.matrix

        def spread(t: Tensor) -> Tensor:
            t = t.reshape((1,) * (A.ndim - t.ndim) + t.shape)
            return t.expand(*A.shape[:-2], *t.shape[-2:]).reshape(*A.problem.shape[:2], *t.shape[-2:])

        return self.f, tuple(spread(t) if t.ndim else t for t in self.tensors), self.dtype, self._has_gradient

    @like_tensors
    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Sum over axes; over rows or columns in one pass and linear memory. Truths are counted."""
        A, dims = self.matrix, axes_of(self, "sum", dim)
        keys, queries = A.ndim - 1, A.ndim - 2
        if self.changed is not None or A.problem.is_symbolic or transforming():
            return self.to_dense().sum(sorted(dims), keepdim)
        if dims & {keys, queries}:
            first = keys if keys in dims else queries
            sums = reads.CellSums(*self.of_problem(), over_keys=first == keys)
            if A.mask is not None and not sums.counts_hidden(A.problem):
                A = A._derived(replace(A.problem, mask=_Visited(A.mask)), A._axes, A._known_lse())
            found: Tensor = A.collect(sums)[0].unsqueeze(first).sum(sorted(dims), keepdim=True)
        else:
            found = over_leading(A, "sum", dims, self)
        return found.reshape(without(A.shape, dims, keepdim))

    @like_tensors
    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Mean over axes; see `sum`."""
        return self.sum(dim, keepdim) / counted(self, "mean", dim)

    @like_tensors
    def any(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Whether any cell along the axes is true."""
        return Cellwise(self.matrix, lambda *cells: self.f(*cells).bool(), self.tensors).sum(dim, keepdim) > 0

    @like_tensors
    def all(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Whether all cells along the axes are true."""
        return ~Cellwise(self.matrix, lambda *cells: ~self.f(*cells).bool(), self.tensors).any(dim, keepdim)


class _Visited(Mask):
    """A mask whose hidden tiles are visited."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def allows(self, at: Tile) -> Tensor:
        return self.mask.allows(at)
