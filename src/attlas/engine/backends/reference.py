"""The definition, dense and in float64: the oracle that every other backend is held against."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.engine.backend import Backend, Request
from attlas.engine.costs import Operation
from attlas.engine.held import without_graph
from attlas.engine.online import product
from attlas.engine.problem import Problem, full_precision, spread_heads, tree_map
from attlas.scores.base import Tokens


class Dense(NamedTuple):
    """The whole matrix: logits (-inf where masked), log-sum-exp and weights."""

    logits: Tensor
    lse: Tensor
    weights: Tensor


class Reference(Backend):
    """The definition as a backend: for tests, and for who asks for it."""

    name = row = "reference"
    computes = frozenset({"output"})

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        if request.plan.backend != self.name:
            return "it stores the whole matrix; ask for it with Plan(backend='reference')"
        return None

    def recorded(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the output from the whole matrix; autograd records each operation."""
        problem, dropout = request.problem, request.dropout
        result = dense(problem, tokens=request.tokens)
        weights = result.weights
        if dropout is not None:
            weights = weights * dropout.keep(problem.tile(*map(range, problem.shape)))
        values = spread_heads(v, problem.shape[1]).to(weights.dtype)
        return product(weights, values, lambda: result.logits != -math.inf).to(v.dtype), result.lse.detach()


BACKENDS = (Reference(),)


@full_precision
def dense(problem: Problem, rows: Tensor | range | None = None, tokens: tuple[Tokens, Tokens] | None = None) -> Dense:
    """Compute softmax(score(Q, K)) from its definition, whole, with autograd's own gradients.

    Parameters
    ----------
    problem : Problem
        The matrix.
    rows : Tensor or range, optional
        Queries that are computed; the default is all.
    tokens : tuple of Tokens, optional
        Projected queries and keys, where they are known.

    Notes
    -----
    Memory: m · n numbers per head, several times. For tests and small matrices.
    """
    batch, heads, m, n = problem.shape
    at = problem.tile(*map(range, problem.shape))
    q, k = problem.project() if tokens is None else tokens
    if rows is not None:
        m, index = len(rows), slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        at = replace(at, rows=rows) if isinstance(rows, range) else replace(at, rows=range(m), row_index=rows)
        q = tree_map(lambda t: t[:, :, index], q)
    k = tree_map(lambda t: spread_heads(t, heads), k)
    q, k = tree_map(lambda t: t.to(problem.dtype), (q, k))
    with problem.recording():
        logits = problem.score(q, k, at).expand(batch, heads, m, n)
    if problem.mask is not None:
        logits = logits.masked_fill(~problem.mask.allows(at), -math.inf)
    sink = torch.full((heads,), -math.inf, dtype=problem.dtype, device=problem.device)
    if problem.sink is not None:
        sink = problem.sink.to(problem.dtype)
    with_sink = torch.cat([logits, sink.view(1, -1, 1, 1).expand(batch, heads, m, 1)], dim=-1)
    # A row with no key at all would be 0 / 0: its weights are 0 and nothing flows back through it.
    empty = (with_sink == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(with_sink.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return Dense(logits, torch.logsumexp(with_sink, dim=-1), weights[..., :n])


def in_float64(problem: Problem) -> Problem:
    """Return the same problem with tokens, sink and score parameters in float64."""
    sink, score = None if problem.sink is None else problem.sink.double(), without_graph(problem.score).double()
    return replace(problem, q=problem.q.double(), k=problem.k.double(), score=score, sink=sink)
