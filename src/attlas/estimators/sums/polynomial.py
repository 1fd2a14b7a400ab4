"""Sums of kernels that are polynomials within one bandwidth, on a line: boxcar, Epanechnikov, triangular.

The line is cut in cells of one bandwidth. A window ``(x - h, x + h)`` is the end of one cell, the next cell whole, and
the beginning of the one after that, or less; so each side of the query is the end of a cell and the beginning of
another, and sums that run forward and backward within cells give it by additions alone. They are sums of powers of
``(z - c) / h``, counted from the middle c of the cell, which lie in [-½, ½], and are moved to the query by the binomial
formula.

What rounds is then below ``gamma`` times the weight of the keys of the window. Where that is not below the tolerance
times the denominator, because all keys of a query lie at the rim, its sum is taken directly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.estimators.sums.direct import Run
from attlas.estimators.sums.line import Line, exact_sums, exact_sums_without_own, neighbours, sums_in_windows
from attlas.estimators.sums.result import Sums, put_rows
from attlas.estimators.sums.scan import decayed_cumsum

# Coefficients of 1, u, u² of each kernel, u in [0, 1) being the distance in bandwidths.
_KERNEL_COEFFICIENTS = {"boxcar": (1.0,), "triangular": (1.0, -1.0), "epanechnikov": (1.0, 0.0, -1.0)}
# Units of rounding: 64 steps on four levels of the running sums, three roundings each, times 9 for the sum of the
# binomial coefficients with |y| <= 3/2, and as much as that again for all the rest.
_ROUNDING_UNITS = 2 * 9 * 3 * 64 * 4
_ROWS_AT_ONCE = 1 << 17


class _KeyPiece(NamedTuple):
    """Keys of one cell on one side of each query: those from or up to a place, where `used`."""

    place: Tensor
    used: Tensor
    side: float  # 1 on the right of the query, -1 on the left


class _KeyCells(NamedTuple):
    """The occupied cells of the keys."""

    of: Tensor  # ordinal of each key's cell, shape (n,)
    middle: Tensor  # shape (cells,)
    first: Tensor  # whether a key is the first, or the last, of its cell
    last: Tensor


def polynomial_sums(line: Line) -> Sums:
    """Return the sums of a line with a bounded kernel, with the tolerance of its task."""
    x, m, e = line.x, len(line.x), line.task.values.shape[1]
    low, high = _first_and_last_key(line)
    if line.task.moments:
        return sums_in_windows(line, Run(low.long(), high.long()))
    cells = _cells_of_keys(line, low.dtype)
    middle = torch.searchsorted(line.keys, x, out_int32=low.dtype is torch.int32).clamp_(low, high)
    weights = line.weights().unsqueeze(-1)
    terms = torch.cat([weights * line.task.values, weights], -1)
    # Sums of the kernel, the weight of the keys of each window, and the rows of which a side is not made up of pieces.
    total, bare = x.new_zeros(m, e + 1), x.new_zeros(m)
    odd = torch.zeros(m, dtype=torch.bool, device="cpu")
    pieces: tuple[list[_KeyPiece], list[_KeyPiece]] = ([], [])
    for first, stop, side in ((low, middle, -1.0), (middle, high, 1.0)):
        odd |= _add_split_pieces(cells, first, stop, side, pieces)
    del middle
    # The kernel is a polynomial in (x - k) / h: a sum for each power of the keys; `_add_power` makes those of K of it.
    for power in range(len(_KERNEL_COEFFICIENTS[line.task.kernel])):
        if power:
            terms *= ((line.keys - cells.middle[cells.of]) / line.h).unsqueeze(-1)
        for mirrored in (False, True):
            if mirrored:
                sums = decayed_cumsum((~cells.last).flip(0).double(), terms.flip(0)).flip(0)
            else:
                sums = decayed_cumsum((~cells.first).double(), terms)
            for piece in pieces[int(mirrored)]:
                _add_power(line, cells, sums, power, piece, total, bare)
            del sums
        line.task.report(m // 2)
    scale = torch.where(low < high, 0.0, x.new_full((m,), -torch.inf))
    if line.own is not None:
        _subtract_own_keys(line, total)
    return _with_direct_rows(line, Sums(total[:, :-1], total[:, -1], scale), bare, odd, Run(low, high))


def _cells_of_keys(line: Line, index_dtype: torch.dtype) -> _KeyCells:
    """Divide the sorted keys into cells of one bandwidth, and return those that have a key."""
    keys = line.keys
    cell = ((keys - keys[0]) / line.h).floor_()
    new, edge = cell[1:] != cell[:-1], torch.ones(1, dtype=torch.bool, device="cpu")
    first, last = torch.cat([edge, new]), torch.cat([new, edge])
    of = first.cumsum(0, dtype=index_dtype) - 1
    return _KeyCells(of, keys[first] / 2 + keys[last] / 2, first, last)


def _add_split_pieces(
    cells: _KeyCells, first: Tensor, stop: Tensor, side: float, pieces: tuple[list[_KeyPiece], list[_KeyPiece]]
) -> Tensor:
    """Add the end of a cell and the beginning of the next, which make up one side; return where they do not.

    `first` and `stop` (m,) are the keys of that side of each query. Sums that run forward give the beginning of a
    cell, and go into the first list of pieces; sums that run backward its end, and go into the second.
    """
    busy = first < stop
    start, end = first.clamp(max=len(cells.of) - 1), (stop - 1).clamp(min=0)
    same = cells.of[start] == cells.of[end]
    beginning = busy & (~same | cells.first[start])
    ending = busy & (~same | (cells.last[end] & ~cells.first[start]))
    pieces[0].append(_KeyPiece(end, beginning, side))
    pieces[1].append(_KeyPiece(start, ending, side))
    return busy & ((cells.of[end] > cells.of[start] + 1) | (same & ~beginning & ~ending))


def _add_power(
    line: Line, cells: _KeyCells, sums: Tensor, power: int, piece: _KeyPiece, total: Tensor, bare: Tensor
) -> None:
    """Add the part of the kernel that one power of the offsets has in one piece of every window.

    `sums` (n, e + 1) are the running sums of that power, `total` (m, e + 1) those of the kernel, which are added to;
    `bare` (m,) gets the weight of the keys of each window.
    """
    coefficients = _KERNEL_COEFFICIENTS[line.task.kernel]
    for start in range(0, len(total), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        place, used = piece.place[rows], piece.used[rows]
        y = (line.x[rows] - cells.middle[cells.of[place]]) / line.h
        factor = torch.zeros_like(y)
        for degree in range(power, len(coefficients)):
            share = coefficients[degree] * piece.side**degree * math.comb(degree, power)
            factor += share * (-y) ** (degree - power)
        found = sums.index_select(0, place).masked_fill_(~used.unsqueeze(-1), 0.0)
        if power == 0:
            bare[rows] += found[:, -1]
        total[rows] += found.mul_(factor.masked_fill_(~used, 0.0).unsqueeze(-1))


def _subtract_own_keys(line: Line, total: Tensor) -> None:
    """Take each query's own key off its row, where the kernel is 1."""
    if line.own is None:
        return
    kept = line.own[1].first > line.own[0].stop  # not where the own key has weight 0, which a line leaves out
    own_key = line.own[0].stop[kept]
    weights = line.weights()[own_key].unsqueeze(-1)
    total[kept] -= torch.cat([weights * line.task.values[own_key], weights], -1)


