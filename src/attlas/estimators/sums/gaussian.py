"""Gaussian sums on a line: a few exact sums in each box of queries, and a polynomial of proven error between them.

In a box of centre c, in units of the bandwidth, a query c + y and keys at c + s::

    sum_j w_j exp(-½ (y - s_j)²) = exp(-½ y² + y t) H(y),   H(y) = sum_j w_j exp(-½ s_j²) exp(y (s_j - t))

with t the middle of the keys that matter, none of which lies further than T from it. H is interpolated in P Chebyshev
nodes of [-r, r]. For each term exp(y a), |a| <= T, the error of that is at most ``2 (r a / 2)^P / P! exp(r a)``, and
the term is at least ``exp(-r a)``; all terms are positive, so that

    |H - interpolant| <= 2 (r T / 2)^P / P! exp(2 r T) H

holds at every query, near the data and far from it, and for numerators with the largest ``|v|`` as a factor. Keys that
are left out weigh, relative to a nearest key and all together, less than a given part of it at every query of the box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.estimators.sums.direct import Run
from attlas.estimators.sums.line import Line, exact_sums, exact_sums_without_own, neighbours, sums_in_windows
from attlas.estimators.sums.result import Sums, put_rows

WIDTH = 1.0  # of a box, in bandwidths
_FARTHEST = 1000.0  # bandwidths from the nearest key up to which a box keeps enough digits of its scale
_MOST_NODES = 48
_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Runs of sorted queries, each with the keys that matter to it."""

    start: Tensor  # place of the first query, and how many
    count: Tensor
    centre: Tensor
    radius: Tensor  # in bandwidths
    near: Tensor
    run: Run
    tilt: Tensor  # t and T, in bandwidths
    spread: Tensor


def gaussian_sums(line: Line) -> Sums:
    """Return the sums of a Gaussian line with the tolerance of its task."""
    task = line.task
    line, fine = _centred(line)
    # A quarter each for keys left out, for the polynomial, and for what taking the own key off multiplies.
    part = task.tolerance / 4
    nodes = nodes_for(part, WIDTH / 2, _usual_spread(line, part))
    if task.moments:
        near = neighbours(line, line.x, line.own).clamp(min=0)
        return sums_in_windows(line, window(line, line.x, 0.0, near, part))
    boxes = _boxes(line, part)
    smooth = (boxes.count > nodes) & (_log_error(nodes, boxes.radius, boxes.spread) <= math.log(part))
    smooth &= (boxes.centre - line.keys[boxes.near]).abs() <= _FARTHEST * line.h
    smooth &= fine
    m = len(line.x)
    sums = Sums(line.x.new_empty(m, task.values.shape[1]), line.x.new_empty(m), line.x.new_empty(m))
    rough = torch.repeat_interleave(~smooth, boxes.count).nonzero().squeeze(-1)
    if len(rough):
        put_rows(sums, rough, _sum_each(line, rough, part))
    if bool(smooth.any()):
        _interpolate(line, boxes, smooth, nodes, sums)
    return sums if line.own is None else _without_own(line, sums, part)


def window(line: Line, centre: Tensor, radius: Tensor | float, near: Tensor, part: float) -> Run:
    """Return the keys that can matter within `radius` of each centre; the others weigh less than `part` of the row.

    Notes
    -----
    A key at a distance s beyond a nearest one, in bandwidths, weighs ``exp(s a - ½ s²)`` times as much, with a the
    place of the query beyond the nearest key. All of weight W together are below `part` of the nearest key's w where
    that is below ``part w / W``: from ``a + sqrt(a² + 2 log(W / (part w)))`` on, for the largest a of the box.
    """
    base, weights, h = line.keys[near], line.weights(), line.h
    # Half as much again of a tiny bound makes good for the rounding of every number here.
    twice = 2 * (torch.log(weights.sum() / weights[near]).clamp(min=0) - math.log(part) + 1e-6)
    place = (centre - base) / h
    reach = [_root(a, twice) * (h * (1 + 1e-12)) for a in (radius - place, radius + place)]
    return Run(
        torch.searchsorted(line.keys, base - reach[0]), torch.searchsorted(line.keys, base + reach[1], right=True)
    )


def _centred(line: Line) -> tuple[Line, bool]:
    """Return the line counted from its middle, and whether nodes between the queries then keep their digits.

    A node has the rounding error of a coordinate, about ``eps`` times the largest, where a query and its keys have
    exact differences. A line too long for that, in bandwidths, is left as it is.
    """
    low, high = torch.minimum(line.x[0], line.keys[0]), torch.maximum(line.x[-1], line.keys[-1])
    middle = low / 2 + high / 2
    fine = bool((high / 2 - low / 2) / line.h * torch.finfo(torch.float64).eps * 256 < line.task.tolerance / 4)
    if not fine:
        return line, False
    return replace(line, task=replace(line.task, x=line.task.x - middle, keys=line.task.keys - middle)), True


def nodes_for(error: float, radius: float, spread: float) -> int:
    """Return the number of nodes from which on the bound of the error is below `error`."""
    one, other = torch.tensor(radius), torch.tensor(spread)
    count = 4
    while count < _MOST_NODES and float(_log_error(count, one, other)) > math.log(error):
        count += 1
    return count


def _root(a: Tensor, twice: Tensor) -> Tensor:
    """Return ``a + sqrt(a² + twice)`` without taking the difference of near numbers."""
    size = a.abs()
    root = torch.where(size > 1e100, size, (a.clamp(-1e100, 1e100).square() + twice).sqrt())
    return torch.where(a > 0, a + root, twice / (root - a))


