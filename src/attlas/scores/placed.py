"""A score seen from another matrix than its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from attlas.foundation.placed import original_tile
from attlas.foundation.tiles import Tile
from attlas.scores.base import Dot, Score, Sum, Tokens
from attlas.scores.bias import Bias


def translated_score(score: Score, rows: range, columns: range, m: int, n: int) -> Score:
    """Return a score for a window of its matrix, or for a larger matrix that contains it.

    Parameters
    ----------
    score : Score
        The score of a matrix of m queries and n keys.
    rows, columns : range
        Positions of the other matrix's queries and keys in the matrix of the score.
    m, n : int
        Sizes of the matrix of the score.

    Returns
    -------
    Score
        What `Score.translate` returns, or a `PlacedScore` where that is None; a sum of what its parts give.
    """
    if isinstance(score, Sum):
        left, right = (translated_score(part, rows, columns, m, n) for part in (score.left, score.right))
        return left + right
    own = score.translate(rows, columns, m, n)
    # Where the rows and columns of the own matrix of the score stand, counted from the window.
    placed = range(-rows.start, m - rows.start), range(-columns.start, n - columns.start)
    return PlacedScore(score, *placed) if own is None else own


class PlacedScore(Score):
    """A score of one matrix, seen from another one: it is evaluated at the positions of its own matrix.

    Recordings store it as "MovedScore".

    Parameters
    ----------
    inner : Score
        The score of a matrix of ``len(rows)`` queries and ``len(columns)`` keys.
    rows, columns : range
        Where the queries and keys of that matrix stand in the other one. They begin below 0 where the first ones
        were cut off.
    """

    def __init__(self, inner: Score, rows: range, columns: range) -> None:
        super().__init__()
        self.inner = inner
        self.rows = rows
        self.columns = columns
        self.scratch = inner.scratch
        self.finite = inner.finite
        self.positional = inner.positional

    def to_dict(self) -> dict[str, Any]:
        sizes = {"m": len(self.rows), "n": len(self.columns)}
        return {"inner": self.inner} | sizes | {"row": self.rows.start, "column": self.columns.start}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        # `row` and `column` are where the own matrix begins, `m` and `n` its sizes.
        m, n, row, column = (settings[name] for name in ("m", "n", "row", "column"))
        return cls(settings["inner"], range(row, row + m), range(column, column + n))

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        return self.inner.project(q, k)

    def forward(self, q: Any, k: Any, at: Tile) -> Tensor:
        # `original_tile` is the same tile at the positions of the score's own matrix.
        return self.inner(q, k, original_tile(at, self.rows, self.columns))

    def as_dot(self, q: Any, k: Any) -> Dot | None:
        # The dot product of tokens is the same anywhere; only a bias depends on positions.
        dot = self.inner.as_dot(q, k)
        if dot is None or dot.bias is None:
            return dot
        return replace(dot, bias=PlacedScore(dot.bias, self.rows, self.columns))

    def bias(self, at: Tile) -> Bias | None:
        return self.inner.bias(original_tile(at, self.rows, self.columns))
