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
_FARTHEST_KEY = 1000.0  # bandwidths from the nearest key up to which a box keeps enough digits of its scale
_MOST_NODES = 48
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class _QueryBoxes:
    """Runs of sorted queries, each with the keys that matter to it; every tensor has one number for each box."""

    start: Tensor  # index of the first query
    count: Tensor  # how many queries
    centre: Tensor
    radius: Tensor  # r, in bandwidths
    nearest: Tensor  # index of the key nearest to the centre
    run: Run  # the keys that matter
    tilt: Tensor  # t, in bandwidths
    spread: Tensor  # T, in bandwidths


def gaussian_sums(line: Line) -> Sums:
    """Return the sums of a Gaussian line with the tolerance of its task."""
    task = line.task
    line, keeps_digits = _centred_line(line)
    # A quarter each for keys left out and for the polynomial; subtracting the own key can double both.
    error = task.tolerance / 4
    nodes = nodes_for(error, WIDTH / 2, _usual_spread(line, error))
    if task.moments:
        nearest = neighbours(line, line.x, line.own).clamp(min=0)
        return sums_in_windows(line, window(line, line.x, 0.0, nearest, error))
    boxes = _boxes_of_queries(line, error)
    smooth = (boxes.count > nodes) & (_log_error(nodes, boxes.radius, boxes.spread) <= math.log(error))
    smooth &= (boxes.centre - line.keys[boxes.nearest]).abs() <= _FARTHEST_KEY * line.h
    smooth &= keeps_digits
    m = len(line.x)
    sums = Sums(line.x.new_empty(m, task.values.shape[1]), line.x.new_empty(m), line.x.new_empty(m))
    rows = torch.repeat_interleave(~smooth, boxes.count).nonzero().squeeze(-1)
    if len(rows):
        put_rows(sums, rows, _sum_each(line, rows, error))
    task.report(len(rows))
    if bool(smooth.any()):
        _interpolate_boxes(line, boxes, smooth, nodes, sums)
    return sums if line.own is None else _without_own_keys(line, sums, error)


def window(line: Line, centre: Tensor, radius: Tensor | float, nearest: Tensor, error: float) -> Run:
    """Return the keys that can matter within `radius` of each centre; all others weigh below `error` of the row.

    Parameters
    ----------
    line : Line
        The keys.
    centre : Tensor, shape (p,)
        Points on the line.
    radius : Tensor, shape (p,), or float
        In bandwidths.
    nearest : Tensor of int64, shape (p,)
        Index of the key nearest to each centre.
    error : float
        Relative error of the sums.

    Notes
    -----
    Let a be the offset of a query from its nearest key, in bandwidths. A key further on by s in that direction weighs
    ``exp(s a - ½ s²)`` times as much. All keys, of weight W together, weigh less than `error` times the nearest key, of
    weight w, where that factor is below ``error w / W``: for s from ``a + sqrt(a² + 2 log(W / (error w)))`` on, with
    the largest a of the box.
    """
    base, weights, h = line.keys[nearest], line.weights(), line.h
    # The small additions cover the rounding of all numbers here.
    twice_log = 2 * (torch.log(weights.sum() / weights[nearest]).clamp(min=0) - math.log(error) + 1e-6)
    offset = (centre - base) / h
    reach = [_stable_root(a, twice_log) * (h * (1 + 1e-12)) for a in (radius - offset, radius + offset)]
    return Run(
        torch.searchsorted(line.keys, base - reach[0]), torch.searchsorted(line.keys, base + reach[1], right=True)
    )


def _centred_line(line: Line) -> tuple[Line, bool]:
    """Return the line with its middle at 0, and whether nodes between the queries then keep their digits.

    A node has the rounding error of a coordinate, about ``eps`` times the largest, where a query and its keys have
    exact differences. A line too long for that, in bandwidths, is left as it is.
    """
    low, high = torch.minimum(line.x[0], line.keys[0]), torch.maximum(line.x[-1], line.keys[-1])
    middle = low / 2 + high / 2
    keeps_digits = bool((high / 2 - low / 2) / line.h * torch.finfo(torch.float64).eps * 256 < line.task.tolerance / 4)
    if not keeps_digits:
        return line, False
    return replace(line, task=replace(line.task, x=line.task.x - middle, keys=line.task.keys - middle)), True


def nodes_for(error: float, radius: float, spread: float) -> int:
    """Return the number of nodes from which on the bound of the error is below `error`."""
    one, other = torch.tensor(radius), torch.tensor(spread)
    count = 4
    while count < _MOST_NODES and float(_log_error(count, one, other)) > math.log(error):
        count += 1
    return count


