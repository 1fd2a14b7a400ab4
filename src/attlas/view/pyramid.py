"""Levels of a picture: blocks that double in size, from single cells to one tile for the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from attlas.view.codes import PENDING, Array, larger, largest_of_blocks, reduce_blocks
from attlas.view.exact import Band

TILE = 256  # pixels of a side of a tile
ON_DEMAND = 4  # the coarsest level that is computed when it is asked for
BASE = ON_DEMAND + 1  # the level that a background pass keeps; coarser ones follow from it
ROW_TRACKS = ("entropy", "effective_keys", "max_weight")
COLUMN_TRACKS = ("column_mass", "column_max")
TRACKS = (*ROW_TRACKS, *COLUMN_TRACKS)

_BAND_CELLS = 1 << 27  # cells of a band: about a tenth of a second on two cores
_BAND_ROWS = 2048
_DENSE_COST = 32  # how much longer a cell takes where the weights of several heads are written out


def levels_of(m: int, n: int) -> int:
    """Return how many levels a matrix has: the last one fits into one tile.

    Examples
    --------
    >>> levels_of(256, 100), levels_of(257, 1), levels_of(100_000, 100_000), levels_of(0, 0)
    (1, 2, 10, 1)
    """
    return max(-(-max(m, n, 1) // TILE) - 1, 0).bit_length() + 1


def place_of(level: int, index: int, size: int) -> range:
    """Return the cells of an axis of `size` cells that one row or column of tiles covers."""
    span = TILE << level
    return range(min(index * span, size), min((index + 1) * span, size))


def pad(codes: Array) -> Array:
    """Return a whole tile: what lies outside of the matrix is masked."""
    tile = np.zeros((TILE, TILE), dtype="<u2")
    tile[: codes.shape[0], : codes.shape[1]] = codes
    return tile


class Pass:
    """What one pass over a head finds, band by band in any order: blocks of 32 × 32 cells, and the tracks.

    Parameters
    ----------
    m, n : int
        Sizes of the matrix.
    arrays : mapping of array
        Room for the numbers, as `layout` says; read only where the pass is complete.
    complete : bool
        Whether they hold a whole pass already.
    height : int
        Rows of a band.

    Notes
    -----
    Memory: 10 bytes a block, 98 MB for 100,000 × 100,000, in files that are mapped.
    """

    def __init__(self, m: int, n: int, arrays: Mapping[str, Array], height: int, *, complete: bool = False) -> None:
        self.m, self.n = m, n
        self.arrays = arrays
        self.height = height
        self.done = np.full(-(-m // self.height), complete)  # which bands are computed
        self._mass = np.zeros(0 if complete else n)  # of the columns, over the bands so far, in float64

    @property
    def complete(self) -> bool:
        """Whether every band is there."""
        return bool(self.done.all())

    @property
    def progress(self) -> float:
        """Share of the bands that are there."""
        return float(self.done.mean()) if len(self.done) else 1.0

    def rows_of(self, band: int) -> range:
        """Return the rows of a band."""
        return range(band * self.height, min((band + 1) * self.height, self.m))

    def next_band(self, row: float) -> int | None:
        """Return the missing band that is nearest to a row, or None."""
        missing = np.flatnonzero(~self.done)
        return int(missing[np.abs((missing + 0.5) * self.height - row).argmin()]) if len(missing) else None

    def add(self, band: int, found: Band) -> None:
        """Write the numbers of a band into the arrays."""
        rows = self.rows_of(band)
        place = slice(rows.start >> BASE, -(-rows.stop // (1 << BASE)))
        for name, values in zip(("sum", "max", "cells"), found.blocks, strict=True):
            self.arrays[name][place] = values
        for track, numbers in enumerate((found.entropy, found.effective_keys, found.max_weight)):
            self.arrays["rows"][track, rows.start : rows.stop] = numbers
        mass, largest = self.arrays["columns"]
        self._mass += found.column_mass  # in float64: there are many bands
        mass[:] = self._mass
        largest[:] = larger(largest, found.column_max)
        self.done[band] = True  # last: other threads may read the band from now on

    def track(self, name: str) -> Array:
        """Return a track as float32, NaN where it is not known yet: a column until all its rows are there."""
        if name in COLUMN_TRACKS:
            values = self.arrays["columns"][COLUMN_TRACKS.index(name)]
            return values.astype("<f4") if self.complete else np.full(self.n, np.nan, dtype="<f4")
        known = np.repeat(self.done, self.height)[: self.m]
        numbers = self.arrays["rows"][ROW_TRACKS.index(name)]
        return np.where(known, numbers, np.float32(np.nan)).astype("<f4")

    def tile(
        self, level: int, y: int, x: int, pool: str, encode: Callable[[Array, Array], Array]
    ) -> tuple[Array, float]:
        """Return the codes of a coarse tile, which `encode` makes, and the share of its known rows."""
        factor = 1 << (level - BASE)
        rows, columns = (place_of(level, at, size) for at, size in ((y, self.m), (x, self.n)))
        high, wide = (slice(span.start >> BASE, -(-span.stop // (1 << BASE))) for span in (rows, columns))
        is_done = np.repeat(self.done, self.height >> BASE)[high]  # of each row of the pass's own blocks
        # Read before the numbers: a band that is done after this line is not in them.
        known = np.logical_and.reduceat(is_done, np.arange(0, len(is_done), factor)) if len(is_done) else is_done
        weights, allowed = self._pooled_blocks(high, wide, factor, pool)
        codes = encode(weights, allowed)
        codes[~known] = PENDING
        return pad(codes), float(known.mean()) if len(known) else 1.0

    def _pooled_blocks(self, high: slice, wide: slice, factor: int, pool: str) -> tuple[Array, Array]:
        """Return the pooled weights of blocks of `factor` blocks a side, and where any cell is allowed."""
        cells = summed(self.arrays["cells"][high, wide], factor, np.add, "i8")
        if pool == "max":
            return _largest_of_blocks(self.arrays["max"][high, wide], factor), cells > 0
        return summed(self.arrays["sum"][high, wide], factor, np.add, "f8") / np.maximum(cells, 1), cells > 0


def band_height(n: int, heads: int = 1, *, dense: bool = False) -> int:
    """Return how many rows of n keys are computed at a time: a power of two, so that no block lies in two such bands.

    They have at most `_BAND_CELLS` cells of all heads together. `dense`: the weights of these heads are written out, so
    that a cell takes `_DENSE_COST` times as long.

    Examples
    --------
    >>> band_height(100_000), band_height(1000), band_height(100_000, heads=12, dense=True)
    (1024, 2048, 32)
    """
    cells = max(n, 1) * heads * (_DENSE_COST if dense else 1)
    rows = min(max(_BAND_CELLS // cells, 1 << BASE), _BAND_ROWS)
    return 1 << (rows.bit_length() - 1)


def layout(m: int, n: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each array of a pass."""
    blocks = -(-m // (1 << BASE)), -(-n // (1 << BASE))
    return {
        "sum": (blocks, "<f4"),
        "max": (blocks, "<f4"),
        "cells": (blocks, "<u2"),
        "rows": ((len(ROW_TRACKS), m), "<f4"),
        "columns": ((len(COLUMN_TRACKS), n), "<f4"),
    }


def summed(values: Array, factor: int, reduce: np.ufunc, dtype: str) -> Array:
    """Reduce blocks of ``factor × factor`` numbers to one each; those at the end may be smaller."""
    if factor == 1 or not values.size:
        return values.astype(dtype)
    return reduce_blocks(values, *_block_starts(values, factor), reduce, dtype)


def _largest_of_blocks(values: Array, factor: int) -> Array:
    """Return the number of largest size of each block of ``factor × factor``, float32."""
    if factor == 1 or not values.size:
        return values.astype("f4")
    return largest_of_blocks(values, *_block_starts(values, factor), "f4")


def _block_starts(values: Array, factor: int) -> tuple[Array, Array]:
    rows, columns = (np.arange(0, size, factor) for size in values.shape)
    return rows, columns
