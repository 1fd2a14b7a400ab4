"""Which backend computes a product, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.engine import reference, sdpa, traced
from attlas.engine.autograd import Job, pool, pool_transposed
from attlas.engine.dropout import Dropout
from attlas.engine.native import family
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, full_precision, spread_heads
from attlas.errors import BackendError, explain
from attlas.inputs import tracing
from attlas.scores.base import Dot, Score
from attlas.scores.dot import ScaledDot

__all__ = ["Choice", "choose", "multiply", "multiply_transposed"]


@dataclass(frozen=True)
class Choice:
    """The backend that computes ``A @ v``, and the reason why each other one does not."""

    backend: str
    because: str
    others: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"backend: {self.backend}, since {self.because}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in sorted(self.others.items())])


def choose(problem: Problem, plan: Plan, dropout: Dropout | None = None, dot: Dot | None = None) -> Choice:
    """Choose the backend of ``A @ v``.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run this problem.
    """
    if dot is None:
        with torch.no_grad():
            dot = _dot(problem, problem.tokens)
    refused = sdpa.refusal(problem, dot, dropout=dropout is not None)
    others = {"reference": "it stores the whole matrix; ask for it with Plan(backend='reference')"}
    if plan.backend == "sdpa" and refused is not None:
        raise BackendError(
            explain(
                "A @ v",
                "the plan asks for a backend that cannot run this problem.",
                {"plan": repr(plan), "score": type(problem.score).__name__},
                found=f"sdpa does not run: {refused}",
                fix="leave the plan out, or Plan(backend='tiled').",
            )
        )
    if plan.backend == "reference":
        others = {"sdpa": "the plan asks for the reference", "tiled": "the plan asks for the reference"}
        return Choice("reference", "the plan asks for it", others)
    kernels, reason = _kernels(problem, plan, dropout)
    if refused is not None and kernels is not None:
        others |= {"sdpa": refused, "tiled": "compiled kernels compute the same, faster"}
        return Choice("native", reason, others)
    if plan.backend == "tiled" or refused is not None:
        others["native"] = reason
        others["sdpa"] = refused or "the plan asks for tiled"
        return Choice("tiled", "it runs any score, mask and device in linear memory", others)
    others["tiled"] = "torch's fused kernel computes the same, faster"
    return Choice("sdpa", "the score is a dot product", others)


@full_precision
def multiply(problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None = None) -> tuple[Tensor, Tensor | None]:
    """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp where the backend gave it."""
    if tracing():
        return traced.multiply(problem, v, dropout), None
    graph = torch.is_grad_enabled()
    if not graph and dropout is None and plan.backend in ("auto", "sdpa"):
        at_once = sdpa.at_once(problem, v)
        if at_once is not None:
            return at_once
    tokens = problem.project() if graph else problem.tokens
    dot = None if plan.backend in ("tiled", "reference") else _dot(problem, tokens)
    choice = choose(problem, plan, dropout, dot)
    if choice.backend == "reference":
        return _multiply_reference(problem, v, dropout)
    if choice.backend == "native":
        return pool(Job(problem, tokens, plan, kernels=_kernels(problem, plan, dropout)[0]), v)
    if choice.backend == "tiled" or dot is None:
        return pool(Job(problem, tokens, plan, None, dropout), v)
    if problem.device.type != "cpu":
        return sdpa.fused(problem, dot, v), None
    # From here on the problem is that dot product: the kernel's backward and ours both speak of its tokens.
    score: Score = ScaledDot(dot.scale)
    if dot.bias is not None:
        job = Job(replace(problem, score=score + dot.bias), ((dot.q, ()), (dot.k, ())), plan, dot)
    else:
        job = Job(replace(problem, score=score), (dot.q, dot.k), plan, dot)
    out, lse = pool(job, v.to(dot.q.dtype))
    return out.to(v.dtype), lse if dot.row is None else lse + dot.row.detach()


@full_precision
def multiply_transposed(problem: Problem, x: Tensor, lse: Tensor, plan: Plan) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e)."""
    tokens = problem.project() if torch.is_grad_enabled() else problem.tokens
    return pool_transposed(Job(problem, tokens, plan, kernels=_kernels(problem, plan, None)[0]), x, lse)


def _kernels(problem: Problem, plan: Plan, dropout: Dropout | None) -> tuple[family.Kernels | None, str]:
    """Return the native kernels of a score that is no dot product, or None and the reason."""
    if plan.backend != "auto":
        return None, f"the plan asks for {plan.backend}"
    if dropout is not None:
        return None, "dropout has to be the same when it is recomputed"
    return family.find(problem)


def _dot(problem: Problem, tokens: object) -> Dot | None:
    return problem.score.as_dot(*tokens)  # type: ignore[misc]  # a pair of tokens, in the score's own form


def _multiply_reference(problem: Problem, v: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    result = reference.dense(problem)
    weights = result.weights
    if dropout is not None:
        weights = weights * dropout.keep(problem.tile(*map(range, problem.shape)))
    v = spread_heads(v, problem.shape[1])
    return torch.matmul(weights, v.to(weights.dtype)).to(v.dtype), result.lse.detach()