def _stable_root(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a + sqrt(a² + b)`` without cancellation."""
    size = a.abs()
    root = torch.where(size > 1e100, size, (a.clamp(-1e100, 1e100).square() + b).sqrt())
    return torch.where(a > 0, a + root, b / (root - a))


def _log_error(nodes: int, radius: Tensor, spread: Tensor) -> Tensor:
    """Return the logarithm of the bound of the polynomial's relative error."""
    reach = radius * spread
    return math.log(2) + nodes * (reach / 2).clamp(min=1e-300).log() - math.lgamma(nodes + 1) + 2 * reach


def _usual_spread(line: Line, error: float) -> float:
    """Return how far from the middle of a box keys may matter, in bandwidths, where the nearest key is in the box."""
    weights = line.weights()
    return math.sqrt(2 * (math.log(float(weights.sum() / weights.median())) - math.log(error))) + WIDTH


def _boxes_of_queries(line: Line, error: float) -> _QueryBoxes:
    """Return the boxes of the queries, at most `WIDTH` wide; empty ones are left out."""
    x, h = line.x, line.h
    box = ((x - x[0]) / (h * WIDTH)).floor()
    _, count = torch.unique_consecutive(box, return_counts=True)
    start = count.cumsum(0) - count
    first, last = x[start], x[start + count - 1]
    centre, radius = first / 2 + last / 2, (last / 2 - first / 2) / h
    nearest = neighbours(line, centre)
    run = window(line, centre, radius, nearest, error)
    low, high = line.keys[run.first], line.keys[run.stop - 1]
    tilt = ((low - centre) + (high - centre)) / (2 * h)
    return _QueryBoxes(start, count, centre, radius, nearest, run, tilt, (high - low) / (2 * h))


def _sum_each(line: Line, rows: Tensor, error: float) -> Sums:
    """Return the sums of some queries over the keys that matter to each."""
    x = line.x[rows]
    nearest = neighbours(line, x)
    return exact_sums(line, x, window(line, x, 0.0, nearest, error), nearest)


def _interpolate_boxes(line: Line, boxes: _QueryBoxes, smooth: Tensor, nodes: int, sums: Sums) -> None:
    """Fill in the sums of the queries of smooth boxes: exact at Chebyshev nodes, a polynomial between."""
    which = smooth.nonzero().squeeze(-1)
    centre, radius, tilt = boxes.centre[which], boxes.radius[which], boxes.tilt[which]
    angle = (torch.arange(nodes, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / nodes)
    y = radius.unsqueeze(-1) * angle.cos()  # the nodes of each box, from its centre in bandwidths
    points = (centre.unsqueeze(-1) + line.h * y).reshape(-1)
    run = Run(*(t[which].repeat_interleave(nodes) for t in boxes.run))
    exact = exact_sums(line, points, run, boxes.nearest[which].repeat_interleave(nodes))
    # H(y) = exp(y²/2 - tilt y) sum(y), what is interpolated: it varies less within a box than the sum does.
    scale = exact.log_scale.view(-1, nodes) + 0.5 * y.square() - y * tilt.unsqueeze(-1)  # of H, as a logarithm
    top = scale.amax(-1, keepdim=True)
    columns = torch.cat([exact.numerator, exact.denominator.unsqueeze(-1)], -1).view(len(which), nodes, -1)
    columns = columns * (scale - top).exp().unsqueeze(-1)
    degrees = torch.arange(nodes, dtype=torch.float64, device="cpu")
    # From the values at the nodes to the coefficients of a Chebyshev series, (degrees, boxes, columns).
    to_series = (degrees.unsqueeze(-1) * angle).cos() * (2.0 / nodes)
    to_series[0] /= 2
    series = torch.matmul(to_series, columns).movedim(1, 0).contiguous()
    box = torch.repeat_interleave(torch.arange(len(which), device="cpu"), boxes.count[which])
    rows = torch.repeat_interleave(smooth, boxes.count).nonzero().squeeze(-1)
    for some, at in zip(rows.split(_ROWS_AT_ONCE), box.split(_ROWS_AT_ONCE), strict=True):
        y = (line.x[some] - centre[at]) / line.h
        total = _chebyshev_values(series, at, (y / radius[at].clamp(min=1e-300)).clamp(-1.0, 1.0))
        # Back from H to the sum.
        scale = top[at, 0] - 0.5 * y.square() + y * tilt[at]
        # Writes into `sums`.
        put_rows(sums, some, Sums(total[:, :-1], total[:, -1], scale))


def _chebyshev_values(series: Tensor, at: Tensor, t: Tensor) -> Tensor:
    """Return values of Chebyshev series (degrees, boxes, columns): of the box `at` of each query, at t in [-1, 1].

    Clenshaw's recurrence: ``b_n = c_n + 2 t b_{n+1} - b_{n+2}``, and the value ``c_0 + t b_1 - b_2``.
    """
    twice = (2 * t).unsqueeze(-1)
    one = other = t.new_zeros(len(t), series.shape[-1])
    for degree in range(len(series) - 1, 0, -1):
        one, other = series[degree].index_select(0, at).addcmul_(twice, one).sub_(other), one
    return series[0].index_select(0, at).addcmul_(t.unsqueeze(-1), one).sub_(other)


def _without_own_keys(line: Line, sums: Sums, error: float) -> Sums:
    """Return the sums without each query's own key."""
    task, own = line.task, line.own
    if own is None:
        return sums
    has_own = own[1].first > own[0].stop  # not where the own key has weight 0, which a line leaves out
    # The run before the own key ends where it stands.
    own_key = own[0].stop[has_own]
    # The own key, of kernel 1, has w exp(-log_scale) of the sums. Where that is more than half of the row, the others
    # are summed again without it.
    weight = torch.zeros_like(sums.denominator)
    weight[has_own] = (line.weights()[own_key].log() - sums.log_scale[has_own]).exp()
    value = task.values.new_zeros(len(weight), task.values.shape[1])
    value[has_own] = task.values[own_key]
    others = Sums(sums.numerator - weight.unsqueeze(-1) * value, sums.denominator - weight, sums.log_scale)
    for rows in (weight > sums.denominator / 2).nonzero().squeeze(-1).split(_ROWS_AT_ONCE):
        nearest = neighbours(line, line.x[rows], (own[0].rows(rows), own[1].rows(rows)))
        alone, nearest = nearest < 0, nearest.clamp(min=0)
        exact = exact_sums_without_own(line, rows, window(line, line.x[rows], 0.0, nearest, error), nearest)
        exact.denominator[alone], exact.log_scale[alone] = 0.0, -torch.inf
        put_rows(others, rows, exact)
    return others
