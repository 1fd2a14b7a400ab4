"""All tiles of some rows, from left to right, for statistics: what columns need is made once for all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.foundation.tiles import cut
from attlas.matrix.transport.factors import factors
from attlas.matrix.transport.tokens import GatedTokens
from attlas.matrix.transport.walk import STRIDE, cells


class Blocks(NamedTuple):
    """What all tiles need of the columns, in blocks of many chunks: some ``n (d + d² / 512)`` numbers a head.

    Parameters
    ----------
    writes : Tensor, shape (batch, heads, blocks, tokens of a block, d)
        Columns carried to the end of their block.
    moves : Tensor, shape (batch, heads, blocks, d, d) or (batch or 1, heads or 1, blocks, 1, d or 1), optional
        What a block does to the state: a matrix, or factors; None where it does nothing.
    """

    writes: Tensor
    moves: Tensor | None

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.writes.shape[3]


def blocks_of(tokens: GatedTokens) -> Blocks:
    """Return what all tiles need of the columns."""
    writes, moves = [], []
    chunks = -(-tokens.chunks // STRIDE) * STRIDE
    for some in cut(chunks, max(tokens.chunks_at_once // STRIDE, 1) * STRIDE):
        f = factors(tokens, some, reads=False)
        w, t = f.writes, f.transitions() if tokens.turns else f.total
        t = None if t is None else t.expand(-1, -1, len(some), -1, -1)
        # Each round joins two neighbours, until a block has STRIDE chunks.
        for _ in range(STRIDE.bit_length() - 1):
            earlier, later = (None, None) if t is None else (t[:, :, 0::2], t[:, :, 1::2])
            w = torch.cat([_columns_through_block(w[:, :, 0::2], later, tokens.turns), w[:, :, 1::2]], -2)
            t = None if later is None else _rows_through_block(later, earlier, tokens.turns)
        writes.append(w)
        moves += [] if t is None else [t]
    return Blocks(torch.cat(writes, 2), torch.cat(moves, 2) if moves else None)


def row_tiles(
    tokens: GatedTokens, blocks: Blocks, rows: range, spans: Sequence[range], *, factored: bool = False
) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
    """Yield the tiles of some rows, without the diagonal that is added to the matrix.

    Parameters
    ----------
    tokens : GatedTokens
        Queries, keys and gates.
    blocks : Blocks
        What `blocks_of` returns of them.
    rows : range
        The rows.
    spans : sequence of range
        Runs of columns, from left to right.
    factored : bool, default False
        Whether the tile of a whole block may be yielded as a pair ``(left, right)``, with the tile ``left @ right.mT``.

    Yields
    ------
    Tensor, shape (batch, heads, len(rows), len(span))
        Or the pair of its factors.

    Notes
    -----
    The rows are carried from right to left, and kept at the end of each block: ``len(rows) d`` numbers a block.
    """
    size = blocks.size
    corner = rows.start // size * size  # from this column on, cells are computed chunk by chunk
    near, x = cells(tokens, rows, range(corner, rows.stop), None)
    ends: list[Tensor] = []  # the rows at the end of each block before the corner, the last block first
    first = min((span.start for span in spans if len(span)), default=corner) // size
    for block in reversed(range(first, corner // size)):
        ends.append(x)
        x = _rows_through_block(x, None if blocks.moves is None else blocks.moves[:, :, block], tokens.turns)
    for span in spans:
        if factored and span.start % size == 0 and len(span) == size and span.stop <= corner:  # one block
            block = span.start // size
            yield ends[corner // size - 1 - block], blocks.writes[:, :, block]
            continue
        found = x.new_zeros(*x.shape[:2], len(rows), len(span))
        for block in range(span.start // size, -(-min(span.stop, corner) // size)):
            low, high = max(span.start, block * size), min(span.stop, (block + 1) * size)
            columns = blocks.writes[:, :, block, low - block * size : high - block * size]
            found[..., low - span.start : high - span.start] = ends[corner // size - 1 - block] @ columns.mT
        low, high = max(span.start, corner), min(span.stop, rows.stop)
        if low < high:
            found[..., low - span.start : high - span.start] = near[..., low - corner : high - corner]
        yield found


def _rows_through_block(x: Tensor, move: Tensor | None, turns: bool) -> Tensor:
    """Return rows times what a block does to the state.

    A matrix where tokens mix its coordinates, else a decay of each.
    """
    return x if move is None else x @ move if turns else x * move


def _columns_through_block(y: Tensor, move: Tensor | None, turns: bool) -> Tensor:
    """Return columns times what a later block does to the state; see `_rows_through_block`."""
    return y if move is None else y @ move.mT if turns else y * move
