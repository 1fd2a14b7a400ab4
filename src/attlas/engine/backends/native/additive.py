"""Additive scores on the CPU: hidden units as reciprocals, two products and their gradients.

``tanh(a + b) = 1 - 2 / (1 + e^2a e^2b)``: with the exponentials of each token at hand a hidden unit costs one
multiply-add, and four of them share one reciprocal. Tiles whose tokens leave the range of float32 take tanh itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attlas.engine.backend import Gradients
from attlas.engine.backends.native import bias, request
from attlas.engine.backends.native.pairwise import PairwiseFamily, unsupported_reason
from attlas.engine.problem import Problem
from attlas.scores.additive import Additive


class AdditiveKernels(PairwiseFamily):
    """Calls of the additive kernels."""

    entry = "additive"

    def __init__(self, problem: Problem, q: Tensor, k: Tensor) -> None:
        super().__init__(problem, q, k)
        score, self.factor = bias.unscaled(problem.score)
        self.own: Tensor = getattr(score, "w_v")  # noqa: B009 - a module types its attributes as anything
        self.weight: Tensor = (self.own.detach().to(problem.dtype) * self.factor).contiguous()

    def parameters(self) -> Tensor:
        # As in `PairwiseFamily`: the weights w_v of the hidden units, times the number that the score is multiplied by.
        return self.weight

    @staticmethod
    def unsupported(problem: Problem) -> str | None:
        if type(bias.unscaled(problem.score)[0]) is not Additive:
            return "the score is not additive"
        return unsupported_reason(problem)

    def fields(self) -> dict[str, Any]:
        # The fields of the score in the C structure ``Additive``, as in `PairwiseFamily`.
        return {"weight": self.weight.data_ptr()}

    def backward(
        self, parameters: Sequence[Tensor], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
    ) -> Gradients | None:
        # One call for each block of rows; gradients in keys, values and weights are sums over the blocks. `left`,
        # `right` and `delta` are those of a `CellGradient`, `known` is the log-sum-exp of the rows.
        problem, dtype = self.problem, self.problem.dtype
        batch, heads, m, n = problem.shape
        hidden, e, key_heads = self.q.shape[-1], left.shape[-1], self.k.shape[1]
        values = right.detach().to(dtype)
        d_q, d_k = self.zeros(batch, heads, m, hidden), self.zeros(batch, key_heads, n, hidden)
        d_values, d_weight = self.zeros(batch, heads, n, e), self.zeros(hidden)
        for block in request.row_blocks(problem):
            known = lse[block.slices].detach().contiguous()
            rows_left, rows_delta = (t[block.slices].detach().to(dtype).contiguous() for t in (left, delta))
            # What the fields point to is kept in `_buffers` until the call returns.
            params, _buffers = self.params(
                self.q[block.slices], self.k, values, block.slices[2], **block.mask, known=known.data_ptr()
            )
            results = {
                "d_rows": self.zeros(batch, heads, len(block.rows), hidden),
                "d_columns": self.zeros(batch, heads, n, hidden),
                "d_values": self.zeros(batch, heads, n, e),
                "d_weight": self.zeros(hidden),
            }
            if not self.run_backward(params, rows_left, rows_delta, **results):
                return None
            d_q[block.slices] = results["d_rows"]
            d_k += results["d_columns"].unflatten(1, (key_heads, -1)).sum(dim=2)
            d_values += results["d_values"]
            d_weight += results["d_weight"]
        # All parameters but the weights of the hidden units act through the projected tokens.
        d_parameters = [d_weight * self.factor if p is self.own else None for p in parameters]
        return Gradients([d_q], [d_k], d_parameters, d_values, delta)
