"""Additive scores on the CPU: hidden units as reciprocals, two products and their gradients.

``tanh(a + b) = 1 - 2 / (1 + e^2a e^2b)``: with the exponentials of each token at hand a hidden unit costs one
multiply-add, and four of them share one reciprocal. Tiles whose tokens leave the range of float32 take tanh itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attlas.engine.backend import Gradients
from attlas.engine.native import library, request
from attlas.engine.native.pairwise import PairwiseFamily, pairwise_params, unsupported_reason
from attlas.engine.problem import Problem
from attlas.scores.additive import Additive

__all__ = ["AdditiveKernels", "unsupported"]


def unsupported(problem: Problem) -> str | None:
    """Return why these kernels do not compute this problem, or None where they do."""
    if type(problem.score) is not Additive:
        return "the score is not additive"
    return unsupported_reason(problem, "additive") or unsupported_reason(problem, "additive_statistics")


class AdditiveKernels(PairwiseFamily):
    """Calls of the additive kernels."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor) -> None:
        super().__init__(problem, q, k)
        self.own: Tensor = getattr(problem.score, "w_v")  # noqa: B009 - a module types its attributes as anything
        self.weight: Tensor = self.own.detach().to(problem.dtype).contiguous()

    def parameters(self) -> Tensor:
        return self.weight

    def run_forward(self, params: Any) -> bool:
        return library.call("additive", pairs=params, weight=self.weight.data_ptr()) == library.code("DONE")

    def run_statistics(self, params: Any, results: Any) -> bool:
        of = library.structure("Additive")(pairs=params, weight=self.weight.data_ptr())
        return library.call("additive_statistics", of=of, found=results) == library.code("DONE")

    def backward(
        self, parameters: Sequence[Tensor], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
    ) -> Gradients | None:
        problem, dtype = self.problem, self.problem.dtype
        batch, heads, m, n = problem.shape
        hidden, e, key_heads = self.q.shape[-1], left.shape[-1], self.k.shape[1]
        values = right.detach().to(dtype)
        d_q, d_k = self.zeros(batch, heads, m, hidden), self.zeros(batch, key_heads, n, hidden)
        d_values, d_weight = self.zeros(batch, heads, n, e), self.zeros(hidden)
        for block in request.row_blocks(problem):
            known = lse[block.slices].detach().contiguous()
            rows_left, rows_delta = (t[block.slices].detach().to(dtype).contiguous() for t in (left, delta))
            params, _buffers = pairwise_params(
                self.q[block.slices], self.k, values, **block.mask, known=known.data_ptr()
            )
            results = {
                "d_rows": self.zeros(batch, heads, len(block.rows), hidden),
                "d_columns": self.zeros(batch, heads, n, hidden),
                "d_values": self.zeros(batch, heads, n, e),
                "d_weight": self.zeros(hidden),
            }
            status = library.call(
                "additive_backward",
                of=library.structure("Additive")(pairs=params, weight=self.weight.data_ptr()),
                slopes=library.structure("Slopes")(left=rows_left.data_ptr(), delta=rows_delta.data_ptr()),
                **{name: t.data_ptr() for name, t in results.items()},
            )
            if status != library.code("DONE"):
                return None
            d_q[block.slices] = results["d_rows"]
            d_k += results["d_columns"].unflatten(1, (key_heads, -1)).sum(dim=2)
            d_values += results["d_values"]
            d_weight += results["d_weight"]
        # All parameters but the weights of the hidden units act through the projected tokens.
        d_parameters = [d_weight if p is self.own else None for p in parameters]
        return Gradients([d_q], [d_k], d_parameters, d_values, delta)
