"""The largest weights of any part of a head by size, exact, without looking at every cell twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from attlas.foundation.tiles import cut
from attlas.view.codes import Array
from attlas.view.exact import Head, Wanted, check_wanted
from attlas.view.pyramid import BASE, Pass, band_height

_BLOCK_SIDE = 1 << BASE
_FEW_CELLS = 1 << 20  # cells that are simply looked at

Cell: TypeAlias = tuple[int, int, float]


def largest(head: Head, rows: range, columns: range, count: int, known: Pass | None, wanted: Wanted) -> list[Cell]:
    """Return the weights of largest size in a window, with their signs, in descending order of size.

    Parameters
    ----------
    head : Head
        The matrix.
    rows, columns : range
        The window.
    count : int
        How many.
    known : Pass, optional
        A complete pass over the head.
    wanted : callable, optional
        Whether somebody still waits.

    Returns
    -------
    list of (row, column, weight)
        Masked cells are not among them.

    Notes
    -----
    The `count` largest cells lie in the `count` blocks whose maxima are largest, so that only those are
    looked at cell by cell. The maxima come from the pass where the window fits its blocks, else from one
    product of the window's queries and keys.
    """
    if len(rows) * len(columns) <= _FEW_CELLS:
        return _largest_of_window(head, rows, columns, count, wanted)
    # The `count` largest cells lie in the `count` blocks of largest maximum.
    best = np.zeros((0, 3))  # maximum, row and column of blocks
    for first, maxima, cells in _block_maxima(head, rows, columns, known, wanted):
        seen = np.flatnonzero(cells.ravel())
        sizes = np.abs(maxima.ravel().astype(np.float64))
        flat = sizes[seen]
        some = seen[_places_of_largest(flat, count)]
        y, x = np.divmod(some, maxima.shape[1])
        found = np.stack([sizes[some], first + y * _BLOCK_SIDE, columns.start + x * _BLOCK_SIDE], 1)
        best = np.concatenate([best, found])
        best = best[_places_of_largest(best[:, 0], count)]
    cells_found: list[Cell] = []
    for _, y, x in best:
        part = (
            range(int(y), min(int(y) + _BLOCK_SIDE, rows.stop)),
            range(int(x), min(int(x) + _BLOCK_SIDE, columns.stop)),
        )
        cells_found += _largest_of_window(head, *part, count, wanted)
    return _sorted_cells(cells_found, count)


def _block_maxima(
    head: Head, rows: range, columns: range, known: Pass | None, wanted: Wanted
) -> Iterator[tuple[int, Array, Array]]:
    """Yield the first row of some blocks, their maxima, and how many of their cells are allowed."""
    if known is not None and _is_whole_blocks(rows, head.m) and _is_whole_blocks(columns, head.n):
        place = tuple(slice(span.start // _BLOCK_SIDE, -(-span.stop // _BLOCK_SIDE)) for span in (rows, columns))
        yield rows.start, known.arrays["max"][place], known.arrays["cells"][place]
        return
    for span in cut(len(rows), band_height(len(columns), head.heads, dense=head.heads > 1)):
        check_wanted(wanted)
        some = range(rows.start + span.start, rows.start + span.stop)
        table = head.blocks(some, columns, _BLOCK_SIDE, "max", wanted)
        yield some.start, table.max, table.cells


def _is_whole_blocks(span: range, size: int) -> bool:
    """Return whether a span of an axis of `size` places consists of whole blocks."""
    return span.start % _BLOCK_SIDE == 0 and (span.stop % _BLOCK_SIDE == 0 or span.stop == size)


def _largest_of_window(head: Head, rows: range, columns: range, count: int, wanted: Wanted) -> list[Cell]:
    """Return the `count` largest cells of a window that are allowed."""
    found: list[Cell] = []
    for part, weights, allowed in head.parts(rows, columns, 1, wanted):
        seen = np.flatnonzero(allowed.ravel())
        some = seen[_places_of_largest(np.abs(weights.ravel()[seen]), count)]
        width = len(columns)
        found += [(part.start + c // width, columns.start + c % width, float(weights.flat[c])) for c in some.tolist()]
    return _sorted_cells(found, count)


def _places_of_largest(values: Array, count: int) -> Array:
    """Return the places of the largest values, in any order."""
    if len(values) <= count:
        return np.arange(len(values))
    places: Array = np.argpartition(values, len(values) - count)[len(values) - count :]
    return places


def _sorted_cells(cells: list[Cell], count: int) -> list[Cell]:
    return sorted(cells, key=lambda cell: (-abs(cell[2]), cell[0], cell[1]))[:count]
