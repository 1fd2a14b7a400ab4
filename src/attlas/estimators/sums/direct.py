"""Every pair, through the lazy matrix of attlas: its kernels, its log-sum-exp, its masks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.estimators.sums.result import Moments, Sums, concatenate, put_rows, unsort
from attlas.estimators.sums.task import Task
from attlas.masks.runs import RunPerRow
from attlas.matrix.attend import attend

# Log-weights below these have lost digits of float32, and the row is summed again in float64.
_NEGLIGIBLE_LOG_WEIGHT = {
    "gaussian": -32.0,
    "laplace": -64.0,
    "boxcar": -torch.inf,
    "epanechnikov": -4.0,
    "triangular": -4.0,
}
_ROWS_AT_ONCE = 65_536  # queries of one call, between two reports
_MOST_OFFSET = 64.0  # bandwidths up to which offsets from a common origin lose nothing that matters
_LEAF_SIZE = 512


class Run(NamedTuple):
    """Keys ``first_i <= j < stop_i`` of each query, shape (m,)."""

    first: Tensor
    stop: Tensor

    def rows(self, index: Tensor | slice) -> Run:
        """Return the runs of some queries."""
        return Run(self.first[index], self.stop[index])

    def without(self, before: Run, after: Run) -> tuple[Run, Run]:
        """Return the two parts of each run, before and after the query's own key."""
        left = Run(self.first, torch.minimum(self.stop, before.stop))
        return left, Run(torch.maximum(self.first, after.first), self.stop)


def direct_sums(task: Task) -> Sums:
    """Return the sums over every pair of a task whose bandwidths are near 1."""
    kept = torch.ones(len(task.keys), dtype=torch.bool) if task.weights is None else task.weights > 0
    own = without_own(kept) if task.leave_one_out else None
    if not bool(kept.all()):
        task = task.of_keys(kept)
    m = task.x.shape[0]
    parts = []
    for start in range(0, max(m, 1), _ROWS_AT_ONCE):
        some = slice(start, min(start + _ROWS_AT_ONCE, m))
        runs = (None,) if own is None else tuple(run.rows(some) for run in own)
        parts.append(sum_runs(replace(task, x=task.x[some]), runs))
        task.report(some.stop)
    return concatenate(parts)


def without_own(kept: Tensor) -> tuple[Run, Run]:
    """Return the keys before and after each query's own, where only some keys of the queries are `kept`."""
    kept = kept.cpu()
    after = kept.cumsum(0)
    before = after - kept.long()
    return Run(torch.zeros_like(before), before), Run(after, torch.full_like(after, int(after[-1]) if len(kept) else 0))


def sum_runs(task: Task, runs: tuple[Run | None, ...]) -> Sums:
    """Return the sums over runs of keys that do not meet."""
    sums = _sum_one_run(task, runs[0])
    for run in runs[1:]:
        sums = sums.merge(_sum_one_run(task, run))
    return sums


def _sum_one_run(task: Task, run: Run | None) -> Sums:
    """Return the sums over one run of keys a query, in float64 where float32 would lose digits."""
    if task.moments:
        return _sum_run_with_moments(replace(task, x=task.x.double(), keys=task.keys.double()), run)
    sums = sum_run(task, run)
    if task.x.dtype is torch.float32:
        # `log_scale`, the logarithm of what a row was divided by, is low in rows far from all keys.
        low = sums.log_scale < _NEGLIGIBLE_LOG_WEIGHT[task.kernel]
        if bool(low.any()):
            there = low.nonzero().squeeze(-1)
            some = None if run is None else run.rows(there.cpu())
            put_rows(sums, there, sum_run(replace(task, x=task.x[there].double(), keys=task.keys.double()), some))
    return sums


def sum_run(task: Task, run: Run | None) -> Sums:
    """Return the sums over one run of keys a query in the dtype of its tokens, by one product of the lazy matrix."""
    dtype = task.x.dtype
    values, weights = task.values.to(dtype), task.weights
    if weights is not None:
        weights = weights.to(dtype).unsqueeze(-1)
        values = torch.cat([values * weights, weights], -1)
    products, lse = _means_and_log_sums(task, values, run)
    # Products are weighted means, sums on the scale exp(lse): of such weights the sum is 1, and with the weights of the
    # keys it is their mean, the last column.
    if weights is None:
        numerator, denominator = products, (lse > -torch.inf).to(dtype)
    else:
        numerator, denominator = products[:, :-1], products[:, -1]
    sums = Sums(numerator, denominator, lse.double())
    none = denominator == 0
    if run is not None:
        none &= (run.first < run.stop).to(none.device)
    return sums if task.bounded or not bool(none.any()) else _with_nearest_keys(task, run, sums, none)


