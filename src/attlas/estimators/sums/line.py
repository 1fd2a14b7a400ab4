"""Keys and queries on a line, sorted once: where each query's neighbours lie, and exact sums over runs of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.estimators.sums.direct import Run, sum_run, sum_runs, without_own
from attlas.estimators.sums.result import Sums, concatenate, put_rows
from attlas.estimators.sums.task import Task

_PAIRS_AT_ONCE = 1 << 20  # pairs that are held at once where differences are taken one by one
_POINTS_AT_ONCE = 1 << 17  # points of one call of the kernels
_REMOTE_BANDWIDTHS = 100.0  # bandwidths from which on a log-weight has lost digits of the difference between two keys


@dataclass(frozen=True, eq=False)
class Line:
    """A task of one coordinate, in float64, keys and queries ascending.

    Parameters
    ----------
    task : Task
        With x and keys ascending; all weights are above 0.
    order : Tensor of int64, shape (m,)
        Place of each sorted query among the queries that were given.
    own : tuple of Run, optional
        Keys before and after each query's own.
    """

    task: Task
    order: Tensor
    own: tuple[Run, Run] | None

    @property
    def x(self) -> Tensor:
        """Queries, shape (m,)."""
        return self.task.x[:, 0]

    @property
    def keys(self) -> Tensor:
        """Keys, shape (n,)."""
        return self.task.keys[:, 0]

    @property
    def h(self) -> float:
        """Bandwidth, in [1, 2)."""
        return float(self.task.bandwidth[0])

    def weights(self) -> Tensor:
        """Return the weights of the keys, shape (n,)."""
        return self.keys.new_ones(()).expand(len(self.keys)) if self.task.weights is None else self.task.weights


def sorted_line(task: Task) -> Line:
    """Return a task of one coordinate, sorted; keys of weight 0 are left out."""
    keys, way = task.keys[:, 0].double().sort(stable=True)
    values, weights = task.values.double()[way], task.weights
    kept = torch.ones(len(keys), dtype=torch.bool) if weights is None else weights[way] > 0
    # `kept`: keys with a weight; where queries are the keys, the runs before and after each query's own.
    own = without_own(kept) if task.leave_one_out else None
    x, order = (keys, way) if task.leave_one_out else task.x[:, 0].double().sort()
    if weights is not None:
        weights, keys, values = weights.double()[way][kept], keys[kept], values[kept]
    line = replace(task, x=x.unsqueeze(-1), keys=keys.unsqueeze(-1), values=values, weights=weights)
    return Line(line, order, own)


def neighbours(line: Line, points: Tensor, own: tuple[Run, Run] | None = None) -> Tensor:
    """Return the place of the key that is nearest to each point, its own left out; -1 where there is none.

    Parameters
    ----------
    line : Line
        The keys.
    points : Tensor, shape (p,)
        Anywhere on the line.
    own : tuple of Run, optional
        Keys before and after the own key of each point, which then is that key.
    """
    n = len(line.keys)
    right = torch.searchsorted(line.keys, points) if own is None else own[1].first
    left = (right if own is None else own[0].stop) - 1
    if not n:
        return torch.full_like(right, -1)
    gaps = [points - line.keys[left.clamp(min=0)], line.keys[right.clamp(max=n - 1)] - points]
    nearer = torch.where((right >= n) | ((left >= 0) & (gaps[0] <= gaps[1])), left, right)
    return torch.where((left < 0) & (right >= n), -1, nearer)


def exact_sums(line: Line, points: Tensor, run: Run, near: Tensor) -> Sums:
    """Return the sums of every pair of a point and the run of keys that belongs to it.

    Parameters
    ----------
    line : Line
        The keys.
    points : Tensor, shape (p,)
        Anywhere on the line.
    run : Run
        The keys of each point.
    near : Tensor of int64, shape (p,)
        A key of the run that none of the others comes much nearer to the point than.
    """
    task = line.task
    done = []
    for start in range(0, max(len(points), 1), _POINTS_AT_ONCE):
        block = slice(start, start + _POINTS_AT_ONCE)
        x, first, stop = points[block], run.first[block], run.stop[block]
        # Points far from all of their keys are summed apart, by the differences between keys.
        far = (first < stop) & _is_far_from_keys(line, x, near[block])
        busy = (first < stop) & ~far
        low = int(first[busy].min()) if bool(busy.any()) else 0
        high = int(stop[busy].max()) if bool(busy.any()) else 0
        # The window decides which keys are inside; at its rim rounding must not decide otherwise.
        h = task.bandwidth * (1 + 16 * torch.finfo(torch.float64).eps) if task.kernel == "boxcar" else task.bandwidth
        part = replace(task.of_keys(slice(low, high)), x=x.unsqueeze(-1), bandwidth=h)
        sums = sum_run(part, Run(first - low, torch.where(busy, stop, first) - low))
        if bool(far.any()):
            far_rows = far.nonzero().squeeze(-1)
            far_run = Run(first[far_rows], stop[far_rows])
            put_rows(sums, far_rows, _sums_far_from_keys(line, x[far_rows], far_run, near[block][far_rows]))
        done.append(sums)
    return concatenate(done)


def exact_sums_without_own(line: Line, rows: Tensor, run: Run, near: Tensor | None = None) -> Sums:
    """Return the exact sums of some queries over their runs of keys, each query's own left out.

    Parameters
    ----------
    line : Line
        A line that leaves keys out.
    rows : Tensor of int64, shape (p,)
        The queries.
    run : Run
        The keys of each, the own one among them or not.
    near : Tensor of int64, optional, shape (p,)
        The key that is nearest to each, not its own.
    """
    if line.own is None:
        raise ValueError("this line leaves no key out")
    before, after = (side.rows(rows) for side in line.own)
    x = line.x[rows]
    if near is None:
        near = neighbours(line, x, (before, after)).clamp(min=0)
    left, right = run.without(before, after)
    return exact_sums(line, x, left, near).merge(exact_sums(line, x, right, near))


def sums_in_windows(line: Line, run: Run) -> Sums:
    """Return the sums of every query over its run of keys, with the moments that the task asks for."""
    return sum_runs(line.task, (run,) if line.own is None else run.without(*line.own))


def _is_far_from_keys(line: Line, x: Tensor, near: Tensor) -> Tensor:
    """Return where the log-weights of a Gaussian are so large that their differences have lost digits."""
    if line.task.kernel != "gaussian" or not len(line.keys):
        return torch.zeros_like(x, dtype=torch.bool)
    return (x - line.keys[near.clamp(min=0)]).abs() > _REMOTE_BANDWIDTHS * line.h


def _sums_far_from_keys(line: Line, x: Tensor, run: Run, near: Tensor) -> Sums:
    """Return Gaussian sums far from all keys, where only the differences to the nearest key keep their digits."""
    unit, values, weights = 1.0 / line.h, line.task.values, line.weights()
    base = line.keys[near]
    away = (x - base) * unit
    numerator, denominator = x.new_zeros(len(x), values.shape[1]), x.new_zeros(len(x))
    counts = run.stop - run.first
    # All pairs of a query and a key of its run, numbered one after the other: query i has those below ends[i].
    ends = counts.cumsum(0)
    begins, total = ends - counts, int(ends[-1])
    for start in range(0, total, _PAIRS_AT_ONCE):
        pair = torch.arange(start, min(start + _PAIRS_AT_ONCE, total))
        owner = torch.searchsorted(ends, pair, right=True)
        key = pair - begins[owner] + run.first[owner]
        step = (line.keys[key] - base[owner]) * unit
        # -½ (a - s)² + ½ a², a product that has the relative precision of both factors.
        weight = (step * (away[owner] - 0.5 * step)).exp() * weights[key]
        denominator.index_add_(0, owner, weight)
        numerator.index_add_(0, owner, weight.unsqueeze(-1) * values[key])
    return Sums(numerator, denominator, (-0.5 * away.square()).clamp(min=-torch.finfo(torch.float64).max))
