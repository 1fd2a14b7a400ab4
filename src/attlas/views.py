"""Two faces of a lazy matrix: its transpose, and its log-weights before softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attlas.engine import choose
from attlas.errors import ShapeError, explain
from attlas.indexing import parse
from attlas.inputs import check_values
from attlas.stats import rows

if TYPE_CHECKING:
    from attlas.matrix import AttentionMatrix

__all__ = ["LogitMatrix", "TransposedMatrix"]

DENSE_LIMIT = 2**30  # bytes that to_dense() gives without being asked twice


class TransposedMatrix:
    """The transposed attention matrix, shape (..., n, m), lazy; made by ``A.mT``.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.randn(5, 8), torch.randn(7, 8))
    >>> (A.mT @ torch.ones(5, 1)).shape
    torch.Size([7, 1])
    """

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.mT = matrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, (..., n, m)."""
        *leading, m, n = self.mT.shape
        return torch.Size((*leading, n, m))

    def __repr__(self) -> str:
        return f"{self.mT!r}.mT"

    def __matmul__(self, x: Tensor) -> Tensor:
        matrix = self.mT
        vector = isinstance(x, Tensor) and x.ndim == 1
        problem, heads = matrix.problem, matrix.problem.shape[1]
        x = x.unsqueeze(-1) if vector else x
        given = check_values("A.mT @ x", x, problem.q, matrix._axes, heads, names=("x", "m", "query"))
        given = given.repeat_interleave(heads // given.shape[1], dim=1) if given.shape[1] != heads else given
        out = choose.multiply_transposed(problem, given, matrix._known_lse(), matrix.plan)
        out = matrix._axes.restore(out)
        return out.squeeze(-1) if vector else out


class LogitMatrix:
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

    def __init__(self, matrix: AttentionMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, (..., m, n)."""
        return self._matrix.shape

    def __repr__(self) -> str:
        return f"{self._matrix!r}.logits"

    def __getitem__(self, key: Any) -> Any:
        where = parse(key, self._matrix._axes, *self._matrix.problem.shape[2:])
        part = self._matrix._select(where)
        return LogitMatrix(part) if where.rows is None else part._read(where, before_softmax=True)

    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Tensor:
        """Return all log-weights as a Tensor; see `AttentionMatrix.to_dense`."""
        return self._matrix._dense(limit, before_softmax=True)

    def mean(self, dim: int = -1) -> Tensor:
        """Mean over the allowed keys of each row, shape (..., m)."""
        self._check_dim("mean", dim)
        found: Tensor = self._matrix.collect(rows.LogitMoments())[0].mean
        return found

    def var(self, dim: int = -1) -> Tensor:
        """Variance over the allowed keys of each row, shape (..., m); the mean of squared deviations."""
        self._check_dim("var", dim)
        found: Tensor = self._matrix.collect(rows.LogitMoments())[0].variance
        return found

    def amax(self, dim: int = -1) -> Tensor:
        """Largest log-weight of each row, shape (..., m)."""
        self._check_dim("amax", dim)
        found: Tensor = self._matrix.collect(rows.MaxLogit())[0]
        return found

    def _check_dim(self, name: str, dim: int) -> None:
        if dim not in (-1, len(self.shape) - 1):
            raise ShapeError(
                explain(
                    f"A.logits.{name}()",
                    "log-weights are reduced over the keys of a row.",
                    {"A": f"shape {tuple(self.shape)}"},
                    found=f"dim = {dim!r}",
                    fix=f"A.logits.{name}(-1)",
                )
            )
