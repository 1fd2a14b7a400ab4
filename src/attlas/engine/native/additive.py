"""Additive scores on the CPU: hidden units as reciprocals, two products and their gradients.

``tanh(a + b) = 1 - 2 / (1 + e^2a e^2b)``: with the exponentials of each token at hand a hidden unit costs one
multiply-add, and four of them share one reciprocal. Tiles whose tokens leave the range of float32 take tanh itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attlas.engine.backend import Gradients
from attlas.engine.native import library
from attlas.engine.native.pairwise import Family, fields, refusal, views
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.scores.additive import Additive

__all__ = ["AdditiveKernels", "supports"]


def supports(problem: Problem) -> str | None:
    """Return why these kernels do not compute this problem, or None where they do."""
    if type(problem.score) is not Additive:
        return "the score is not additive"
    return refusal(problem, "additive") or refusal(problem, "additive_statistics")


class AdditiveKernels(Family):
    """Calls of the additive kernels."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, plan: Plan) -> None:
        super().__init__(problem, q, k, plan)
        self.own: Tensor = getattr(problem.score, "w_v")  # noqa: B009 - a module types its attributes as anything
        self.weight: Tensor = self.own.detach().to(problem.dtype).contiguous()

    def parameters(self) -> Tensor:
        return self.weight

    def sums(self, pairs: Any) -> bool:
        return library.call("additive", pairs=pairs, weight=self.weight.data_ptr()) == library.code("DONE")

    def statistics(self, pairs: Any, found: Any) -> bool:
        of = library.structure("Additive")(pairs=pairs, weight=self.weight.data_ptr())
        return library.call("additive_statistics", of=of, found=found) == library.code("DONE")

    def backward(
        self, parameters: Sequence[Tensor], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
    ) -> Gradients | None:
        problem, dtype = self.problem, self.problem.dtype
        batch, heads, m, n = problem.shape
        hidden, e, key_heads = self.q.shape[-1], left.shape[-1], self.k.shape[1]
        values = right.detach().to(dtype)
        d_q, d_k = self.new(batch, heads, m, hidden), self.new(batch, key_heads, n, hidden)
        pooled, d_w = self.new(batch, heads, n, e), self.new(hidden)
        for view in views(problem, self.plan):
            above, due = (t[view.place].detach().to(dtype).contiguous() for t in (left, delta))
            known = lse[view.place].detach().contiguous()
            pairs, held = fields(view, self.q[view.place], self.k, values, known=known)
            found = [
                self.new(batch, heads, len(view.rows), hidden),
                self.new(batch, heads, n, hidden),
                self.new(batch, heads, n, e),
                self.new(hidden),
            ]
            status = library.call(
                "additive_backward",
                of=library.structure("Additive")(pairs=pairs, weight=self.weight.data_ptr()),
                slopes=library.structure("Slopes")(left=above.data_ptr(), delta=due.data_ptr()),
                d_rows=found[0].data_ptr(),
                d_columns=found[1].data_ptr(),
                d_values=found[2].data_ptr(),
                d_weight=found[3].data_ptr(),
            )
            del held
            if status != library.code("DONE"):
                return None
            d_q[view.place] = found[0]
            d_k += found[1].unflatten(1, (key_heads, -1)).sum(dim=2)
            pooled += found[2]
            d_w += found[3]
        return Gradients([d_q], [d_k], self._through(parameters, d_w), pooled, delta)

    def _through(self, parameters: Sequence[Tensor], d_w: Tensor) -> list[Tensor | None]:
        """Return the gradients of the score's parameters: all but the weights of the units act through the tokens."""
        return [d_w if p is self.own else None for p in parameters]
