"""Some queries and keys of a matrix as a matrix of their own: masks and scores are asked in their old places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.problem import Problem
from attlas.masks import BlockState, Mask
from attlas.scores import Score
from attlas.scores.base import Dot, Sum, Tokens
from attlas.stats.spans import Span, check_span, place_span
from attlas.tiles import Tile

__all__ = ["Moved", "MovedScore", "cut_out", "in_columns", "moved_tile", "spans_of", "window_of"]


def spans_of(A: Any, rows: Span | None, columns: Span | None) -> tuple[range, range]:
    """Return which queries and keys of a matrix are meant, or raise a ShapeError."""
    for name, span in (("rows", rows), ("columns", columns)):
        if span is not None:
            check_span("A.window()", name, span)
    m, n = A.shape[-2:]
    queries = place_span("A.window()", "rows", rows, m, "queries")
    return queries, place_span("A.window()", "columns", columns, n, "keys")


def window_of(A: Any, rows: range, columns: range, lse: Tensor | None = None) -> Any:
    """Return some queries and keys of a matrix as a matrix of their own, every weight as it was.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix.
    rows, columns : range
        Which of its queries and keys.
    lse : Tensor, shape (batch, heads, len(rows)), optional
        Log-sum-exp of the whole rows, where it is known and A does not know it.
    """
    problem, plan = A.current("A.window()"), A.plan
    m, n = problem.shape[2:]
    if len(rows) == m and len(columns) == n:
        return A
    if lse is None and A._lse is not None:
        lse = A._lse[:, :, rows.start : rows.stop]
    if len(columns) < n:
        # The log-sum-exp counts keys that the window does not have: a gradient could not reach those.
        lse = window_of(A, rows, range(n))._known_lse() if lse is None else lse
        problem = A.detach().problem
    elif problem.needs_graph:
        A._gradient.lose("a window was taken")
    return type(A)(cut_out(problem, rows, columns), plan, A._axes, lse)


def cut_out(problem: Problem, rows: range, columns: range) -> Problem:
    """Return some queries and keys of a problem; without all keys, a problem that needs the whole rows' log-sum-exp."""
    m, n = problem.shape[2:]
    old = rows, columns, m, n
    mask = None if problem.mask is None else problem.mask.translate(*old)
    if mask is None and problem.mask is not None:
        mask = Moved(problem.mask, m, n, -rows.start, -columns.start)
    whole = len(columns) == n
    return replace(
        problem,
        q=problem.q[:, :, rows.start : rows.stop],
        k=problem.k[:, :, columns.start : columns.stop],
        mask=mask,
        score=_score(problem.score, *old),
        sink=problem.sink if whole else None,  # it is part of the log-sum-exp
        partial=problem.partial or not whole,
    )


def _score(score: Score, rows: range, columns: range, m: int, n: int) -> Score:
    if isinstance(score, Sum):
        return _score(score.left, rows, columns, m, n) + _score(score.right, rows, columns, m, n)
    found = score.translate(rows, columns, m, n)
    return MovedScore(score, m, n, -rows.start, -columns.start) if found is None else found


def moved_tile(at: Tile, m: int, n: int, row: int, column: int) -> Tile:
    """Return a tile as seen from a matrix of m queries and n keys whose first ones stand at `row` and `column`."""
    return replace(
        at,
        m=m,
        n=n,
        rows=range(at.rows.start - row, at.rows.stop - row),
        columns=range(at.columns.start - column, at.columns.stop - column),
        row_index=None if at.row_index is None else at.row_index - row,
        column_index=None if at.column_index is None else at.column_index - column,
    )


class MovedScore(Score):
    """A score that looks at places, asked for a matrix in which its queries and keys stand elsewhere.

    Parameters
    ----------
    inner : Score
        A score of m queries and n keys.
    m, n : int
        Sizes of the matrix that it belongs to.
    row, column : int
        Where its query 0 and its key 0 stand now; negative where the first ones were cut off.
    """

    stored = ("inner", "m", "n", "row", "column")

    def __init__(self, inner: Score, m: int, n: int, row: int, column: int = 0) -> None:
        super().__init__()
        self.inner = inner
        self.m = m
        self.n = n
        self.row = row
        self.column = column
        self.scratch = inner.scratch
        self.finite = inner.finite
        self.positional = inner.positional

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        return self.inner.project(q, k)

    def forward(self, q: Any, k: Any, at: Tile) -> Tensor:
        return self.inner(q, k, moved_tile(at, self.m, self.n, self.row, self.column))

    def as_dot(self, q: Any, k: Any) -> Dot | None:
        dot = self.inner.as_dot(q, k)
        if dot is None or dot.bias is None:
            return dot
        return replace(dot, bias=MovedScore(dot.bias, self.m, self.n, self.row, self.column))


class Moved(Mask):
    """A mask of one matrix, asked for another in which its queries and keys stand elsewhere.

    Parameters
    ----------
    inner : Mask
        A mask of m queries and n keys.
    m, n : int
        Sizes of the matrix that it belongs to.
    row, column : int
        Where its query 0 and its key 0 stand now; negative where the first ones were cut off.
    device : torch.device, optional
        Where the mask must be asked, if that is not where the tokens are.
    """

    def __init__(self, inner: Mask, m: int, n: int, row: int, column: int, device: torch.device | None = None) -> None:
        self.inner = inner
        self.m = m
        self.n = n
        self.row = row
        self.column = column
        self.device = device

    def allows(self, at: Tile) -> Tensor:
        return self.inner.allows(self._there(at)).to(at.device)

    def coverage(self, at: Tile) -> BlockState:
        return self.inner.coverage(self._there(at))

    def interval(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        # The inner mask is asked about whole rows, as it must be, and answers in its own places.
        there = replace(self._there(at), columns=range(self.n), column_index=None)
        found = self.inner.interval(there)
        if found is None:
            return None
        first, stop = (t.to(at.device) + self.column for t in found)
        return first, stop

    def first_query(self, m: int, n: int) -> int | None:
        first = self.inner.first_query(self.m, self.n)
        return None if first is None else first - self.row + self.column

    def padding(self, at: Tile) -> Tensor | None:
        whole = replace(self._there(at), columns=range(self.n), column_index=None)
        found = self.inner.padding(whole)
        return None if found is None else in_columns(found.to(at.device), self.column, at.n)

    def name(self) -> str:
        return f"{self.inner.name()} moved by ({self.row}, {self.column})"

    def _there(self, at: Tile) -> Tile:
        there = moved_tile(at, self.m, self.n, self.row, self.column)
        return there if self.device is None else replace(there, device=self.device)


def in_columns(found: Tensor, column: int, n: int) -> Tensor:
    """Return flags of keys that begin at `column` as flags of n keys; the others are not set."""
    out = found.new_zeros(len(found), n)
    first, stop = max(column, 0), min(column + found.shape[-1], n)
    out[:, first:stop] = found[:, first - column : stop - column]
    return out
