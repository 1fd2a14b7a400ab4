"""Additive scores on the CPU: hidden units as reciprocals, two products and their gradients.

``tanh(a + b) = 1 - 2 / (1 + e^2a e^2b)``: with the exponentials of each token at hand a hidden unit costs one
multiply-add, and four of them share one reciprocal. Tiles whose tokens leave the range of float32 take tanh itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.native import library
from attlas.engine.native.pairs import Family, Gradients, Rows, fields, refusal, views
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.scores.additive import Additive
from attlas.scores.base import Tokens

__all__ = ["backward", "forward", "rows", "supports", "transposed"]


def supports(problem: Problem) -> str | None:
    """Return why these kernels do not compute this problem, or None where they do."""
    if type(problem.score) is not Additive:
        return "the score is not additive"
    return refusal(problem, "additive") or refusal(problem, "additive_backward")


def forward(problem: Problem, tokens: tuple[Tokens, Tokens], v: Tensor, plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp; None where a number is NaN or infinite."""
    work = _work(problem, tokens, plan)
    return None if work is None else work.forward(v)


def rows(problem: Problem, tokens: tuple[Tokens, Tokens], plan: Plan) -> Rows | None:
    """Return log-sum-exp, entropy and largest logit of each row; None where a number is NaN or infinite."""
    work = _work(problem, tokens, plan)
    return None if work is None else work.rows()


def transposed(problem: Problem, tokens: tuple[Tokens, Tokens], lse: Tensor, x: Tensor, plan: Plan) -> Tensor | None:
    """Return ``A.mT @ x``, shape (batch, heads, n, e); None where a number is NaN or infinite."""
    work = _work(problem, tokens, plan)
    return None if work is None else work.transposed(lse, x)


def backward(
    problem: Problem,
    tokens: tuple[Tokens, Tokens],
    parameters: Sequence[Tensor],
    lse: Tensor,
    left: Tensor,
    right: Tensor,
    delta: Tensor,
    plan: Plan,
) -> Gradients | None:
    """Return what the tiled backend's `backward` does, by the same recomputation; None as `forward`."""
    work = _work(problem, tokens, plan)
    return None if work is None else work.backward(parameters, lse, left, right, delta)


def _work(problem: Problem, tokens: tuple[Tokens, Tokens], plan: Plan) -> _Additive | None:
    if not isinstance(tokens[0], Tensor) or not isinstance(tokens[1], Tensor):
        return None
    work = _Additive(problem, tokens[0], tokens[1], plan)
    return work if bool(torch.isfinite(work.weight).all()) else None


class _Additive(Family):
    """Calls of the additive kernels."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, plan: Plan) -> None:
        super().__init__(problem, q, k, plan)
        self.own: Tensor = getattr(problem.score, "w_v")  # noqa: B009 - a module types its attributes as anything
        self.weight = self.own.detach().to(problem.dtype).contiguous()

    def sums(self, pairs: Any) -> bool:
        return library.call("additive", pairs=pairs, weight=self.weight.data_ptr()) == library.code("DONE")

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
            known, above, due = (t[view.place].detach().to(dtype).contiguous() for t in (lse, left, delta))
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
        return Gradients([d_q], [d_k], self._through(parameters, d_w), pooled)

    def _through(self, parameters: Sequence[Tensor], d_w: Tensor) -> list[Tensor | None]:
        """Return the gradients of the score's parameters: all but the weights of the units act through the tokens."""
        return [d_w if p is self.own else None for p in parameters]
