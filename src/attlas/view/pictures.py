"""Tiles and thumbnails: pictures of pooled weights, as codes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from attlas.stats.pooled import block_edges
from attlas.view.cache import Cache
from attlas.view.codes import PENDING, Array, largest_of_blocks, reduce_blocks
from attlas.view.exact import Head, Wanted
from attlas.view.passes import Passes
from attlas.view.pyramid import BASE, ON_DEMAND, Pass, pad, place_of
from attlas.view.source import Place

_MOST_TILE_BYTES = 64 << 20  # of tiles that are kept
_MOST_EXACT_CELLS = 1 << 24  # cells up to which a thumbnail is computed whole


class Picture(NamedTuple):
    """Codes, which share of them is computed, and whether they show a sample of the rows."""

    codes: Array
    progress: float = 1.0
    sampled: bool = False


class Pictures:
    """Pictures of any part of any head, the last ones kept.

    Parameters
    ----------
    passes : Passes
        Where coarse pictures come from.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._codes: Cache[Array] = Cache(_MOST_TILE_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of pictures that are kept."""
        return self._codes.nbytes

    def tile(self, place: Place, head: Head, pool: str, level: int, y: int, x: int, wanted: Wanted) -> Picture:
        """Return a tile of 256 × 256 codes; a coarse one with what is known of it now."""
        key = ("tile", *place, pool, level, y, x)
        codes = self._codes.get(key)
        if codes is not None:
            return Picture(codes)
        rows, columns = place_of(level, y, head.m), place_of(level, x, head.n)
        progress = 1.0 if head.preparation is None else self._passes.prepare(place, head.preparation, wanted)
        if progress < 1:
            side = 1 << level
            return Picture(pad(np.full((-(-len(rows) // side), -(-len(columns) // side)), PENDING)), progress)
        if level <= ON_DEMAND:
            table = head.blocks(rows, columns, 1 << level, pool, wanted)
            codes = pad(head.codes(table.pooled(pool), table.cells > 0))
        else:
            middle = (rows.start + rows.stop) / 2
            job = self._passes.get(place, head, sums=pool == "mean", row=middle, wanted=wanted)
            codes, progress = job.result.tile(level, y, x, pool, head.codes)
            if job.error and progress < 1:
                raise RuntimeError(job.error)
        if progress >= 1:
            self._codes.put(key, codes, codes.nbytes)
        return Picture(codes, progress)

    def thumbnail(self, place: Place, head: Head, pool: str, size: int, wanted: Wanted) -> Picture:
        """Return the whole matrix as ``size × size`` codes, 16 bits for the logarithm of each pooled weight.

        A small matrix is computed from every cell. A large one comes from the blocks of a complete pass, and from a
        sample of its rows until there is one. `wanted` is asked between two steps whether anybody still waits.
        """
        key = ("thumbnail", *place, pool, size)
        codes = self._codes.get(key)
        if codes is not None:
            return Picture(codes)
        if 0 in (head.m, head.n):
            return Picture(np.zeros((size, size), dtype="<u2"))
        progress = 1.0 if head.preparation is None else self._passes.prepare(place, head.preparation, wanted)
        if progress < 1:
            return Picture(np.full((size, size), PENDING, dtype="<u2"), progress, sampled=True)
        known = self._passes.complete_pass(place, sums=pool == "mean")
        if head.m * head.n * head.heads <= _MOST_EXACT_CELLS:
            codes = _exact_codes(head, pool, size, wanted)
        elif known is not None:
            codes = _codes_from_pass(known, pool, size, head)
        else:
            # Not kept: the next one may be made of a pass.
            return Picture(_sampled_codes(head, pool, size), sampled=True)
        self._codes.put(key, codes, codes.nbytes)
        return Picture(codes)


def _blocks_of_axis(length: int, size: int) -> tuple[list[int], Array]:
    """Cut an axis into at most `size` blocks: their edges, and the block of each pixel."""
    # Where there are more pixels than places, some blocks are empty: their pixels show the block that begins there.
    edges, block = np.unique(block_edges(range(length), size)[:-1], return_inverse=True)
    return [*edges.tolist(), length], block


def _exact_codes(head: Head, pool: str, size: int, wanted: Wanted) -> Array:
    """Return ``size × size`` codes of the whole matrix, computed from every cell."""
    (rows, high), (columns, wide) = _blocks_of_axis(head.m, size), _blocks_of_axis(head.n, size)
    table = head.pooled(range(head.m), range(head.n), (rows, columns), pool, wanted)
    return head.codes(table.pooled(pool), table.cells > 0)[high][:, wide].astype("<u2")


def _codes_from_pass(known: Pass, pool: str, size: int, head: Head) -> Array:
    """Pool the blocks of a pass; each belongs to the pixel in which it begins."""
    (rows, high), (columns, wide) = (_blocks_of_axis(-(-length // (1 << BASE)), size) for length in (known.m, known.n))
    cells = reduce_blocks(known.arrays["cells"], rows[:-1], columns[:-1], np.add, "i8")
    if pool == "max":
        values = largest_of_blocks(known.arrays["max"], rows[:-1], columns[:-1], "f4")
    else:
        values = reduce_blocks(known.arrays["sum"], rows[:-1], columns[:-1], np.add, "f8") / np.maximum(cells, 1)
    return head.codes(values, cells > 0)[high][:, wide].astype("<u2")


def _sampled_codes(head: Head, pool: str, size: int) -> Array:
    """Take the middle row of each pixel, whole, and pool its keys."""
    (rows, high), (columns, wide) = _blocks_of_axis(head.m, size), _blocks_of_axis(head.n, size)
    middle = (torch.tensor(rows[:-1]) + torch.tensor(rows[1:]) - 1) // 2
    table = head.sampled(middle, columns, pool)
    return head.codes(table.pooled(pool), table.cells > 0)[high][:, wide].astype("<u2")
