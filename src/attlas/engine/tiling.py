"""Which rectangles of a matrix are computed: blocks of rows, and in each the blocks of columns that a mask allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.foundation.tiles import Tile, cut
from attlas.masks.base import BlockState, Mask

_LEAST_SEGMENT_WIDTH = 256  # columns below which asking the mask costs more than masking
_ROOMY_ROWS = 32  # fewest rows for which a block as wide as the matrix still feeds the matrix product


@dataclass(frozen=True)
class Sizes:
    """Size of a tile: batches and heads taken together, rows, columns."""

    batches: int
    heads: int
    rows: int
    columns: int


@dataclass(frozen=True)
class ColumnBlock:
    """Columns that are computed together, and how much of each segment of them is allowed."""

    columns: range
    segments: tuple[tuple[range, BlockState], ...]

    @property
    def whole(self) -> bool:
        """Whether every cell of the block is allowed."""
        return all(state is BlockState.FULL for _, state in self.segments)

    def local(self, columns: range) -> slice:
        """Return the slice of some columns of the matrix within the block."""
        return slice(columns.start - self.columns.start, columns.stop - self.columns.start)


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows of some heads, and the blocks of columns in which they may attend."""

    at: Tile
    column_blocks: tuple[ColumnBlock, ...]


def sizes(problem: Problem, plan: Plan, *, whole_rows: bool, wide: bool) -> Sizes:
    """Choose the size of a tile.

    Where the plan says nothing, a tile has about `usual` cells, numbers of logits of all its heads together.

    Parameters
    ----------
    problem : Problem
        The matrix.
    plan : Plan
        Its `rows` and `columns` are kept where given.
    whole_rows : bool
        Whether the caller needs every column of a row in one tile.
    wide : bool
        Whether tiles as wide as a row save the caller a pass over the matrix.
    """
    batch, heads, m, n = problem.shape
    most = max(plan.budget(problem.device.type) // problem.score.scratch, 1)  # cells that fit into the memory of a step
    # Passes over a tile start threads: reads make many and want large tiles, a product few, and a cache's worth.
    usual = max(most // (4 if wide or whole_rows else 16), 1)
    rows, columns = plan.rows, plan.columns
    if whole_rows or (columns is None and wide and n * (rows or _ROOMY_ROWS) <= most):
        columns = max(n, 1)
        rows = rows or max(usual // columns, min(most // columns, 64), 1)
    if columns is None:  # about four times as many as rows, up to 2048
        columns = max(usual // rows, 64) if rows else min(2048, max(int(usual**0.5), 16) * 2)
    rows = min(rows or max(usual // columns, 16), max(m, 1))
    columns = min(columns, max(n, 1))
    together = max(usual // (rows * columns), 1)  # heads of a tile
    if together >= heads:
        return Sizes(min(together // max(heads, 1), max(batch, 1)), max(heads, 1), rows, columns)
    # Query heads of one key head stay together, or divide its group evenly.
    group = problem.group
    if together >= group:
        return Sizes(1, together // group * group, rows, columns)
    return Sizes(1, max(c for c in range(1, together + 1) if group % c == 0), rows, columns)


def cut_heads(heads: range, most: int, group: int) -> Iterator[range]:
    """Cut query heads into ranges of at most `most` that hold whole groups of `group`, or lie within one.

    Examples
    --------
    >>> list(cut_heads(range(2, 9), 6, 3))
    [range(2, 3), range(3, 9)]
    >>> list(cut_heads(range(6), 2, 3))
    [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]
    """
    start = heads.start
    while start < heads.stop:
        count, before = min(most, heads.stop - start), start % group
        count = min(count, group - before) if before or count < group else count - count % group
        yield range(start, start + count)
        start += count


def row_blocks(problem: Problem, plan: Plan, *, whole_rows: bool = False, wide: bool = True) -> Iterator[RowBlock]:
    """Yield the row blocks that cover a matrix, without the columns that the mask hides from all rows."""
    size = sizes(problem, plan, whole_rows=whole_rows, wide=wide)
    batch, heads, m, n = problem.shape
    for batches in cut(batch, size.batches):
        for head_range in cut(heads, size.heads):
            for rows in cut(m, size.rows):
                at = problem.tile(batches, head_range, rows, range(n))
                yield RowBlock(at, column_blocks(at, problem.mask, size.columns, whole_rows=whole_rows))


def column_blocks(at: Tile, mask: Mask | None, width: int, *, whole_rows: bool = False) -> tuple[ColumnBlock, ...]:
    """Return the column blocks of a row block, each at most `width` columns wide."""
    if not len(at.columns):
        return ()
    segments = [(at.columns, BlockState.FULL)] if mask is None else segments_of(at, mask)
    runs = _runs_of_columns(segments)
    if not runs:
        return (ColumnBlock(at.columns, ((at.columns, BlockState.EMPTY),)),) if whole_rows else ()
    hull = range(runs[0].start, runs[-1].stop)
    # One block where it is narrow enough and at least half of its columns are needed.
    if whole_rows or (len(hull) <= width and sum(map(len, runs)) * 2 >= len(hull)):
        return (ColumnBlock(hull, clip(segments, hull)),)
    columns = [range(run.start + c.start, run.start + c.stop) for run in runs for c in cut(len(run), width)]
    return tuple(ColumnBlock(c, clip(segments, c)) for c in columns)


def allowed_cells(at: Tile, mask: Mask | None, block: ColumnBlock) -> Tensor | None:
    """Return True where a cell of the block is allowed, or None where all are.

    The shape is (rows, columns), with axes of batches and heads before it where the mask differs between them.
    """
    if mask is None or block.whole:
        return None
    asked = {columns: mask.allows(at.narrow(columns)) for columns, s in block.segments if s is BlockState.PARTIAL}
    lead = torch.broadcast_shapes((), *(cells.shape[:-2] for cells in asked.values()))
    shape = (*lead, len(at.rows), len(block.columns))
    if block.columns in asked:
        return asked[block.columns].expand(shape)
    out = torch.zeros(shape, dtype=torch.bool, device=at.device)
    for columns, state in block.segments:
        if state is not BlockState.EMPTY:
            out[..., block.local(columns)] = asked.get(columns, True)
    return out


def segments_of(at: Tile, mask: Mask) -> list[tuple[range, BlockState]]:
    """Divide the columns of a row block into segments of one state each, by bisection."""
    out: list[tuple[range, BlockState]] = []
    waiting = [at.columns]  # a stack, the leftmost on top
    while waiting:
        columns = waiting.pop()
        state = mask.coverage(at.narrow(columns))
        if state is BlockState.PARTIAL and len(columns) > _LEAST_SEGMENT_WIDTH:
            middle = (columns.start + columns.stop) // 2
            waiting += [range(middle, columns.stop), range(columns.start, middle)]
        elif out and out[-1][1] is state:
            out[-1] = (range(out[-1][0].start, columns.stop), state)
        else:
            out.append((columns, state))
    return out


def _runs_of_columns(segments: list[tuple[range, BlockState]]) -> list[range]:
    """Return the unbroken runs of columns in which something may attend."""
    groups = groupby(segments, lambda segment: segment[1] is BlockState.EMPTY)
    runs = [[columns for columns, _ in group] for empty, group in groups if not empty]
    return [range(run[0].start, run[-1].stop) for run in runs]


def clip(segments: list[tuple[range, BlockState]], hull: range) -> tuple[tuple[range, BlockState], ...]:
    """Return the parts of segments that lie within `hull`."""
    clipped = ((range(max(c.start, hull.start), min(c.stop, hull.stop)), state) for c, state in segments)
    return tuple((c, state) for c, state in clipped if len(c))
