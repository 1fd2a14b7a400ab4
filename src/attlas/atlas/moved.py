"""A score of positions in a matrix in which its tokens stand elsewhere: queries of a text that were recorded alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attlas.scores import Score
from attlas.scores.base import Dot, Tokens
from attlas.tiles import Tile

__all__ = ["MovedScore", "moved_tile"]


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
