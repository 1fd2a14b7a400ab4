"""Levels of a picture: blocks that double in size, from single cells to one tile for the whole matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attlas.view.codes import PENDING, encode
from attlas.view.exact import Band, Table

__all__ = ["BASE", "ON_DEMAND", "TILE", "TRACKS", "Pass", "levels_of", "pad", "place_of"]

TILE = 256  # pixels of a side of a tile
ON_DEMAND = 4  # the coarsest level that is computed when it is asked for
BASE = ON_DEMAND + 1  # the level that a background pass keeps; coarser ones follow from it
ROW_TRACKS = ("entropy", "effective_keys", "max_weight")
COLUMN_TRACKS = ("column_mass", "column_max")
TRACKS = (*ROW_TRACKS, *COLUMN_TRACKS)

_BAND_CELLS = 1 << 27  # cells of a band: about a tenth of a second on two cores
_BAND_ROWS = 2048


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


def pad(codes: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Return a whole tile: what lies outside of the matrix is masked."""
    tile = np.zeros((TILE, TILE), dtype="<u2")
    tile[: codes.shape[0], : codes.shape[1]] = codes
    return tile


class Pass:
    """What one pass over a head finds, band by band in any order: blocks of 32 × 32 cells and the tracks.

    Parameters
    ----------
    m, n : int
        Sizes of the matrix.
    arrays : mapping, optional
        Arrays that hold the numbers, by the names of `layout`; new ones in memory without.
    done : array of bool, optional
        Which bands are there already.
    """

    def __init__(
        self,
        m: int,
        n: int,
        arrays: dict[str, NDArray[np.generic]] | None = None,
        *,
        complete: bool = False,
    ) -> None:
        self.m, self.n = m, n
        self.arrays = arrays or {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout(m, n).items()}
        self.height = band_height(n)
        self.done = np.full(-(-m // self.height), complete)
        self.mass = np.zeros(n)

    @property
    def complete(self) -> bool:
        """Whether every band is there."""
        return bool(self.done.all())

    @property
    def progress(self) -> float:
        """Share of the rows that are there."""
        return float(self.done.mean()) if len(self.done) else 1.0

    def rows_of(self, band: int) -> range:
        """Return the rows of a band."""
        return range(band * self.height, min((band + 1) * self.height, self.m))

    def take(self, band: int, found: Band) -> None:
        """Keep what was found of a band."""
        rows = self.rows_of(band)
        place = slice(rows.start >> BASE, -(-rows.stop // (1 << BASE)))
        for name, values in zip(("sum", "max", "cells"), found.blocks, strict=True):
            self.arrays[name][place] = values
        for track, values in enumerate((found.entropy, found.effective_keys, found.max_weight)):
            self.arrays["rows"][track, rows.start : rows.stop] = values
        columns = self.arrays["columns"]
        self.mass += found.column_mass
        columns[0] = self.mass
        np.maximum(columns[1], found.column_max, out=columns[1])
        self.done[band] = True  # last: other threads may read the band from now on

    def next_band(self, row: float) -> int | None:
        """Return the band nearest to a row that is missing, or None."""
        missing = np.flatnonzero(~self.done)
        if not len(missing):
            return None
        return int(missing[np.abs((missing + 0.5) * self.height - row).argmin()])

    def track(self, name: str) -> NDArray[np.float32]:
        """Return a track, NaN where it is not known yet."""
        if name in COLUMN_TRACKS:
            values = self.arrays["columns"][COLUMN_TRACKS.index(name)]
            return values.astype("<f4") if self.complete else np.full(self.n, np.nan, dtype="<f4")
        known = np.repeat(self.done, self.height)[: self.m]
        return np.where(known, self.arrays["rows"][ROW_TRACKS.index(name)], np.float32(np.nan)).astype("<f4")

    def table(self, rows: slice, columns: slice, factor: int) -> Table:
        """Return blocks of `factor` blocks a side, of a part of the base level."""
        numbers = (self.arrays[name][rows, columns] for name in ("sum", "max", "cells"))
        reduced = [
            _pool(values, factor, reduce, dtype)
            for values, reduce, dtype in zip(numbers, (np.add, np.maximum, np.add), ("f8", "f4", "i8"), strict=True)
        ]
        return Table(*reduced)

    def tile(self, level: int, y: int, x: int, pool: str) -> tuple[NDArray[np.uint16], float]:
        """Return the codes of a coarse tile, and the share of its rows that is known."""
        factor = 1 << (level - BASE)
        high, wide = (-(-size // (1 << BASE)) for size in (self.m, self.n))
        rows = slice(min(y * TILE * factor, high), min((y + 1) * TILE * factor, high))
        columns = slice(min(x * TILE * factor, wide), min((x + 1) * TILE * factor, wide))
        known = self._known(rows, factor)
        found = self.table(rows, columns, factor)
        codes = encode(found.mean if pool == "mean" else found.max, found.cells > 0)
        codes[~known] = PENDING
        return pad(codes), float(known.mean()) if len(known) else 1.0

    def _known(self, rows: slice, factor: int) -> NDArray[np.bool_]:
        """Return which rows of larger blocks are complete."""
        base = np.repeat(self.done, self.height >> BASE)[rows]
        starts = np.arange(0, len(base), factor)
        return np.logical_and.reduceat(base, starts) if len(base) else base


def band_height(n: int) -> int:
    """Return the rows of a band: a power of two, so that blocks lie within bands."""
    rows = min(max(_BAND_CELLS // max(n, 1), 1 << BASE), _BAND_ROWS)
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


def _pool(values: NDArray[np.generic], factor: int, reduce: np.ufunc, dtype: str) -> NDArray[np.generic]:
    if factor == 1 or not values.size:
        return values.astype(dtype)
    across = reduce.reduceat(values, np.arange(0, values.shape[1], factor), axis=1, dtype=dtype)
    return reduce.reduceat(across, np.arange(0, values.shape[0], factor), axis=0, dtype=dtype)