def _log_error(nodes: int, radius: Tensor, spread: Tensor) -> Tensor:
    """Return the logarithm of the bound of the polynomial's relative error."""
    reach = radius * spread
    return math.log(2) + nodes * (reach / 2).clamp(min=1e-300).log() - math.lgamma(nodes + 1) + 2 * reach


def _usual_spread(line: Line, part: float) -> float:
    """Return how far from the middle of a box keys may matter, where the nearest key is near."""
    weights = line.weights()
    return math.sqrt(2 * (math.log(float(weights.sum() / weights.median())) - math.log(part))) + WIDTH


def _boxes(line: Line, part: float) -> _Boxes:
    x, h = line.x, line.h
    box = ((x - x[0]) / (h * WIDTH)).floor()
    _, count = torch.unique_consecutive(box, return_counts=True)
    start = count.cumsum(0) - count
    first, last = x[start], x[start + count - 1]
    centre, radius = first / 2 + last / 2, (last / 2 - first / 2) / h
    near = neighbours(line, centre)
    run = window(line, centre, radius, near, part)
    low, high = line.keys[run.first], line.keys[run.stop - 1]
    tilt = ((low - centre) + (high - centre)) / (2 * h)
    return _Boxes(start, count, centre, radius, near, run, tilt, (high - low) / (2 * h))


def _sum_each(line: Line, rows: Tensor, part: float) -> Sums:
    """Return the sums of some queries over the keys that matter to each."""
    x = line.x[rows]
    near = neighbours(line, x)
    return exact_sums(line, x, window(line, x, 0.0, near, part), near)


def _interpolate(line: Line, boxes: _Boxes, smooth: Tensor, nodes: int, sums: Sums) -> None:
    """Fill in the sums of the queries of smooth boxes."""
    there = smooth.nonzero().squeeze(-1)
    centre, radius, tilt = boxes.centre[there], boxes.radius[there], boxes.tilt[there]
    angle = (torch.arange(nodes, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / nodes)
    y = radius.unsqueeze(-1) * angle.cos()
    points = (centre.unsqueeze(-1) + line.h * y).reshape(-1)
    run = Run(*(t[there].repeat_interleave(nodes) for t in boxes.run))
    found = exact_sums(line, points, run, boxes.near[there].repeat_interleave(nodes))
    scale = found.log_scale.view(-1, nodes) + 0.5 * y.square() - y * tilt.unsqueeze(-1)
    top = scale.amax(-1, keepdim=True)
    columns = torch.cat([found.numerator, found.denominator.unsqueeze(-1)], -1).view(len(there), nodes, -1)
    columns = columns * (scale - top).exp().unsqueeze(-1)
    degrees = torch.arange(nodes, dtype=torch.float64, device="cpu")
    to_series = (degrees.unsqueeze(-1) * angle).cos() * (2.0 / nodes)
    to_series[0] /= 2
    series = torch.matmul(to_series, columns).movedim(1, 0).contiguous()
    box = torch.repeat_interleave(torch.arange(len(there), device="cpu"), boxes.count[there])
    rows = torch.repeat_interleave(smooth, boxes.count).nonzero().squeeze(-1)
    for some, at in zip(rows.split(_ROWS), box.split(_ROWS), strict=True):
        y = (line.x[some] - centre[at]) / line.h
        total = _clenshaw(series, at, (y / radius[at].clamp(min=1e-300)).clamp(-1.0, 1.0))
        scale = top[at, 0] - 0.5 * y.square() + y * tilt[at]
        put_rows(sums, some, Sums(total[:, :-1], total[:, -1], scale))


def _clenshaw(series: Tensor, at: Tensor, t: Tensor) -> Tensor:
    """Return Chebyshev series, shape (degrees, boxes, columns), of the boxes `at` in the places t of [-1, 1]."""
    twice = (2 * t).unsqueeze(-1)
    one = other = t.new_zeros(len(t), series.shape[-1])
    for degree in range(len(series) - 1, 0, -1):
        one, other = series[degree].index_select(0, at).addcmul_(twice, one).sub_(other), one
    return series[0].index_select(0, at).addcmul_(t.unsqueeze(-1), one).sub_(other)


def _without_own(line: Line, sums: Sums, part: float) -> Sums:
    """Return the sums without each query's own key."""
    task, own = line.task, line.own
    if own is None:
        return sums
    kept = own[1].first > own[0].stop
    place = own[0].stop[kept]
    # The own key has log-weight 0. Where it is more than half of the row, the others are summed again without it.
    share = torch.zeros_like(sums.denominator)
    share[kept] = (line.weights()[place].log() - sums.log_scale[kept]).exp()
    heavy = share > sums.denominator / 2
    value = task.values.new_zeros(len(share), task.values.shape[1])
    value[kept] = task.values[place]
    left = Sums(sums.numerator - share.unsqueeze(-1) * value, sums.denominator - share, sums.log_scale)
    for rows in heavy.nonzero().squeeze(-1).split(_ROWS):
        mine = own[0].rows(rows), own[1].rows(rows)
        near = neighbours(line, line.x[rows], mine)
        there = near >= 0
        found = exact_sums_without_own(
            line, rows, window(line, line.x[rows], 0.0, near.clamp(min=0), part), near.clamp(min=0)
        )
        found.denominator[~there], found.log_scale[~there] = 0.0, -torch.inf
        put_rows(left, rows, found)
    return left
