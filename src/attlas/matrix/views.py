"""Two views of a lazy matrix: its transpose, and its log-weights before softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from attlas.engine.autodiff.graph import DENSE_LIMIT
from attlas.errors import ShapeError, public
from attlas.foundation.indexing import Where, parse
from attlas.matrix.kinds import algebra
from attlas.matrix.protocol import LazyTensor, Matrix, lazy_method
from attlas.matrix.reductions import Dim, argmax_of_rows, axes_of, exchanged, max_along
from attlas.stats import rows

R = TypeVar("R")


class _MatrixView(LazyTensor):
    """What the two views share: the matrix that they look at."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.dtype, self.device = matrix.dtype, matrix.device

    def __repr__(self) -> str:
        return f"{self.matrix!r}{self.label.removeprefix('A')}"

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor that the matrix depends on records a graph."""
        return self.matrix.requires_grad

    def detach(self) -> Any:
        """Return the same numbers without a graph."""
        return type(self)(self.matrix.detach())

    def __getitem__(self, key: Any) -> Any:
        # A view of the part while rows and columns are not named, else cells.
        where = parse(key, self.matrix.axes, *self.shape[-2:])
        if where is None:
            return self.on_dense("__getitem__", key)
        part = self.matrix.selected(where)
        return type(self)(part) if where.rows is None else self._view_of_cells(part, where)

    def _view_of_cells(self, part: Matrix, where: Where) -> Tensor:
        """Return the cells of an index from those of some batches and heads of the matrix."""
        raise NotImplementedError


class TransposedMatrix(_MatrixView):
    """The transposed attention matrix, shape (..., n, m), lazy; made by ``A.mT``.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.randn(5, 8), torch.randn(7, 8))
    >>> (A.mT @ torch.ones(5, 1)).shape, A.mT[2].shape
    (torch.Size([7, 1]), torch.Size([5]))
    """

    label = "A.mT"

    @property
    def mT(self) -> Matrix:
        """The matrix itself."""
        return self.matrix

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # computed here, stored elsewhere
        """Shape of the matrix, (..., n, m)."""
        *leading, m, n = self.matrix.shape
        return torch.Size((*leading, n, m))

    @lazy_method(numpy=("sum",))
    def sum(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Sum over axes: -1 over queries, -2 over keys, a leading axis, or several; the default is all."""
        return exchanged("sum", self, dim, keepdim)

    @lazy_method(numpy=("mean",))
    def mean(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Mean over axes; see `sum`."""
        return exchanged("mean", self, dim, keepdim)

    @lazy_method(numpy=("max", "amax"))
    def amax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Largest weight over axes; see `sum`."""
        return exchanged("amax", self, dim, keepdim)

    @lazy_method(numpy=("argmax",))
    def argmax(self, dim: Dim = None, keepdim: bool = False) -> Tensor:
        """Position of the largest weight along an axis; see `sum`."""
        return exchanged("argmax", self, dim, keepdim)

    @lazy_method
    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest weight, or with `dim` the largest along an axis and their positions."""
        return max_along(self, dim, keepdim)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        # x @ A.mT is (A @ x.mT).mT.
        return self.matrix.__matmul__(x) if x.ndim == 1 else self.matrix.__matmul__(x.mT).mT

    def __matmul__(self, x: Tensor | LazyTensor) -> Tensor:
        # The product with a lazy matrix stays lazy where `chained` can make it so.
        if isinstance(x, LazyTensor):
            found: Any = algebra.chained(self, x)
            return self.matrix.full_precision().transposed_product(x.to_dense()) if found is NotImplemented else found
        return self.matrix.transposed_product(x)

    def matmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``."""
        return self.__matmul__(x)

    def _view_of_cells(self, part: Matrix, where: Where) -> Tensor:
        """Read the cells with rows and columns exchanged, and transpose them."""
        cells = part.read(where._replace(rows=where.columns, columns=where.rows))
        # Where an index of pairs or an int has left one of the two axes, there is nothing to transpose.
        one_axis = where.pairs or isinstance(where.rows, int) or isinstance(where.columns, int)
        return cells if one_axis else cells.mT

    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return all weights as a Tensor; see `AttentionMatrix.to_dense`."""
        return self.matrix.to_dense(limit).mT


class LogitMatrix(_MatrixView):
    """The log-weights before softmax, lazy, -inf where masked; made by ``A.logits``.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.ones(2, 4), torch.ones(3, 4), mask=attlas.Causal(0))
    >>> A.logits[:, :]
    tensor([[2., -inf, -inf],
            [2., 2., -inf]])
    >>> A.logits.mean()
    tensor([2., 2.])
    """

    label = "A.logits"

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # computed here, stored elsewhere
        """Shape of the matrix, (..., m, n)."""
        return self.matrix.shape

    def _view_of_cells(self, part: Matrix, where: Where) -> Tensor:
        """Return the logits at an index."""
        return part.read(where, logits=True)

    @public("A.logits.to_dense()")
    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return all log-weights as a Tensor; see `AttentionMatrix.to_dense`."""
        return self.matrix.written_out(limit, logits=True)

    def mean(self, dim: int = -1) -> Tensor:
        """Mean over the allowed keys of each row, shape (..., m)."""
        return self._row_reduction("mean", dim, rows.logit_moments).mean

    def var(self, dim: int = -1) -> Tensor:
        """Variance over the allowed keys of each row, shape (..., m); the mean of squared deviations."""
        return self._row_reduction("var", dim, rows.logit_moments).variance

    @lazy_method(numpy=("max", "amax"))
    def amax(self, dim: Dim = -1, keepdim: bool = False) -> Tensor:
        """Largest log-weight of each row, shape (..., m); without the keys' axis that of the dense tensor."""
        dims = sorted(axes_of(self, "amax", dim))
        if self.ndim - 1 not in dims:
            return self.on_dense("amax", dims, keepdim)
        return rows.max_logit(self.matrix).unsqueeze(-1).amax(dims, keepdim)

    @lazy_method(numpy=("argmax",))
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Position of the largest log-weight of each row, shape (..., m): that of the largest weight."""
        return argmax_of_rows(self, dim, keepdim)

    @lazy_method
    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest log-weight, or with `dim` the largest along an axis and their positions."""
        return max_along(self, dim, keepdim)

    def _row_reduction(self, name: str, dim: int, reduce: Callable[[Matrix], R]) -> R:
        """Return a reduction of the matrix over the keys of each row; raise a ShapeError for another `dim`."""
        if dim not in (-1, len(self.shape) - 1):
            rule, fix = "log-weights are reduced over the keys of a row.", f"A.logits.{name}(-1)"
            raise ShapeError(rule, f"dim = {dim!r}", fix, A=f"shape {tuple(self.shape)}", where=f"A.logits.{name}()")
        return reduce(self.matrix)
