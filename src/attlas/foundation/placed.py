"""A tile of one matrix at its positions in another one."""

from __future__ import annotations

from dataclasses import replace

from attlas.foundation.tiles import Tile


def original_tile(at: Tile, rows: range, columns: range) -> Tile:
    """Return a tile at its positions in the matrix that something was made for.

    Parameters
    ----------
    at : Tile
        The tile of another matrix.
    rows, columns : range
        Where the queries and keys of the original matrix stand in the other one. Positions of the result lie outside of
        the original matrix where those of the tile do.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.foundation.placed import original_tile
    >>> A = attlas.attend(torch.zeros(4, 2), torch.zeros(6, 2))
    >>> at = original_tile(
    ...     A.problem.tile(range(1), range(1), range(1, 3), range(6)), range(1, 4), range(2, 6)
    ... )
    >>> at.rows, at.columns, at.m, at.n
    (range(0, 2), range(-2, 4), 3, 4)
    """
    row, column = rows.start, columns.start
    return replace(
        at,
        m=len(rows),
        n=len(columns),
        rows=range(at.rows.start - row, at.rows.stop - row),
        columns=range(at.columns.start - column, at.columns.stop - column),
        row_index=None if at.row_index is None else at.row_index - row,
        column_index=None if at.column_index is None else at.column_index - column,
    )
