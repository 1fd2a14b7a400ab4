"""Some queries and keys of a matrix as a smaller matrix; its masks and scores are translated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.problem import Problem
from attlas.foundation.tiles import Tile
from attlas.masks import BlockState, Mask
from attlas.scores import Score
from attlas.scores.base import Dot, Sum, Tokens
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
    mask = None if problem.mask is None else problem.mask.translate(*old)
    if mask is None and problem.mask is not None:
        mask = Translated(problem.mask, m, n, -rows.start, -columns.start)
    whole = len(columns) == n
    return replace(
        problem,
        q=problem.q[:, :, rows.start : rows.stop],
        k=problem.k[:, :, columns.start : columns.stop],
        mask=mask,
        score=_translated_score(problem.score, *old),
        sink=problem.sink if whole else None,  # it is part of the log-sum-exp
        partial=problem.partial or not whole,
    )


def _translated_score(score: Score, rows: range, columns: range, m: int, n: int) -> Score:
    if isinstance(score, Sum):
        return _translated_score(score.left, rows, columns, m, n) + _translated_score(score.right, rows, columns, m, n)
    translated = score.translate(rows, columns, m, n)
    return TranslatedScore(score, m, n, -rows.start, -columns.start) if translated is None else translated


def original_tile(at: Tile, m: int, n: int, row: int, column: int) -> Tile:
    """Return a tile in the positions of a matrix of m queries and n keys whose first cell is at (row, column) now."""
    return replace(
        at,
        m=m,
        n=n,
        rows=range(at.rows.start - row, at.rows.stop - row),
        columns=range(at.columns.start - column, at.columns.stop - column),
        row_index=None if at.row_index is None else at.row_index - row,
        column_index=None if at.column_index is None else at.column_index - column,
    )


class _Translation:
    """Sizes and position of the original matrix, shared by translated scores and masks.

    Parameters
    ----------
    inner : Score or Mask
        The score or mask of the original matrix, which has m queries and n keys.
    m, n : int
        Sizes of the original matrix.
    row, column : int
        Position of its query 0 and its key 0 in the new matrix; negative if the first ones were cut off.
    """

    def _set_origin(self, m: int, n: int, row: int, column: int) -> None:
        self.m = m
        self.n = n
        self.row = row
        self.column = column

    def original(self, at: Tile) -> Tile:
        """Return a tile of the new matrix in the positions of the original one."""
        return original_tile(at, self.m, self.n, self.row, self.column)


class TranslatedScore(_Translation, Score):
    """A score without a form of its own for another matrix: it is evaluated at its original positions."""

    stored = ("inner", "m", "n", "row", "column")

    def __init__(self, inner: Score, m: int, n: int, row: int, column: int = 0) -> None:
        super().__init__()
        self.inner = inner
        self._set_origin(m, n, row, column)
        self.scratch = inner.scratch
        self.finite = inner.finite
        self.positional = inner.positional

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        return self.inner.project(q, k)

    def forward(self, q: Any, k: Any, at: Tile) -> Tensor:
        return self.inner(q, k, self.original(at))

    def as_dot(self, q: Any, k: Any) -> Dot | None:
        dot = self.inner.as_dot(q, k)
        if dot is None or dot.bias is None:
            return dot
        return replace(dot, bias=TranslatedScore(dot.bias, self.m, self.n, self.row, self.column))


class Translated(_Translation, Mask):
    """A mask without a form of its own for another matrix: it is evaluated at its original positions.

    `device` is the device on which the mask must be evaluated, if its tensors cannot be moved.
    """

    def __init__(self, inner: Mask, m: int, n: int, row: int, column: int, device: torch.device | None = None) -> None:
        self.inner = inner
        self._set_origin(m, n, row, column)
        self.device = device

    def allows(self, at: Tile) -> Tensor:
        return self.inner.allows(self.original(at)).to(at.device)

    def coverage(self, at: Tile) -> BlockState:
        return self.inner.coverage(self.original(at))

    def allowed_runs(self, at: Tile) -> tuple[Tensor, Tensor] | None:
        runs = self.inner.allowed_runs(self._all_columns(at))
        if runs is None:
            return None
        first, stop = (t.to(at.device) + self.column for t in runs)
        return first, stop

    def first_query(self, m: int, n: int) -> int | None:
        first = self.inner.first_query(self.m, self.n)
        return None if first is None else first - self.row + self.column

    def padding(self, at: Tile) -> Tensor | None:
        keys = self.inner.padding(self._all_columns(at))
        return None if keys is None else in_columns(keys.to(at.device), self.column, at.n)

    def name(self) -> str:
        return f"{self.inner.name()} moved by ({self.row}, {self.column})"

    def original(self, at: Tile) -> Tile:
        tile = super().original(at)
        return tile if self.device is None else replace(tile, device=self.device)

    def _all_columns(self, at: Tile) -> Tile:
        return replace(self.original(at), columns=range(self.n), column_index=None)


def in_columns(flags: Tensor, column: int, n: int) -> Tensor:
    """Return flags of keys that begin at `column` as flags of n keys; the others are not set."""
    out = flags.new_zeros(len(flags), n)
    first, stop = max(column, 0), min(column + flags.shape[-1], n)
    out[:, first:stop] = flags[:, first - column : stop - column]
    return out
