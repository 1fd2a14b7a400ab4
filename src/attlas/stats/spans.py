"""Spans of queries and keys: windows, bands, and the mass that a span of queries gives to a span of keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, Statistic, TensorForm
from attlas.errors import ShapeError, public
from attlas.foundation.checks import is_integer
from attlas.foundation.compat import cached_property
from attlas.foundation.devices import DeviceCopies, to_device
from attlas.foundation.tiles import Tile
from attlas.stats.functions import function_of

Span: TypeAlias = slice | range | tuple[int, int]

_KNOWN_RUNS = 4096  # divided ranges that a `Bands` remembers


def check_span(name: str, value: Any) -> None:
    """Raise a ShapeError unless `value` is a slice or a range of step 1, a pair of whole numbers, or None."""
    if value is None:
        return
    if isinstance(value, slice | range):
        ends = [end for end in (value.start, value.stop) if end is not None]
        fits = value.step in (None, 1)
    else:
        ends = list(value) if isinstance(value, tuple) else []
        fits = len(ends) == 2
    if fits and all(map(is_integer, ends)):
        return
    rule = f"{name} must be a slice, a range or a pair (start, stop) of whole numbers, without a step."
    raise ShapeError(rule, f"{name} = {value!r}", f"{name}=slice(0, 64)")


def place_span(name: str, value: Span | None, size: int, axis: str) -> range:
    """Check a span, and return it as a range of an axis with `size` cells; negative ends count from its end."""
    check_span(name, value)
    if value is None:
        return range(size)
    start, stop = (value.start, value.stop) if isinstance(value, slice | range) else value
    start, stop = 0 if start is None else start, size if stop is None else stop
    if not isinstance(value, range):
        start, stop = start + size * (start < 0), stop + size * (stop < 0)
    if 0 <= start <= stop <= size:
        return range(start, stop)
    rule = f"{name} must lie within the {size} {axis} of the matrix, and start before it stops."
    raise ShapeError(rule, f"{name} = {value!r}", f"{name}=slice(0, {size})")


class Bands:
    """An axis cut into consecutive bands.

    Parameters
    ----------
    edges : sequence of int
        First place of each band, then the end of the last; strictly ascending.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = list(edges)
        self._known: dict[range, list[tuple[int, int, range]]] = {}

    def __len__(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def _edges_with_copies(self) -> tuple[Tensor, DeviceCopies]:
        """The edges as a tensor on the CPU, with their copies on other devices."""
        return torch.tensor(self.edges, dtype=torch.int64, device="cpu"), DeviceCopies()

    def inside(self, places: range) -> range:
        """Return the part of `places` that the bands cover, perhaps nothing."""
        start = max(places.start, self.edges[0])
        return range(start, max(start, min(places.stop, self.edges[-1])))

    def runs(self, places: range) -> list[tuple[int, int, range]]:
        """Divide places into runs: first band, number of bands, and places that they share evenly.

        A run of several bands holds each of them whole; a band that `places` cuts is a run of its own.
        """
        if places not in self._known:
            if len(self._known) > _KNOWN_RUNS:  # the columns of a pass repeat, its rows do not
                self._known.clear()
            self._known[places] = list(self._runs_of_bands(places))
        return self._known[places]

    def _runs_of_bands(self, places: range) -> Iterator[tuple[int, int, range]]:
        """Yield first band, number of bands and places: of adjacent whole bands of one size, or of one band."""
        edges, at = self.edges, places.start
        band = bisect_right(edges, at) - 1
        while at < places.stop:
            size, count = edges[band + 1] - edges[band], 0
            if at == edges[band]:
                most = min((places.stop - at) // size, len(self) - band)
                while count < most and edges[band + count + 1] - edges[band + count] == size:
                    count += 1
            stop = at + count * size if count else min(edges[band + 1], places.stop)
            yield band, max(count, 1), range(at, stop)
            at, band = stop, band + max(count, 1)

    def pool(self, x: Tensor, places: range, dim: int, reduce: Callable[..., Tensor], unit: int = 1) -> Tensor:
        """Reduce axis `dim` of `x`, whose cells stand at `places`, to one number for each band that these touch.

        With `unit`, a cell of `x` stands for so many places: it is a sum over them already.
        """
        pieces = []
        for _, count, run in self.runs(places):
            piece = x.narrow(dim, (run.start - places.start) // unit, len(run) // unit)
            pieces.append(reduce(piece.unflatten(dim, (count, len(run) // unit // count)), dim=dim))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)

    def divides_by(self, places: range, unit: int) -> bool:
        """Return whether `places` can be taken `unit` at a time without crossing from one band into another.

        Then sums over `unit` rows at a time, which another statistic has made, can be pooled in their place.
        """
        runs = self.runs(places)
        return all((run.start - places.start) % unit == 0 == len(run) // count % unit for _, count, run in runs)

    def touched(self, places: range) -> slice:
        """Return the bands that `places` touches, as a slice."""
        runs = self.runs(places)
        return slice(runs[0][0], runs[-1][0] + runs[-1][1])

    def sizes(self, places: range, device: torch.device | None = None) -> Tensor:
        """Return how many of `places` lie in each band that they touch, as int64 on a device, by default the CPU."""
        if device is not None and device.type != "cpu":
            touched, (edges, copies) = self.touched(places), self._edges_with_copies
            return copies.of(edges, device)[touched.start : touched.stop + 1].clamp(places.start, places.stop).diff()
        sizes = [len(run) // count for _, count, run in self.runs(places) for _ in range(count)]
        return torch.tensor(sizes, device="cpu")


def pool_tile(
    x: Tensor, rows: range, columns: range, bands: tuple[Bands, Bands], reduce: Callable[..., Tensor]
) -> Tensor:
    """Reduce a tile to one number for each pair of bands; rows first, since columns lie side by side."""
    return bands[1].pool(bands[0].pool(x, rows, -2, reduce), columns, -1, reduce)


class Spans(Statistic):
    """Mass that each span of queries gives to each span of keys, ``T_ab = Σ_{i ∈ a} Σ_{j ∈ b} A_ij``.

    Parameters
    ----------
    rows, columns : sequence of slice, range or (start, stop)
        Spans of queries and of keys; they may overlap, be empty, or leave tokens out. Negative ends of
        a slice or a pair count from the end.
    mean : bool, default False
        Whether the mass is averaged over the queries of each span: then it is at most 1, and spans that
        divide the keys share 1 out.

    Raises
    ------
    ShapeError
        If a span is no such thing, or does not lie within the matrix.

    See Also
    --------
    Picture : spans of equal size over a window.

    Notes
    -----
    The axes are cut wherever a span starts or stops, each piece is summed once, and spans add up pieces.
    An empty span has mass 0. Cost: one sum over the tile; memory of (2 len(rows)) (2 len(columns)) numbers
    a head.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(4, 8), torch.zeros(4, 8))
    >>> A.collect(stats.Spans(rows=[slice(0, 4)], columns=[(0, 1), (1, 4), (0, 0)], mean=True))[0]
    tensor([[0.2500, 0.7500, 0.0000]])
    >>> stats.spans(A, rows=[slice(0, 2), slice(2, 4)], columns=[slice(0, 1), slice(1, 4)])
    tensor([[0.5000, 1.5000],
            [0.5000, 1.5000]])
    """

    is_sum = True

    @public("Spans()")
    def __init__(self, rows: Iterable[Span], columns: Iterable[Span], mean: bool = False) -> None:
        self.rows = tuple(rows)
        self.columns = tuple(columns)
        self.mean = mean
        for name, given in (("rows", self.rows), ("columns", self.columns)):
            for index, span in enumerate(given):
                check_span(f"{name}[{index}]", span)

    def forms(self, problem: Problem) -> TensorForm:
        # A number for each pair of a span of rows and a span of columns.
        return TensorForm((*problem.shape[:2], len(self.rows), len(self.columns)), problem.dtype)

    @public("Spans()")
    def start(self, problem: Problem) -> _PieceMass:
        # Positions of the spans in this matrix, and room for the mass of their pieces.
        m, n = problem.shape[2:]
        rows = [place_span(f"rows[{i}]", span, m, "queries") for i, span in enumerate(self.rows)]
        columns = [place_span(f"columns[{i}]", span, n, "keys") for i, span in enumerate(self.columns)]
        return _PieceMass(rows, columns, problem)

    def step(self, carry: _PieceMass, part: Part, at: Tile) -> _PieceMass:
        # Add the weights of the part to the pieces that they lie in.
        carry.add(part, at)
        return carry

    def merge(self, a: _PieceMass, b: _PieceMass) -> _PieceMass:
        # Add the masses of both.
        a.mass += b.mass
        return a

    def finish(self, carry: _PieceMass) -> Tensor:
        """Sum the pieces that belong to each pair of spans."""
        left, right = carry.memberships(self.mean)
        return torch.matmul(torch.matmul(left, carry.mass), right.mT)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # Each weight has the sum of the gradients of all pairs of spans that hold its cell.
        pieces = self.start(problem)
        left, right = pieces.memberships(self.mean)
        table = torch.matmul(torch.matmul(left.mT, grad), right)
        return CellGradient(weights=(partial(spread_blocks, table, pieces.bands),))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The pieces are the blocks of a picture of sums.
        rows, columns = self.start(problem).bands
        if not (len(rows) and len(columns)):
            return None
        return {"picture_sum": (rows.edges, columns.edges)}

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> _PieceMass:
        # The kernels give the mass of each piece.
        carry = self.start(problem)
        carry.mass = results["picture_sum"]
        return carry


class _PieceMass:
    """The mass of each piece of rows on each piece of columns; pieces lie between neighbouring ends of spans."""

    def __init__(self, rows: list[range], columns: list[range], problem: Problem) -> None:
        self.rows, self.columns = rows, columns
        self.bands = _cut_at_ends(rows), _cut_at_ends(columns)
        self.mass = torch.zeros(*problem.shape[:2], *map(len, self.bands), dtype=problem.dtype, device=problem.device)

    def add(self, part: Part, at: Tile) -> None:
        """Add the weights of a tile to the pieces that it touches."""
        row_bands, column_bands = self.bands
        rows, columns = row_bands.inside(at.rows), column_bands.inside(at.columns)
        if not (len(rows) and len(columns)):
            return
        b, h, _ = at.place
        into = self.mass[b, h, row_bands.touched(rows), column_bands.touched(columns)]
        if rows == at.rows and len(row_bands.runs(rows)) == 1 and row_bands.runs(rows)[0][1] == 1:
            # All rows belong together: their sum is what other statistics want too.
            start = columns.start - at.columns.start
            sums = part.column_sums[..., start : start + len(columns)]
            into += column_bands.pool(sums, columns, -1, torch.sum).unsqueeze(-2)
        else:
            tile = tile_window(part.weights, at, rows, columns)
            into += pool_tile(tile, rows, columns, (row_bands, column_bands), torch.sum)

    def memberships(self, mean: bool) -> tuple[Tensor, Tensor]:
        """Return which pieces belong to each span, as matrices (spans, pieces) of 0 and 1 for rows and columns.

        With `mean`, those of rows are divided by the number of the span's rows.
        """
        left = _span_membership(self.rows, self.bands[0], self.mass.dtype)
        if mean:
            left /= left.new_tensor([max(len(span), 1) for span in self.rows]).unsqueeze(-1)
        right = _span_membership(self.columns, self.bands[1], self.mass.dtype)
        return to_device(left, self.mass.device), to_device(right, self.mass.device)


def spread_blocks(table: Tensor, bands: tuple[Bands, Bands], part: Part) -> Tensor:
    """Return the entry of `table` for the block of each cell of a part, shape (B, H, r, c); 0 outside of all blocks."""
    at, out = part.at, part.scratch("blocks").zero_()
    rows, columns = bands[0].inside(at.rows), bands[1].inside(at.columns)
    if len(rows) and len(columns):
        b, h, _ = at.place
        some = table[b, h, bands[0].touched(rows), bands[1].touched(columns)].to(out.dtype)
        for dim, band, places in ((-2, bands[0], rows), (-1, bands[1], columns)):
            sizes = band.sizes(places, some.device)
            some = some.repeat_interleave(sizes, dim=dim, output_size=len(places))
        tile_window(out, at, rows, columns).copy_(some)
    return out


def tile_window(x: Tensor, at: Tile, rows: range, columns: range) -> Tensor:
    """Return the cells of a tile at some rows and columns of the matrix."""
    i, j = at.rows.start, at.columns.start
    return x[..., rows.start - i : rows.stop - i, columns.start - j : columns.stop - j]


def _cut_at_ends(spans: list[range]) -> Bands:
    """Return the bands between neighbouring ends of spans: a span is a union of them."""
    edges = sorted({end for span in spans if len(span) for end in (span.start, span.stop)})
    return Bands(edges or [0])  # spans without a cell make no band


def _span_membership(spans: list[range], bands: Bands, dtype: torch.dtype) -> Tensor:
    """Return a matrix (spans, pieces), on the CPU: 1 where a piece belongs to a span, else 0."""
    edges = torch.tensor(bands.edges, device="cpu")
    ends = torch.tensor([(span.start, span.stop) for span in spans], dtype=torch.int64, device="cpu")
    starts, stops = ends.view(-1, 2, 1).unbind(1)
    return ((edges[:-1] >= starts) & (edges[1:] <= stops)).to(dtype)


spans = function_of(Spans, Tensor, "shape (..., len(rows), len(columns))")
