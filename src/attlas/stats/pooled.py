"""The matrix made small: pictures of pooled blocks, and the mass on each diagonal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine.gradient import CellGradient
from attlas.engine.outputs import Blocks
from attlas.engine.problem import Problem
from attlas.engine.statistic import GROUP, Part, Statistic, TensorForm, keep_larger, merge_sums
from attlas.errors import ShapeError, public
from attlas.foundation.checks import one_of, whole_number
from attlas.foundation.tiles import Tile
from attlas.stats.counts import cells_of_blocks, cells_of_diagonals, interval_of
from attlas.stats.functions import function_of
from attlas.stats.spans import Bands, Span, check_span, place_span, pool_tile, spread_blocks, tile_window

_ROWS_AT_ONCE = 64  # rows whose diagonals are summed together

Pool: TypeAlias = Literal["mean", "max"]


class Picture(Statistic):
    """A window of the matrix pooled into ``height × width`` blocks.

    Parameters
    ----------
    height, width : int
        Blocks along the queries and along the keys, at most as many as the window has of them.
    pool : {"mean", "max"}, default "mean"
        Mean of the block's allowed cells, or the largest of them: of weights that may be negative, the largest by size.
    rows, columns : slice, range or (start, stop), optional
        Window of queries and of keys; the default is the whole matrix.

    Raises
    ------
    ShapeError
        If a size is below 1 or above that of the window, if `pool` is unknown, or if a window has a step
        or does not lie within the matrix.

    See Also
    --------
    Spans : sums over spans of any size.

    Notes
    -----
    Block a begins at row ``⌊a · m / height⌋`` of the window, so that the heights of blocks differ by at most one row,
    and a picture that draws all of them equally high moves none by more; columns likewise. A block in which nothing may
    attend has no mean and no maximum: NaN, so that a picture can show it apart from a block of small weights.
    Cost: one sum or maximum over the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(4, 8), torch.zeros(4, 8), mask=attlas.Causal())
    >>> A.collect(stats.Picture(2, 2))[0]
    tensor([[0.6667,    nan],
            [0.2917, 0.2778]])
    >>> stats.picture(A, 2, 2, "max", rows=slice(2, None))
    tensor([[0.3333, 0.3333],
            [0.2500, 0.2500]])
    """

    @public("Picture()")
    def __init__(
        self, height: int, width: int, pool: Pool = "mean", rows: Span | None = None, columns: Span | None = None
    ) -> None:
        whole_number("height", height, "height=8")
        whole_number("width", width, "width=8")
        one_of("pool", pool, ("mean", "max"))
        check_span("rows", rows)
        check_span("columns", columns)
        self.height = height
        self.width = width
        self.pool = pool
        self.is_mean = pool == "mean"
        self.rows = rows
        self.columns = columns

    def forms(self, problem: Problem) -> TensorForm:
        # A picture for each head.
        return TensorForm((*problem.shape[:2], self.height, self.width), problem.dtype)

    def start(self, problem: Problem) -> _BlockSums:
        # Blocks without a cell.
        rows, columns = self._block_edges(problem)
        return _BlockSums(Bands(rows), Bands(columns), problem)

    @public("Picture()")
    def _shown_rows_and_columns(self, problem: Problem) -> tuple[range, range]:
        """Return the rows and columns that the picture shows; raise where it has more blocks than these."""
        m, n = problem.shape[2:]
        rows = place_span("rows", self.rows, m, "queries")
        columns = place_span("columns", self.columns, n, "keys")
        if self.height > len(rows) or self.width > len(columns):
            rule = "a picture cannot have more blocks than the window has rows or columns."
            given, found = f"{len(rows)} queries × {len(columns)} keys", f"height = {self.height}, width = {self.width}"
            fix = "leave rows and columns out for the whole matrix."
            if len(rows) and len(columns):
                fix = f"Picture({min(self.height, len(rows))}, {min(self.width, len(columns))})"
            raise ShapeError(rule, found, fix, window=given)
        return rows, columns

    def step(self, carry: _BlockSums, part: Part, at: Tile) -> _BlockSums:
        # Pool the cells of the part into the blocks that they lie in.
        carry.add(part, at, self.pool)
        return carry

    def merge(self, a: _BlockSums, b: _BlockSums) -> _BlockSums:
        # Join sums by adding, maxima by the larger one; the numbers of cells add up.
        a.table = (merge_sums if self.pool == "mean" else keep_larger)(self, a.table, b.table)
        a.cells += b.cells
        return a

    def finish(self, carry: _BlockSums) -> Tensor:
        """Divide sums by the allowed cells, for a mean; a block without allowed cells is NaN."""
        table = carry.table / carry.cells.clamp(min=1) if self.pool == "mean" else carry.table
        return table.masked_fill(carry.cells == 0, torch.nan)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient | None:
        # A mean has the gradient of its block, divided by the allowed cells, in each of these. A maximum has no such
        # form.
        if self.pool == "max" or interval_of(problem) is None:
            return None
        cells = cells_of_blocks(problem, self._block_edges(problem))
        table = torch.where(cells == 0, 0.0, grad / cells)
        return CellGradient(weights=(partial(spread_blocks, table, self.start(problem).bands),))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # What the kernels compute by themselves where the mask has one run of keys per row.
        if interval_of(problem) is None:
            return None
        blocks = self._block_edges(problem)
        return {"picture_sum" if self.pool == "mean" else "picture_max": blocks}

    def from_outputs(self, results: Mapping[str, Any], problem: Problem) -> Tensor:
        # The kernels give sums or maxima of blocks; blocks without an allowed cell become NaN.
        cells = cells_of_blocks(problem, self._block_edges(problem))
        empty = cells == 0
        if self.pool == "mean":
            # Heads that share a mask share the cells: it costs less to mark these than the table.
            return results["picture_sum"] / cells.masked_fill_(empty, torch.nan)
        # To ask another device whether a block is empty, the program would wait for it: there all are treated alike.
        some = empty.device.type != "cpu" or bool(empty.any())
        return results["picture_max"].masked_fill(empty, torch.nan) if some else results["picture_max"]

    def _block_edges(self, problem: Problem) -> Blocks:
        """Return the first row and the first column of each block, and the ends."""
        rows, columns = self._shown_rows_and_columns(problem)
        return block_edges(rows, self.height), block_edges(columns, self.width)


class _BlockSums:
    """Running sum or maximum of each block of a picture, and the number of its allowed cells."""

    def __init__(self, rows: Bands, columns: Bands, problem: Problem) -> None:
        self.bands = rows, columns
        shape = (*problem.shape[:2], len(rows), len(columns))
        self.table = torch.zeros(shape, dtype=problem.dtype, device=problem.device)
        self.cells = torch.zeros_like(self.table)

    def add(self, part: Part, at: Tile, pool: str) -> None:
        """Add a tile to the blocks that it touches."""
        row_bands, column_bands = self.bands
        rows, columns = row_bands.inside(at.rows), column_bands.inside(at.columns)
        if not (len(rows) and len(columns)):
            return
        tile = tile_window(part.weights, at, rows, columns)
        b, h, _ = at.place
        high = row_bands.touched(rows)
        into = self.table[b, h, high, column_bands.touched(columns)]
        groups = part.row_groups if pool == "mean" and rows == at.rows and row_bands.divides_by(rows, GROUP) else None
        if groups is not None:  # weights already summed over GROUP rows at a time, which ColumnMass needs as well
            some = groups[..., columns.start - at.columns.start : columns.stop - at.columns.start]
            high_sums = row_bands.pool(some, rows, -2, torch.sum, unit=GROUP)
            into += column_bands.pool(high_sums, columns, -1, torch.sum)
        elif pool == "mean":
            into += pool_tile(tile, rows, columns, self.bands, torch.sum)
        else:
            found = pool_tile(tile, rows, columns, self.bands, torch.amax)
            if part.problem.signed:  # by size
                low = pool_tile(tile, rows, columns, self.bands, torch.amin)
                found = torch.where(-low > found, low, found)
                into.copy_(torch.where(found.abs() > into.abs(), found, into))
            else:
                into.copy_(torch.where(found > into, found, into))
        # Count the allowed cells of each block; `cells` is None for columns that every row may see.
        for visible, cells in part.visible_columns:
            visible_tile = at.narrow(range(at.columns.start + visible.start, at.columns.start + visible.stop))
            across = column_bands.inside(visible_tile.columns)
            if not len(across):
                continue
            into = self.cells[b, h, high, column_bands.touched(across)]
            if cells is None:
                sizes = (band.sizes(span, into.device) for band, span in ((row_bands, rows), (column_bands, across)))
                high_sizes, wide_sizes = (t.to(into.dtype) for t in sizes)
                into += high_sizes.unsqueeze(-1) * wide_sizes
            else:
                some = tile_window(cells, visible_tile, rows, across).to(into.dtype)
                into += pool_tile(some, rows, across, self.bands, torch.sum)


def block_edges(window: range, count: int) -> list[int]:
    """Return the first cell of each block of a window, ``⌊i · size / count⌋``, then its end.

    Sizes differ by at most one cell, so that drawing all blocks equally wide moves none by more.
    """
    start, size = window.start, len(window)
    return [i * size // count + start for i in range(count + 1)]


def count_blocks(length: int, most: int) -> int:
    """Return how many blocks of ``⌈length / most⌉`` cells cover an axis; a few of them may have a cell less."""
    return -(-length // -(-length // most)) if length else 0


class Offsets(Statistic):
    """Mass on each diagonal of the matrix, by offset ``j - i`` from ``-(m - 1)`` to ``n - 1``.

    Parameters
    ----------
    mean : bool, default False
        Whether the mass is divided by the number of allowed cells of the diagonal; 0 where there is none.

    See Also
    --------
    Spans : mass by position, not by offset.

    Notes
    -----
    Entry ``t`` of the result is ``Σ_i A[i, i + t - (m - 1)]``. With m = n the weight on the token itself is
    at ``m - 1``, that on the previous token at ``m - 2``. With `mean`, the previous-token score of a head
    under a causal mask is entry ``m - 2``.

    Read with a row stride of one cell more, a tile has its diagonals in columns, without a copy; only the
    two corners where a diagonal is cut short are copied. Cost: one sum over the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(3, 8), torch.zeros(3, 8), mask=attlas.Causal())
    >>> A.collect(stats.Offsets())[0]
    tensor([0.3333, 0.8333, 1.8333, 0.0000, 0.0000])
    >>> stats.offsets(A)[2]  # the weight of the tokens on themselves: 1 + 1/2 + 1/3
    tensor(1.8333)
    """

    def __init__(self, mean: bool = False) -> None:
        self.mean = mean
        self.axis = None if mean else "diagonals"

    merge = merge_sums

    @property
    def is_sum(self) -> bool:  # type: ignore[override]  # computed here
        """Whether it adds up weights: it does without `mean`."""
        return not self.mean

    @property
    def is_mean(self) -> bool:  # type: ignore[override]  # computed here
        """Whether it divides by numbers of allowed cells."""
        return self.mean

    def forms(self, problem: Problem) -> TensorForm:
        # A number for each of the m + n - 1 diagonals.
        batch, heads, m, n = problem.shape
        return TensorForm((batch, heads, max(m + n - 1, 0)), problem.dtype)

    def start(self, problem: Problem) -> tuple[Tensor, Tensor | None]:
        # The mass of each diagonal, and for a mean the number of its allowed cells: 0.
        batch, heads, m, n = problem.shape
        mass = torch.zeros(batch, heads, max(m + n - 1, 0), dtype=problem.dtype, device=problem.device)
        return mass, torch.zeros_like(mass) if self.mean else None

    def step(self, carry: tuple[Tensor, Tensor | None], part: Part, at: Tile) -> tuple[Tensor, Tensor | None]:
        # Add the sums of the tile's diagonals, and for a mean the numbers of their allowed cells.
        mass, cells = carry
        b, h, _ = at.place
        # The tile's lowest diagonal starts at its last row and first column.
        first = at.columns.start - (at.rows.stop - 1) + at.m - 1
        mass[b, h, first : first + len(at.rows) + len(at.columns) - 1] += _diagonal_sums(part.weights)
        if cells is not None:
            for columns, some in part.visible_columns:
                if some is None:
                    some = torch.ones(len(at.rows), len(columns), dtype=torch.bool, device=at.device)
                found = _diagonal_sums(some.to(cells.dtype))
                start = first + columns.start
                cells[b, h, start : start + found.shape[-1]] += found
        return carry

    def finish(self, carry: tuple[Tensor, Tensor | None]) -> Tensor:
        # The mass of each diagonal, for a mean divided by the number of its allowed cells.
        mass, cells = carry
        return mass if cells is None else mass / cells.clamp(min=1.0)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient | None:
        # A weight has the gradient of its diagonal, in a mean divided by the allowed cells of the diagonal.
        if self.mean and interval_of(problem) is None:
            return None  # the pass itself counts the cells of a diagonal: autograd goes through its steps
        slopes = grad / cells_of_diagonals(problem).clamp(min=1.0) if self.mean else grad

        def of_tile(part: Part) -> Tensor:
            """Return for each cell of a part the gradient of the diagonal that it lies on."""
            (b, h, _), at = part.at.place, part.at
            first = at.columns.start - (at.rows.stop - 1) + at.m - 1
            own = slopes[b, h, first : first + len(at.rows) + len(at.columns) - 1]
            return own.unfold(-1, len(at.columns), 1).flip(-2)  # the lowest row has the lowest diagonals

        return CellGradient(weights=(of_tile,))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # A mean whose cells the mask does not tell is left to tiles.
        return {"offsets": True} if not self.mean or interval_of(problem) is not None else None

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor | None]:
        # The mass of each diagonal, and for a mean the number of its allowed cells.
        return results["offsets"], cells_of_diagonals(problem) if self.mean else None


def _diagonal_sums(x: Tensor) -> Tensor:
    """Sum the diagonals of a tile (..., r, c): shape (..., r + c - 1), from the lower left corner on."""
    r, c = x.shape[-2:]
    blocks = r // _ROWS_AT_ONCE
    if blocks < 2 or c <= _ROWS_AT_ONCE:
        return _short_diagonal_sums(x)
    # The corners of a block cost the square of its rows: so `_ROWS_AT_ONCE` rows at a time. The diagonals of a block
    # begin `_ROWS_AT_ONCE` places before those of the block above it.
    whole = _short_diagonal_sums(x[..., : blocks * _ROWS_AT_ONCE, :].unflatten(-2, (blocks, _ROWS_AT_ONCE)))
    out = x.new_zeros(*x.shape[:-2], r + c - 1)
    for block in range(blocks):
        start = r - (block + 1) * _ROWS_AT_ONCE
        out[..., start : start + _ROWS_AT_ONCE + c - 1] += whole[..., block, :]
    if r % _ROWS_AT_ONCE:
        out[..., : r % _ROWS_AT_ONCE + c - 1] += _short_diagonal_sums(x[..., blocks * _ROWS_AT_ONCE :, :])
    return out


def _short_diagonal_sums(x: Tensor) -> Tensor:
    """Sum the diagonals of a tile of few rows."""
    r, c = x.shape[-2:]
    if c <= r:
        return _skewed_sums(x)
    x = x.contiguous()
    # In rows that start one cell later each, column b holds the diagonal b as long as b + r <= c.
    slanted = x.as_strided((*x.shape[:-1], c - r + 1), (*x.stride()[:-2], c + 1, 1), x.storage_offset())
    # What remains are the triangles in the lower left and in the upper right corner.
    corners = _skewed_sums(x[..., :r].tril(-1) + x[..., c - r :].triu(1))
    return torch.cat([corners[..., : r - 1], slanted.sum(dim=-2), corners[..., r:]], dim=-1)


def _skewed_sums(x: Tensor) -> Tensor:
    """Sum diagonals by a copy in which each row stands one place further left than the row above it."""
    r, c = x.shape[-2:]
    # A row of r + c cells, flattened and read with r + c - 1 to a row, moves one place to the right each time.
    flat = functional.pad(x.flip(-2), (0, r)).flatten(-2)[..., : r * (r + c - 1)]
    found: Tensor = flat.unflatten(-1, (r, r + c - 1)).sum(dim=-2)
    return found


picture = function_of(Picture, Tensor, "shape (..., height, width)")
offsets = function_of(Offsets, Tensor, "shape (..., m + n - 1)")
