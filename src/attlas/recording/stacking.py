"""The mask of several matrices of one text that are stacked to one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attlas.foundation.tiles import Tile
from attlas.masks import BlockState, Causal, Mask
from attlas.masks.base import And
from attlas.matrix.windows import Translated
from attlas.scores import Score

_MOST_BLOCKS = 64  # blocks of rows whose coverage is asked one by one


@dataclass(frozen=True, eq=False)
class Block:
    """One of several matrices that are stacked: its mask, its sizes, and where it stands in the whole."""

    mask: Mask | None
    m: int
    n: int
    row: int
    column: int

    @property
    def placed(self) -> Translated | None:
        """Mask of this block at the positions of the whole matrix; None where all its keys are allowed."""
        return None if self.mask is None else Translated(self.mask, self.m, self.n, self.row, self.column)

    def in_whole(self, keys: int) -> Mask | None:
        """Return a mask of the whole matrix that equals this block's mask in its rows, or None if there is none."""
        if self.mask is None:
            # One query that sees all n keys there are is the last row of a causal mask.
            return Causal(self.column + self.n - 1 - self.row) if self.m == 1 and self.column == 0 else None
        # One row more than this block has: a mask that is stored cannot tell about those of the other blocks.
        rows, columns = range(-self.row, self.m + 1), range(-self.column, keys - self.column)
        translated = self.mask.translate(rows, columns, self.m, self.n)
        if translated is None:
            return None
        if self.m == 1 and self.column == 0 and not translated.is_causal:
            translated = And(Causal(self.n - 1 - self.row), translated)
        outside = range(self.column), range(self.column + self.n, keys)
        blind = all(
            translated.coverage(self._tile(columns, keys)) is BlockState.EMPTY for columns in outside if len(columns)
        )
        return translated if blind else None

    def _tile(self, columns: range, keys: int) -> Tile:
        """Return the tile of this block's rows in some columns of the whole matrix."""
        one = torch.zeros(1, dtype=torch.int64, device="cpu")
        rows = range(self.row, self.row + self.m)
        return Tile(range(1), range(1), rows, columns, self.row + self.m, keys, one, one, torch.device("cpu"))


def stack_masks(blocks: Sequence[Block], keys: int, tile: Callable[..., Tile] | None = None) -> Mask | None:
    """Return the mask of matrices stacked on each other, in the simplest form that is exact.

    Parameters
    ----------
    blocks : sequence of Block
        The matrices from top to bottom.
    keys : int
        Number of keys of the whole.
    tile : callable, optional
        Returns the tile of some rows and columns of the whole: single rows are then compared by their cells.
    """
    if all(block.mask is None and block.column == 0 and block.n == keys for block in blocks):
        return None
    if len(blocks) == 1 and blocks[0].column == 0 and blocks[0].n == keys:
        return blocks[0].mask
    first, stack = blocks[0].in_whole(keys), Stacked(blocks)
    if first is not None and all(_agrees(first, block, keys, stack, tile) for block in blocks[1:]):
        return first
    return stack


def _agrees(first: Mask, block: Block, keys: int, stack: Stacked, tile: Callable[..., Tile] | None) -> bool:
    """Return whether a mask equals the mask of a block in the rows of the block."""
    if same_settings(first, block.in_whole(keys)):
        return True
    if tile is None or block.m != 1:
        return False
    at = tile(range(block.row, block.row + 1), range(keys))
    return bool((first.allows(at) == stack.allows(at)).all())


def same_settings(a: Any, b: Any) -> bool:
    """Return whether two masks (or scores, or values in them) have the same class and equal attributes."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and torch.equal(a, b.to(a.device))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_settings, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_settings(a[name], b[name]) for name in a)
    if isinstance(a, Mask | Score):
        return same_settings(vars(a), vars(b))
    return bool(a == b)


class Stacked(Mask):
    """Masks of several matrices that are stacked on each other: steps of a generation, chunks of a text.

    Parameters
    ----------
    blocks : sequence of Block
        The matrices from top to bottom; keys that one of them did not have yet are not seen in its rows.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)
        self._starts = torch.tensor([block.row for block in self.blocks], device="cpu")

    def allows(self, at: Tile) -> Tensor:
        rows = torch.arange(at.rows.start, at.rows.stop, device="cpu") if at.row_index is None else at.row_index.cpu()
        owner = torch.searchsorted(self._starts, rows, right=True) - 1
        if at.row_index is None and len(rows) and int(owner[0]) == int(owner[-1]):
            return self._of(self.blocks[int(owner[0])], at)
        out = torch.zeros(at.shape, dtype=torch.bool, device=at.device)
        for number in owner.unique().tolist():
            some = (owner == number).nonzero().flatten()
            part = replace(at, rows=range(len(some)), row_index=rows[some])
            out[:, :, some.to(at.device)] = self._of(self.blocks[number], part).expand(part.shape)
        return out

    def _of(self, block: Block, at: Tile) -> Tensor:
        """Return what one block allows in a tile of its rows."""
        inside = (at.j >= block.column) & (at.j < block.column + block.n)
        mask = block.placed
        if mask is None:
            return inside
        whole = at.column_index is None and block.column <= at.columns.start
        if whole and at.columns.stop <= block.column + block.n:
            return mask.allows(at)
        # Keys outside are asked for the nearest key inside, and what is answered for them is dropped.
        nearest = at.j.flatten().clamp(block.column, block.column + block.n - 1)
        return mask.allows(replace(at, columns=range(len(nearest)), column_index=nearest)) & inside

    def coverage(self, at: Tile) -> BlockState:
        if at.scattered or not len(at.rows) or not len(at.columns):
            return BlockState.PARTIAL
        starts = torch.tensor([at.rows.start, at.rows.stop - 1], device="cpu")
        first, last = (torch.searchsorted(self._starts, starts, right=True) - 1).tolist()
        states = {self._covers(block, at) for block in self.blocks[first : min(last + 1, first + _MOST_BLOCKS)]}
        if last - first >= _MOST_BLOCKS:
            states.add(BlockState.PARTIAL)
        return states.pop() if len(states) == 1 else BlockState.PARTIAL

    def _covers(self, block: Block, at: Tile) -> BlockState:
        """Return how much of a tile's columns one block allows, in those of its rows that the tile has."""
        start, stop = at.columns.start, at.columns.stop
        if stop <= block.column or start >= block.column + block.n:
            return BlockState.EMPTY
        if start < block.column or stop > block.column + block.n:
            return BlockState.PARTIAL
        rows = range(max(at.rows.start, block.row), min(at.rows.stop, block.row + block.m))
        mask = block.placed
        return BlockState.FULL if mask is None else mask.coverage(replace(at, rows=rows))

    def first_query(self, m: int, n: int) -> int | None:
        mask = self.blocks[0].placed
        return None if mask is None else mask.first_query(m, n)

    def padding(self, at: Tile) -> Tensor | None:
        found, known = None, 0
        while known < at.n:  # no step need have all keys: a sliding cache drops the first ones
            block = max((b for b in self.blocks if b.column <= known), key=lambda b: b.column + b.n, default=None)
            if block is None or block.column + block.n <= known:
                return None
            known = block.column + block.n
            if block.placed is not None:
                flags = block.placed.padding(at)
                if flags is None:
                    return None
                found = flags if found is None else found | flags
        return found

    def size(self) -> tuple[int | None, int | None]:
        return self.blocks[-1].row + self.blocks[-1].m, max(block.column + block.n for block in self.blocks)

    def name(self) -> str:
        return f"{len(self.blocks)} masks stacked"
