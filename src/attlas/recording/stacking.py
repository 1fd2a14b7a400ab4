"""The simplest mask of several matrices of one text that are stacked to one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.masks import BlockState, Causal, Mask
from attlas.masks.base import And
from attlas.masks.placed import Block, Stacked
from attlas.recording.snapshot import answers_later
from attlas.scores import Score


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
    whole = range(keys)
    if all(block.mask is None and block.columns == whole for block in blocks):
        return None
    if len(blocks) == 1 and blocks[0].columns == whole:
        return blocks[0].mask
    first, stack = _mask_of_whole(blocks[0], keys), Stacked(blocks)
    if first is not None and all(_equals_block_mask(first, block, keys, stack, tile) for block in blocks[1:]):
        return first
    return stack


def _mask_of_whole(block: Block, keys: int) -> Mask | None:
    """Return a mask of the whole matrix that equals a block's mask in the block's rows, or None if there is none."""
    row, column, m, n = block.rows.start, block.columns.start, len(block.rows), len(block.columns)
    if block.mask is None:
        # One query that sees all n keys there are is the last row of a causal mask.
        return Causal(column + n - 1 - row) if m == 1 and column == 0 else None
    # One row more than the block has: a mask that is stored cannot tell about those of the other blocks.
    translated = block.mask.translate(range(-row, m + 1), range(-column, keys - column), m, n)
    if translated is None:
        return None
    if m == 1 and column == 0 and not translated.is_causal:
        translated = And(Causal(n - 1 - row), translated)
    outside = range(column), range(column + n, keys)
    blind = all(
        translated.coverage(_tile_of_block_rows(block.rows, columns, keys)) is BlockState.EMPTY
        for columns in outside
        if len(columns)
    )
    return translated if blind else None


def _tile_of_block_rows(rows: range, columns: range, keys: int) -> Tile:
    """Return the tile of a block's rows in some columns of the whole matrix."""
    one = torch.zeros(1, dtype=torch.int64, device="cpu")
    return Tile(range(1), range(1), rows, columns, rows.stop, keys, one, one, torch.device("cpu"))


def _equals_block_mask(first: Mask, block: Block, keys: int, stack: Stacked, tile: Callable[..., Tile] | None) -> bool:
    """Return whether a mask equals the mask of a block in the rows of the block."""
    if same_settings(first, _mask_of_whole(block, keys)):
        return True
    if tile is None or len(block.rows) != 1:
        return False
    at = tile(block.rows, range(keys))
    return bool((first.allows(at) == stack.allows(at)).all())


def same_settings(a: Any, b: Any, later: list[Tensor] | None = None) -> bool:
    """Return whether two masks (or scores, or values in them) have the same class and equal attributes.

    Parameters
    ----------
    a, b
        The two.
    later : list of Tensor, optional
        Gets the answers of tensors of a device, booleans on it: the two are equal if all are true, too. Without it the
        program waits for them.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.dtype is not b.dtype or a.shape != b.shape:
            return False
        b = to_device(b, a.device)
        if later is None or not answers_later(a):
            return torch.equal(a, b)
        later.append((a == b).all())
        return True
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_settings(one, other, later) for one, other in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_settings(a[name], b[name], later) for name in a)
    if isinstance(a, Mask | Score):
        return same_settings(vars(a), vars(b), later)
    return bool(a == b)
