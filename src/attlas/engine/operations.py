"""What is computed of a matrix: outputs, statistics and log-sum-exps, by whichever backend is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attlas.engine import online, traced
from attlas.engine.autodiff import autograd
from attlas.engine.autodiff.autograd import pool, pool_transposed
from attlas.engine.backend import MISSING, Request
from attlas.engine.dispatch import Choice, allowed_backends, candidates, choose
from attlas.engine.dropout import Dropout
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, full_precision
from attlas.engine.statistic import Statistic


def explain(problem: Problem, plan: Plan) -> Choice:
    """Say which backend computes ``A @ v``."""
    with torch.no_grad():
        return choose(Request(problem, problem.tokens, plan))


@full_precision
def multiply(problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None = None) -> tuple[Tensor, Tensor | None]:
    """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp where the backend gave it."""
    if problem.is_symbolic:
        return traced.multiply(problem, v, dropout), None
    graph = torch.is_grad_enabled()
    if not graph and dropout is None:
        quick = next((backend for backend in allowed_backends(plan.backend) if backend.has_fast_path(problem)), None)
        if quick is not None and (result := quick.fast_path(problem, v)) is not None:
            return result
    request = Request(problem, problem.project() if graph else problem.tokens, plan, dropout)
    request = replace(request, learned=graph and bool(problem.parameters))
    backends = candidates(request, "output")
    backend = next(backends)
    row = None if request.dot is None or not backend.takes_fused else request.dot.row
    request = backend.prepare(request)
    values = v if request.fused is None else v.to(request.fused.q.dtype)
    if (recorded := backend.recorded(request, values)) is not None:
        return recorded
    out, lse = pool(request, values, chain((backend,), backends))
    return out.to(v.dtype), lse if row is None else lse + row.detach()


@full_precision
def multiply_transposed(problem: Problem, x: Tensor, lse: Callable[[], Tensor], plan: Plan) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e); `lse` gives the log-sum-exp where it is needed."""
    if problem.is_symbolic:
        return traced.multiply_transposed(problem, x)
    tokens = problem.project() if torch.is_grad_enabled() else problem.tokens
    request = Request(problem, tokens, plan)
    return pool_transposed(next(candidates(request, "transposed")).prepare(request), x, lse())


@torch.no_grad()
@full_precision
def collect(
    problem: Problem, statistics: Sequence[Statistic], plan: Plan, lse: Tensor | None = None
) -> tuple[list[Any], Tensor | None]:
    """Compute statistics, and the log-sum-exp where it comes out: each by the first backend that gives it."""
    request = Request(problem, problem.tokens, plan)
    results: list[Any] = [MISSING] * len(statistics)
    for number, backend in enumerate(candidates(request, "statistics")):
        asked = [s for s, result in zip(statistics, results, strict=True) if result is MISSING]
        # Each backend rounds large logits in its own way: by the sums of another, weights do not sum to 1.
        other = asked and number and lse is not None and not problem.partial and online.exceeds(lse, 2 * online.SMALL)
        if asked and (found := backend.statistics(request, asked, None if other else lse)) is not None:
            given = iter(found[0])
            results = [next(given) if result is MISSING else result for result in results]
            lse = lse if other else found[1]
    return results, lse


@torch.no_grad()
@full_precision
def log_sum_exp(problem: Problem, plan: Plan) -> Tensor:
    """Return the log-sum-exp of each row, shape (batch, heads, m)."""
    request = Request(problem, problem.tokens, plan)
    found = (backend.log_sum_exp(request) for backend in candidates(request, "statistics"))
    return next(lse for lse in found if lse is not None)


@full_precision
def record(
    problem: Problem, statistics: Sequence[Statistic], plan: Plan, compute: Callable[[], tuple[list[Any], Tensor]]
) -> tuple[list[Any], Tensor]:
    """Return statistics with their graph, and the log-sum-exp; `compute` gives both, without a graph."""
    request = Request(problem, problem.project(), plan)
    if request.dot is not None and request.dot.row is None and request.dot.bias is None:
        request = request.as_fused()  # what depends on the constant of a row alone would have to follow it
    return autograd.collect(request, statistics, compute)
