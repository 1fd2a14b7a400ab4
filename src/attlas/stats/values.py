"""Pooled values beside other statistics, so that output and numbers come from one pass over the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.problem import Problem, spread_heads
from attlas.engine.statistic import Part, Statistic, merge_sums
from attlas.errors import ShapeError
from attlas.inputs import check_floating
from attlas.tiles import Tile


class Pooled(Statistic):
    """Pooled values ``A @ v``, computed in the same pass as other statistics.

    Parameters
    ----------
    v : Tensor, shape (..., n, e)
        Values; leading axes are those of the matrix, or its key heads in the place of its heads.

    Raises
    ------
    DtypeError
        If `v` is no floating point tensor.
    ShapeError
        If it has not one row for each key, or not the leading axes of the matrix.

    Notes
    -----
    Numbers are float32 for half precision tokens.
    Cost: the product with the values, e multiplications a cell; on a processor with native kernels the
    logits of output and statistics of rows are computed once.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    >>> A = attlas.attend(q, k)
    >>> out, entropy = A.collect(stats.Pooled(v), stats.Entropy())
    >>> out.shape, bool(torch.allclose(out, A @ v, atol=1e-6))
    (torch.Size([5, 3]), True)
    """

    merge = merge_sums

    def __init__(self, v: Tensor) -> None:
        check_floating("Pooled()", "v must be a floating point tensor.", "v", v, "v.float()")
        self.v: Tensor = v

    def start(self, problem: Problem) -> Tensor:
        v = self._values(problem)
        return torch.zeros(*problem.shape[:3], v.shape[-1], dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        b, h, rows = at.place
        v = spread_heads(self._values(part.problem), part.problem.shape[1])
        values = v[b, h, at.columns.start : at.columns.stop].to(carry.dtype)
        carry[b, h, rows] += torch.matmul(part.weights, values)
        return carry

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        return CellGradient(grad, self._values(problem), delta=(grad * result).sum(dim=-1))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        return {"out": self._values(problem)}

    def _values(self, problem: Problem) -> Tensor:
        """Return the values with four axes, (batch, value heads, n, e)."""
        batch, heads, _, n = problem.shape
        v = self.v
        before = v.shape[:-2].numel() if v.ndim >= 2 else 0
        own = before // batch if batch and before % batch == 0 else 0
        # The product of the leading axes alone would take the heads of (heads, n, e) for texts.
        fits = v.ndim >= 2 and v.shape[-2] == n and own and heads % own == 0
        if not fits or (heads > 1 and v.ndim > 2 and v.shape[-3] != own):
            rule = "v must have a row for each key, and the leading axes of the matrix."
            found = f"a matrix of {batch} batches, {heads} heads and {n} keys"
            fix = "v of shape (batch, heads, n, e)."
            raise ShapeError("Pooled()", rule, {"v (..., n, e)": v}, found=found, fix=fix)
        return v.reshape(batch, own, n, v.shape[-1])