def _with_direct_rows(line: Line, sums: Sums, bare: Tensor, odd: Tensor, run: Run) -> Sums:
    """Return the sums with those rows taken directly whose rounding might exceed the tolerance."""
    # Rounding is at most gamma * bare: `bare` sums the weights without the kernel, whose terms may cancel.
    gamma = _ROUNDING_UNITS * torch.finfo(torch.float64).eps
    doubtful = odd | (bare * gamma > line.task.tolerance * sums.denominator)
    for rows in doubtful.nonzero().squeeze(-1).split(_ROWS_AT_ONCE):
        some = Run(run.first[rows].long(), run.stop[rows].long())
        if line.own is None:
            found = exact_sums(line, line.x[rows], some, neighbours(line, line.x[rows]))
        else:
            found = exact_sums_without_own(line, rows, some)
        put_rows(sums, rows, found)
    empty = sums.denominator == 0
    sums.log_scale[empty] = -torch.inf
    return sums


def _first_and_last_key(line: Line) -> tuple[Tensor, Tensor]:
    """Return the first key within one bandwidth of each query and the one after the last; a key at one is outside."""
    x, keys, h, n = line.x, line.keys, line.h, len(line.keys)
    # Places fill much of the memory that all this takes: half as much where 32 bits hold them.
    narrow = n < 1 << 31
    low, high = (torch.searchsorted(keys, end, out_int32=narrow) for end in (x - h, x + h))
    # The ends of the window are rounded; the differences to the keys there say which side of them a key is on.
    while True:
        out = (low < n) & (x - keys[low.clamp(max=n - 1)] >= h)
        inside = (low > 0) & (x - keys[(low - 1).clamp(min=0)] < h)
        if not bool((out | inside).any()):
            break
        low += out.to(low.dtype) - (inside & ~out).to(low.dtype)
    while True:
        inside = (high < n) & (keys[high.clamp(max=n - 1)] - x < h)
        out = (high > 0) & (keys[(high - 1).clamp(min=0)] - x >= h)
        if not bool((out | inside).any()):
            break
        high += inside.to(high.dtype) - (out & ~inside).to(high.dtype)
    return low, torch.maximum(low, high)
