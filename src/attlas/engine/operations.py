"""What is computed of a matrix: outputs, statistics and log-sum-exps, by whichever backend is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attlas.engine import online
from attlas.engine.autodiff import autograd
from attlas.engine.backend import Form, Request
from attlas.engine.backends import reference
from attlas.engine.dispatch import Choice, allowed_backends, candidates, choose
from attlas.engine.dropout import Dropout
from attlas.engine.outputs import MISSING
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, full_precision
from attlas.engine.statistic import Statistic
from attlas.foundation.tiles import Tile
from attlas.scores.dot import ScaledDot


def explain(problem: Problem, plan: Plan) -> Choice:
    """Say which backend computes ``A @ v``."""
    with torch.no_grad():
        return choose(Request(problem, problem.tokens, plan))


@full_precision
def multiply(problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None = None) -> tuple[Tensor, Tensor | None]:
    """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp where the backend gave it."""
    if torch.is_grad_enabled() and (v.requires_grad or problem.requires_grad):
        return _product_with_graph(problem, v, plan, dropout)
    if dropout is None and (result := _quick_product(problem, v, plan)) is not None:
        return result
    return _cheapest_product(problem, v, plan, dropout)


def _quick_product(problem: Problem, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor] | None:
    """Return output and log-sum-exp of a plain scaled dot product by one call of a kernel; None for all else."""
    if problem.mask is not None or problem.sink is not None or type(problem.score) is not ScaledDot:
        return None
    for backend in allowed_backends(plan.backend, "output", problem.device.type):
        if backend.has_fast_path(problem):
            return backend.fast_path(problem, v)
    return None


@torch.no_grad()
def _cheapest_product(problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None) -> tuple[Tensor, Tensor | None]:
    """Return output and log-sum-exp by the cheapest backend; code of the user may read tensors that want a gradient."""
    request = Request(problem, problem.tokens, plan, dropout)
    backends = candidates(request, "output")
    backend = next(backends)
    # Such a backend leaves out the constant that a dot product adds to each row (`dot.row`): softmax does not see it,
    # and the log-sum-exp gets it back below.
    dot = request.dot if backend.takes_fused else None
    values = v if dot is None else v.to(dot.q.dtype)
    found = backend.recorded(request, values) or backend.forward(request, values)
    # Numbers that this backend does not sum: the others take the tokens that it takes.
    out, lse = autograd.forward(backend.prepare(request), values, backends) if found is None else found
    return out.to(v.dtype), lse if lse is None or dot is None or dot.row is None else lse + dot.row


def _product_with_graph(
    problem: Problem, v: Tensor, plan: Plan, dropout: Dropout | None
) -> tuple[Tensor, Tensor | None]:
    """Return the output with its graph, and the log-sum-exp without."""
    request = Request(problem, problem.project(), plan, dropout, learned=bool(problem.parameters))
    backends = candidates(request, "output")
    backend = next(backends)
    # As in `_cheapest_product`: the log-sum-exp gets the constant of each row back below.
    dot = request.dot if backend.takes_fused else None
    request = backend.prepare(request)
    values = v if dot is None else v.to(dot.q.dtype)
    recorded = backend.recorded(request, values)
    out, lse = recorded or autograd.pool(request, values, chain((backend,), backends))
    return out.to(v.dtype), lse if lse is None or dot is None or dot.row is None else lse + dot.row.detach()


@torch.no_grad()
@full_precision
def multiply_and_collect(
    problem: Problem, v: Tensor, plan: Plan, statistics: Sequence[Statistic]
) -> tuple[Tensor, Tensor, list[Any]] | None:
    """Return ``A @ v``, the log-sum-exp and statistics from one call of a kernel; None where no kernel gives both.

    A statistic that does not come from the same call is `MISSING`. There is no graph, no dropout, and no key outside of
    the matrix.
    """
    request = Request(problem, problem.tokens, plan)
    return next(candidates(request, "statistics")).output_and_statistics(request, v, statistics)


@full_precision
def multiply_transposed(problem: Problem, x: Tensor, lse: Callable[[], Tensor], plan: Plan) -> Tensor:
    """Return ``A.mT @ x``, shape (batch, heads, n, e); `lse` gives the log-sum-exp where it is needed."""
    graph = torch.is_grad_enabled() and (x.requires_grad or problem.requires_grad)
    with torch.set_grad_enabled(graph):
        request = Request(problem, problem.project() if graph else problem.tokens, plan)
        request = next(candidates(request, "transposed")).prepare(request)
        if graph:
            return autograd.pool_transposed(request, x, lse())
        return autograd.transposed(request, lse(), x).to(x.dtype)


@torch.no_grad()
@full_precision
def collect(
    problem: Problem, statistics: Sequence[Statistic], plan: Plan, lse: Tensor | None = None
) -> tuple[list[Any], Tensor | None]:
    """Compute statistics, and the log-sum-exp where it comes out: each by the first backend that gives it."""
    request = Request(problem, problem.tokens, plan)
    results: list[Any] = [MISSING] * len(statistics)
    asked = statistics
    for number, backend in enumerate(candidates(request, "statistics")):
        # Each backend rounds large logits in its own way: by the sums of another, weights do not sum to 1.
        other = number and lse is not None and not problem.partial and online.exceeds(lse, 2 * online.SMALL)
        if (found := backend.statistics(request, asked, None if other else lse)) is not None:
            given = iter(found[0])
            results = [next(given) if result is MISSING else result for result in results]
            asked = [s for s, result in zip(statistics, results, strict=True) if result is MISSING]
            lse = lse if other else found[1]
        if not asked:
            break
    return results, lse


@torch.no_grad()
@full_precision
def log_sum_exp(problem: Problem, plan: Plan) -> Tensor:
    """Return the log-sum-exp of each row, shape (batch, heads, m)."""
    request = Request(problem, problem.tokens, plan)
    found = (backend.log_sum_exp(request) for backend in candidates(request, "statistics"))
    return next(lse for lse in found if lse is not None)


@torch.no_grad()
@full_precision
def cells(problem: Problem, at: Tile, plan: Plan, lse: Tensor | None = None, form: Form = "weights") -> Tensor:
    """Return some cells, shape ``at.shape``; `lse`, shape (batch, heads, m), is that of all rows, where it is known."""
    request = Request(problem, problem.tokens, plan)
    found = (backend.cells(request, at, lse, form) for backend in candidates(request, "cells"))
    return next(tile for tile in found if tile is not None)


def dense(problem: Problem, rows: Tensor | range | None = None) -> reference.Dense:
    """Return logits, log-sum-exp and weights of some rows, or all, by the definition of softmax."""
    return reference.dense(problem, rows)


def defined(problem: Problem, rows: Tensor) -> reference.Dense:
    """Return logits, log-sum-exp and weights of some rows by the definition of softmax, computed in float64."""
    return reference.dense(reference.in_float64(problem), rows)


@full_precision
def record(
    problem: Problem, statistics: Sequence[Statistic], plan: Plan, compute: Callable[[], tuple[list[Any], Tensor]]
) -> tuple[list[Any], Tensor]:
    """Return statistics with their graph, and the log-sum-exp without.

    `compute` gives the numbers of both, without a graph.
    """
    request = Request(problem, problem.project(), plan)
    # Fused kernels give the gradient in the tokens of a dot product, but none in a constant that it adds to each row.
    # Softmax does not see that constant; a statistic may (LogSumExp).
    if request.dot is not None and request.dot.row is None:
        request = request.as_fused()
    return autograd.collect(request, statistics, compute)
