"""Some queries and keys of a matrix as a smaller matrix; its masks and scores are translated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attlas.engine.problem import Problem
from attlas.masks.placed import translated_mask
from attlas.scores.placed import translated_score
from attlas.stats.spans import Span, place_span


def spans_of(A: Any, rows: Span | None, columns: Span | None) -> tuple[range, range]:
    """Return two spans as ranges of queries and of keys, or raise a ShapeError."""
    m, n = A.shape[-2:]
    queries = place_span("A.window()", "rows", rows, m, "queries")
    return queries, place_span("A.window()", "columns", columns, n, "keys")


def window_of(A: Any, rows: range, columns: range, lse: Tensor | None = None) -> Any:
    """Return some queries and keys of a matrix as a smaller matrix with unchanged weights.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix.
    rows, columns : range
        Which of its queries and keys.
    lse : Tensor, shape (batch, heads, len(rows)), optional
        Log-sum-exp of the whole rows, where it is known and A does not know it.
    """
    problem = A.checked_problem("A.window()")
    m, n = problem.shape[2:]
    if len(rows) == m and len(columns) == n:
        return A
    if lse is None and A._lse is not None:
        lse = A._lse[:, :, rows.start : rows.stop]
    if len(columns) < n:
        # The log-sum-exp counts keys that the window does not have: a gradient could not reach those.
        lse = window_of(A, rows, range(n))._exact_lse() if lse is None else lse
        problem = A.detach().problem
    elif problem.needs_graph:
        A._gradient.mark_incomplete("a window was taken")
    return A._with_problem(cut_out(problem, rows, columns), A._axes, lse)


def cut_out(problem: Problem, rows: range, columns: range) -> Problem:
    """Return some queries and keys of a problem; if keys are left out, the result needs the whole rows' log-sum-exp."""
    m, n = problem.shape[2:]
    old = rows, columns, m, n
    mask = None if problem.mask is None else translated_mask(problem.mask, *old)
    whole = len(columns) == n
    return replace(
        problem,
        q=problem.q[:, :, rows.start : rows.stop],
        k=problem.k[:, :, columns.start : columns.stop],
        mask=mask,
        score=translated_score(problem.score, *old),
        sink=problem.sink if whole else None,  # it is part of the log-sum-exp
        partial=problem.partial or not whole,
    )
