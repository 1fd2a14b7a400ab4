"""Square blocks of a matrix: the sum, the largest weight and the number of allowed cells of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attlas.stats import Part, Statistic
from attlas.stats.spans import Bands, pool_tile

if TYPE_CHECKING:
    from attlas.engine.problem import Problem
    from attlas.tiles import Tile


class Pooled(NamedTuple):
    """Blocks of a window: tensors of shape (batch, heads, blocks of rows, blocks of columns), and keys of rows.

    Attributes
    ----------
    sum, max : Tensor
        Sum and largest of each block's weights; 0 where nothing may attend.
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

    def start(self, problem: Problem) -> Pooled:
        shape = (*problem.shape[:2], len(self.rows), len(self.columns))
        table = torch.zeros(shape, dtype=problem.dtype, device=problem.device)
        counts = torch.zeros(shape, dtype=torch.int64, device=problem.device)
        return Pooled(table, table.clone(), counts, counts.new_zeros(problem.shape[:3]))

    def step(self, carry: Pooled, part: Part, at: Tile) -> Pooled:
        rows, columns = self.rows.inside(at.rows), self.columns.inside(at.columns)
        if not (len(rows) and len(columns)):
            return carry
        bands, (b, h, _) = (self.rows, self.columns), at.place
        high, wide = self.rows.touched(rows), self.columns.touched(columns)
        carry.sum[b, h, high, wide] += pool_tile(part.weights, rows, columns, bands, torch.sum)
        into = carry.max[b, h, high, wide]
        torch.maximum(into, pool_tile(part.weights, rows, columns, bands, torch.amax), out=into)
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
        if problem.mask is not None and problem.allowed_runs is None:
            return None
        edges = torch.tensor(self.rows.edges), torch.tensor(self.columns.edges)
        return {"picture_sum": edges, "picture_max": edges}

    def from_outputs(self, results: Mapping[str, Any], problem: Problem) -> Pooled:
        first, stop = _runs(problem)
        cells, lead = count_cells(first, stop, self.rows.edges, self.columns.edges), problem.shape[:2]
        keys = (stop - first).expand(*lead, -1)
        return Pooled(results["picture_sum"], results["picture_max"], cells.expand(*lead, -1, -1), keys)


def _runs(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the first key that each query may see and the one after its last."""
    if problem.allowed_runs is not None:
        return problem.allowed_runs
    m, n = problem.shape[2:]
    return torch.zeros(1, 1, m, dtype=torch.int64), torch.full((1, 1, m), n, dtype=torch.int64)


def count_cells(first: Tensor, stop: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """Count the allowed cells of blocks where each row sees one run of keys.

    Parameters
    ----------
    first, stop : Tensor of int64, shape (batch, heads, m)
        The first key of each row and the one after its last.
    rows, columns : sequence of int
        First place of each block, then the end of the last.

    Returns
    -------
    Tensor of int64, shape (batch, heads, blocks of rows, blocks of columns)

    Notes
    -----
    Left of an edge e a row has ``max(0, e - first) - max(0, e - stop)`` cells. Summed over the rows of a
    block, each term is ``e N - S``, with the number N and the sum S of the places below e: two cumulative
    sums over the edges, whatever the number of rows.
    """
    edges = torch.tensor(columns)
    block = torch.repeat_interleave(torch.arange(len(rows) - 1), torch.tensor(rows).diff())
    left = _distances(first, edges, block, len(rows) - 1) - _distances(stop, edges, block, len(rows) - 1)
    return left.diff(dim=-1)


def _distances(places: Tensor, edges: Tensor, block: Tensor, blocks: int) -> Tensor:
    """Return ``Σ max(0, edge - place)`` over the rows of each block, shape (batch, heads, blocks, edges)."""
    lead, width = places.shape[:2], len(edges) + 1
    places = places.flatten(0, 1)
    bins = torch.searchsorted(edges, places) + block * width
    bins += torch.arange(len(places)).unsqueeze(-1) * blocks * width
    number = torch.zeros(len(places) * blocks * width, dtype=torch.int64)
    total = torch.zeros_like(number)
    number.index_add_(0, bins.flatten(), torch.ones_like(bins).flatten())
    total.index_add_(0, bins.flatten(), places.flatten())
    number, total = (t.view(*lead, blocks, width).cumsum(-1)[..., :-1] for t in (number, total))
    return edges * number - total
