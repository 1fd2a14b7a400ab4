"""Square blocks of a matrix: the sum, the largest weight and the number of allowed cells of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from attlas.stats import Part, Statistic
from attlas.stats.counts import cells_of_blocks, interval_of
from attlas.stats.spans import Bands, pool_tile

if TYPE_CHECKING:
    from attlas.engine.problem import Problem
    from attlas.foundation.tiles import Tile


class Pooled(NamedTuple):
    """Blocks of a window: tensors of shape (batch, heads, blocks of rows, blocks of columns), and keys of rows.

    Attributes
    ----------
    sum, max : Tensor
        Sum and largest of each block's weights, of weights that may be negative the largest by size; 0 where nothing
        may attend.
    cells : Tensor of int64
        How many cells of each block are allowed.
    keys : Tensor of int64, shape (batch, heads, rows)
        How many keys of the window each query may see.
    """

    sum: Tensor
    max: Tensor
    cells: Tensor
    keys: Tensor


def edges_of(size: int, block: int) -> list[int]:
    """Return the first place of each block of an axis, and the end of the last, which may be shorter.

    Examples
    --------
    >>> edges_of(10, 4)
    [0, 4, 8, 10]
    """
    return [*range(0, size, block), size]


def _larger_magnitude(a: Tensor, b: Tensor) -> Tensor:
    """Return, place by place, the number of larger size, with its sign."""
    return torch.where(b.abs() > a.abs(), b, a)


class Sizes(Statistic):
    """The weight of largest size of each query and of each key, with its sign; 0 where nothing may attend.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.transport(torch.tensor([[1.0], [-2.0]]), torch.tensor([[1.0], [3.0]]), scale=1.0)
    >>> A.collect(Sizes())[0]
    (tensor([ 1., -6.]), tensor([-2., -6.]))
    """

    def start(self, problem: Problem) -> tuple[Tensor, Tensor]:
        # Implements `Statistic.start`: zeros, (batch, heads, m) of the queries and (batch, heads, n) of the keys.
        batch, heads, m, n = problem.shape
        zeros = torch.zeros(batch, heads, m + n, dtype=problem.dtype, device=problem.device)
        return zeros[..., :m], zeros[..., m:]

    def step(self, carry: tuple[Tensor, Tensor], part: Part, at: Tile) -> tuple[Tensor, Tensor]:
        # Implements `Statistic.step`: one tile is compared with what is known of its queries and of its keys.
        b, h, rows = at.place
        columns = slice(at.columns.start, at.columns.stop)
        for into, axis in ((carry[0][b, h, rows], -1), (carry[1][b, h, columns], -2)):
            into.copy_(_larger_magnitude(into, _larger_magnitude(part.weights.amax(axis), part.weights.amin(axis))))
        return carry


class Blocks(Statistic):
    """Sums, maxima and counts of allowed cells of blocks, in one pass.

    Parameters
    ----------
    rows, columns : sequence of int
        First place of each block, then the end of the last; they cover the matrix.

    See Also
    --------
    attlas.stats.Picture : one of these numbers, of as many blocks as a picture has.

    Notes
    -----
    Blocks add up: sums, maxima and counts of larger blocks follow exactly from those of smaller ones. Cost:
    that of the fused kernels for a picture; without them a sum and a maximum over the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> A = attlas.attend(torch.zeros(3, 8), torch.zeros(3, 8), mask=attlas.Causal())
    >>> found = A.collect(Blocks([0, 2, 3], [0, 2, 3]))[0]
    >>> found.sum, found.cells
    (tensor([[2.0000, 0.0000],
            [0.6667, 0.3333]]), tensor([[3, 0],
            [2, 1]]))
    """

    def __init__(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        self.rows = Bands(rows)
        self.columns = Bands(columns)
        self._edges = self.rows.edges, self.columns.edges

    def start(self, problem: Problem) -> Pooled:
        # Implements `Statistic.start`: sums, maxima and counts of each block, and the keys that each query sees.
        shape = (*problem.shape[:2], len(self.rows), len(self.columns))
        table = torch.zeros(shape, dtype=problem.dtype, device=problem.device)
        counts = torch.zeros(shape, dtype=torch.int64, device=problem.device)
        return Pooled(table, table.clone(), counts, counts.new_zeros(problem.shape[:3]))

    def step(self, carry: Pooled, part: Part, at: Tile) -> Pooled:
        # Implements `Statistic.step`: each tile adds its cells to the blocks that it meets.
        rows, columns = self.rows.inside(at.rows), self.columns.inside(at.columns)
        if not (len(rows) and len(columns)):
            return carry
        bands, (b, h, _) = (self.rows, self.columns), at.place
        high, wide = self.rows.touched(rows), self.columns.touched(columns)  # the blocks that the tile has cells of
        carry.sum[b, h, high, wide] += pool_tile(part.weights, rows, columns, bands, torch.sum)
        into = carry.max[b, h, high, wide]
        found = pool_tile(part.weights, rows, columns, bands, torch.amax)
        # Largest by size, with the sign, where weights may be negative.
        if part.problem.signed:
            found = _larger_magnitude(found, pool_tile(part.weights, rows, columns, bands, torch.amin))
            into.copy_(_larger_magnitude(into, found))
        else:
            torch.maximum(into, found, out=into)
        for visible, cells in part.visible_columns:
            some = range(at.columns.start + visible.start, at.columns.start + visible.stop)
            if cells is None:
                cells = torch.ones(len(rows), len(some), dtype=torch.bool, device=at.device)
            cells = cells.to(torch.int64)
            into = carry.cells[b, h, high, self.columns.touched(some)]
            into += pool_tile(cells, rows, some, bands, torch.sum)
            carry.keys[at.place] += cells.sum(dim=-1)
        return carry

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels give sums and maxima; the mask must tell how many cells of a block are allowed, else tiles count
        # them.
        return None if interval_of(problem) is None else dict.fromkeys(("picture_sum", "picture_max"), self._edges)

    def from_outputs(self, results: Mapping[str, Any], problem: Problem) -> Pooled:
        # Implements `Statistic.from_outputs`: a kernel has given sums and maxima; the mask's runs give the counts.
        first, stop = cast("tuple[Tensor, Tensor]", interval_of(problem))
        cells, lead = cells_of_blocks(problem, self._edges).long(), problem.shape[:2]
        keys = (stop - first).expand(*lead, -1)
        return Pooled(results["picture_sum"], results["picture_max"], cells.expand(*lead, -1, -1), keys)
