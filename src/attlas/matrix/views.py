"""Two views of a lazy matrix: its transpose, and its log-weights before softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from attlas.engine import operations
from attlas.engine.autodiff.graph import DENSE_LIMIT
from attlas.engine.problem import spread_heads
from attlas.errors import ShapeError
from attlas.foundation.autocast import cast_values
from attlas.foundation.checks import check_values, tracing
from attlas.foundation.indexing import Where, parse
from attlas.matrix.products import PRODUCTS
from attlas.matrix.protocol import LazyTensor, like_tensors
from attlas.matrix.reductions import Dim, argmax_of_rows, axes_of, exchanged, max_along
from attlas.matrix.weights import SoftmaxMatrix
from attlas.stats import rows

R = TypeVar("R")


class _View(LazyTensor):
    """What the two views share: the matrix that they look at."""

    def __init__(self, matrix: SoftmaxMatrix) -> None:
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
        where = parse(key, self.matrix._axes, *self.shape[-2:])
        if where is None:
            return self._call("__getitem__", key)
        part = self.matrix._select(where)
        return type(self)(part) if where.rows is None else self._cells(part, where)

    def _cells(self, part: SoftmaxMatrix, where: Where) -> Tensor:
        """Return the cells of an index from those of some batches and heads of the matrix."""
        raise NotImplementedError


class TransposedMatrix(_View):
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
    def mT(self) -> SoftmaxMatrix:
        """The matrix itself."""
        return self.matrix

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # computed here, stored elsewhere
        """Shape of the matrix, (..., n, m)."""
        *leading, m, n = self.matrix.shape
        return torch.Size((*leading, n, m))

    def lazily(self, function: str) -> Callable[..., Any] | None:
        """Return what computes a function of torch without the dense tensor."""
        if function in ("sum", "mean", "amax", "argmax"):
            return partial(exchanged, function)
        return max_along if function == "max" else PRODUCTS.get(function)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self.matrix @ x if x.ndim == 1 else (self.matrix @ x.mT).mT

    def __matmul__(self, x: Tensor | LazyTensor) -> Tensor:
        if isinstance(x, LazyTensor):
            return type(self)(self.matrix.full_precision()) @ x.to_dense()
        matrix = self.matrix
        vector = isinstance(x, Tensor) and x.ndim == 1
        problem, heads = matrix.checked_problem("A.mT @ x"), matrix.problem.shape[1]
        v, dtype = cast_values(x.unsqueeze(-1) if vector else x, problem.q)
        given = spread_heads(check_values("A.mT @ x", v, problem.q, matrix._axes, heads, ("x", "m", "query")), heads)
        out = operations.multiply_transposed(problem, given, matrix._exact_lse, matrix.plan)
        if out.requires_grad and not tracing():
            matrix._gradient.add_product(out, given, transposed=True)
        out = matrix._axes.restore(out if dtype is None else out.to(dtype))
        return out.squeeze(-1) if vector else out

    def _cells(self, part: SoftmaxMatrix, where: Where) -> Tensor:
        cells = part._read(where._replace(rows=where.columns, columns=where.rows))
        one_axis = where.pairs or isinstance(where.rows, int) or isinstance(where.columns, int)
        return cells if one_axis else cells.mT

    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return all weights as a Tensor; see `AttentionMatrix.to_dense`."""
        return self.matrix.to_dense(limit).mT


class LogitMatrix(_View):
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

    def _cells(self, part: SoftmaxMatrix, where: Where) -> Tensor:
        return part._read(where, before_softmax=True)

    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return all log-weights as a Tensor; see `AttentionMatrix.to_dense`."""
        return self.matrix._dense(limit, before_softmax=True)

    def lazily(self, function: str) -> Callable[..., Any] | None:
        """Return what computes a function of torch without the dense tensor."""
        return {"amax": LogitMatrix.amax, "argmax": argmax_of_rows, "max": max_along}.get(function)

    def mean(self, dim: int = -1) -> Tensor:
        """Mean over the allowed keys of each row, shape (..., m)."""
        return self._of_rows("mean", dim, rows.logit_moments).mean

    def var(self, dim: int = -1) -> Tensor:
        """Variance over the allowed keys of each row, shape (..., m); the mean of squared deviations."""
        return self._of_rows("var", dim, rows.logit_moments).variance

    @like_tensors
    def amax(self, dim: Dim = -1, keepdim: bool = False) -> Tensor:
        """Largest log-weight of each row, shape (..., m); without the keys' axis that of the dense tensor."""
        dims = sorted(axes_of(self, "amax", dim))
        if self.ndim - 1 not in dims:
            return self._call("amax", dims, keepdim)
        return rows.max_logit(self.matrix).unsqueeze(-1).amax(dims, keepdim)

    def _of_rows(self, name: str, dim: int, reduce: Callable[[SoftmaxMatrix], R]) -> R:
        if dim not in (-1, len(self.shape) - 1):
            rule = "log-weights are reduced over the keys of a row."
            found, fix = f"dim = {dim!r}", f"A.logits.{name}(-1)"
            raise ShapeError(f"A.logits.{name}()", rule, {"A": f"shape {tuple(self.shape)}"}, found=found, fix=fix)
        return reduce(self.matrix)