def _means_and_log_sums(task: Task, values: Tensor, run: Run | None) -> tuple[Tensor, Tensor]:
    """Return the weighted means of values, shape (m, e), and the log-sum-exp of each row."""
    m, n = task.x.shape[0], task.keys.shape[0]
    if not (m and n):
        return values.new_zeros(m, values.shape[1]), values.new_full((m,), -torch.inf)
    mask = None if run is None else RunPerRow(*run)
    matrix = attend(task.x, task.keys, score=task.score(), mask=mask)
    product = matrix @ values if values.shape[1] else values.new_zeros(m, 0)
    return product, matrix.lse.to(values.dtype)


def _with_nearest_keys(task: Task, run: Run | None, sums: Sums, none: Tensor) -> Sums:
    """Give rows whose every weight is below the smallest number the keys that are nearest, which alone count there."""
    n = task.keys.shape[0]
    for i in none.nonzero().squeeze(-1).tolist():
        keys = slice(0, n) if run is None else slice(int(run.first[i]), int(run.stop[i]))
        if keys.start >= keys.stop:
            continue
        gap = (task.x[i].double() - task.keys[keys].double()).abs() / task.bandwidth.to(task.x.device)
        size = gap.amax().clamp(min=1.0)
        # The largest gap comes out first: its square alone may be beyond all numbers.
        log = -gap.sum(-1) if task.kernel == "laplace" else -0.5 * (gap / size).square().sum(-1) * size * size
        log = log.clamp(min=-torch.finfo(torch.float64).max)
        top = log.amax()
        weight = (log - top).exp()
        if task.weights is not None:
            weight = weight * task.weights[keys].double()
        sums.numerator[i] = (weight @ task.values[keys].double()).to(sums.numerator)
        sums.denominator[i] = weight.sum().to(sums.denominator)
        sums.log_scale[i] = top
    return sums


def _sum_run_with_moments(task: Task, run: Run | None) -> Sums:
    """Return the sums with moments: offsets are counted from an origin near each group of queries."""
    m, d = task.x.shape
    if not m:
        return _moments_around(task, run, task.x.new_zeros(d))
    order = torch.arange(m, device=task.x.device) if d > 1 else task.x[:, 0].argsort()
    out: list[Sums] = []
    done: list[Tensor] = []
    for group in order.split(_LEAF_SIZE):
        x = task.x[group]
        middle = (x.amin(0) + x.amax(0)) / 2
        wide = (x - middle).abs().amax(-1) > _MOST_OFFSET
        for part in (group[~wide], *group[wide].split(1)):
            if len(part):
                some = None if run is None else run.rows(part.cpu())
                origin = middle if len(part) > 1 else task.x[part[0]]
                out.append(_moments_around(replace(task, x=task.x[part]), some, origin))
                done.append(part)
    return unsort(concatenate(out), torch.cat(done))


def _moments_around(task: Task, run: Run | None, origin: Tensor) -> Sums:
    """Return the sums with moments of queries near an origin."""
    if run is not None and len(run.first):  # of all keys only those that some query sees
        low, high = int(run.first.min()), max(int(run.stop.max()), int(run.first.min()))
        task = task.of_keys(slice(low, high))
        run = Run(run.first - low, run.stop - low)
    n, d = task.keys.shape
    e = task.values.shape[1]
    z, v = task.keys - origin, task.values.double()
    outer = (z.unsqueeze(-1) * z.unsqueeze(-2)).reshape(n, d * d)
    cross = (z.unsqueeze(-1) * v.unsqueeze(-2)).reshape(n, d * e)
    sums = sum_run(replace(task, values=torch.cat([v, z, outer, cross], -1)), run)
    value, offset, outer, cross = sums.numerator.split([e, d, d * d, d * e], -1)
    outer, cross = outer.unflatten(-1, (d, d)), cross.unflatten(-1, (d, e))
    # From offsets of the origin to those of each query: k - x = (k - origin) - away.
    away, total = task.x - origin, sums.denominator.unsqueeze(-1)
    mixed = offset.unsqueeze(-1) * away.unsqueeze(-2)
    outer = outer - mixed - mixed.mT + (total * away).unsqueeze(-1) * away.unsqueeze(-2)
    cross = cross - away.unsqueeze(-1) * value.unsqueeze(-2)
    first = Moments(offset - total * away, outer, cross)
    return Sums(value, sums.denominator, sums.log_scale, first)
