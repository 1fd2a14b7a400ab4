"""Every pair, through the lazy matrix of attlas: its kernels, its log-sum-exp, its masks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.attend import attend
from attlas.estimators.sums.result import Moments, Sums
from attlas.estimators.sums.spans import Spans
from attlas.estimators.sums.task import Task

__all__ = ["Run", "direct_sums", "joined", "others", "over_runs", "pooled"]

# Log-weights below these have lost digits of float32, and the row is summed again in float64.
_FAR = {"gaussian": -32.0, "laplace": -64.0, "boxcar": -torch.inf, "epanechnikov": -4.0, "triangular": -4.0}
_ROWS = 65_536  # queries of one call, between two reports
_NUMBERS = 1 << 22  # numbers that the values of scattered queries may take
_REACH = 64.0  # bandwidths up to which offsets from a common origin lose nothing that matters
_LEAF = 512


class Run(NamedTuple):
    """Keys ``first_i <= j < stop_i`` of each query, shape (m,)."""

    first: Tensor
    stop: Tensor


def direct_sums(task: Task) -> Sums:
    """Return the sums over every pair of a task whose bandwidths are near 1."""
    if task.weights is not None and not bool((task.weights > 0).all()):
        kept = task.weights > 0
        own = others(kept) if task.leave_one_out else None
        task = replace(task, keys=task.keys[kept], values=task.values[kept], weights=task.weights[kept])
    else:
        own = others(torch.ones(len(task.keys), dtype=torch.bool)) if task.leave_one_out else None
    m = task.x.shape[0]
    parts = []
    for start in range(0, max(m, 1), _ROWS):
        some = slice(start, min(start + _ROWS, m))
        runs = (None,) if own is None else tuple(Run(run.first[some], run.stop[some]) for run in own)
        parts.append(over_runs(replace(task, x=task.x[some]), runs))
        task.tell(some.stop)
    return joined(parts)


def others(kept: Tensor) -> tuple[Run, Run]:
    """Return the keys before and after each query's own, where only some keys of the queries are `kept`."""
    kept = kept.cpu()
    after = kept.cumsum(0)
    before = after - kept.long()
    return Run(torch.zeros_like(before), before), Run(after, torch.full_like(after, int(after[-1]) if len(kept) else 0))


def joined(parts: list[Sums]) -> Sums:
    """Return the sums of all queries from those of some."""
    firsts = [part.first for part in parts if part.first is not None]
    first = None
    if firsts:
        first = Moments(*(torch.cat([getattr(f, name) for f in firsts]) for name in ("offset", "outer", "cross")))
    numerator, denominator, scale = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("numerator", "denominator", "log_scale")
    )
    return Sums(numerator, denominator, scale, first)


def over_runs(task: Task, runs: tuple[Run | None, ...]) -> Sums:
    """Return the sums over runs of keys that do not meet."""
    sums = _over_run(task, runs[0])
    for run in runs[1:]:
        sums = sums.merge(_over_run(task, run))
    return sums


def _over_run(task: Task, run: Run | None) -> Sums:
    """Return the sums over one run of keys a query, in float64 where float32 would lose digits."""
    if task.moments:
        return _with_moments(replace(task, x=task.x.double(), keys=task.keys.double()), run)
    sums = pooled(task, run)
    if task.x.dtype is torch.float32:
        low = sums.log_scale < _FAR[task.kernel]
        if bool(low.any()):
            there = low.nonzero().squeeze(-1)
            some = None if run is None else Run(run.first[there.cpu()], run.stop[there.cpu()])
            again = pooled(replace(task, x=task.x[there].double(), keys=task.keys.double()), some)
            sums.numerator[there] = again.numerator.to(sums.numerator)
            sums.denominator[there] = again.denominator.to(sums.denominator)
            sums.log_scale[there] = again.log_scale
    return sums


def pooled(task: Task, run: Run | None) -> Sums:
    """Return the sums over one run of keys a query in the dtype of its tokens, by one product of the lazy matrix."""
    dtype = task.x.dtype
    values, weights = task.values.to(dtype), task.weights
    if weights is not None:
        weights = weights.to(dtype).unsqueeze(-1)
        values = torch.cat([values * weights, weights], -1)
    products, lse = _product(task, values, run)
    if weights is None:
        numerator, denominator = products, (lse > -torch.inf).to(dtype)
    else:
        numerator, denominator = products[:, :-1], products[:, -1]
    sums = Sums(numerator, denominator, lse.double())
    if task.bounded or not bool((denominator == 0).any()):
        return sums
    return _nearest(task, run, sums)


def _product(task: Task, values: Tensor, run: Run | None) -> tuple[Tensor, Tensor]:
    """Return the weighted means of values, shape (m, e), and the log-sum-exp of each row."""
    m, n = task.x.shape[0], task.keys.shape[0]
    if not (m and n):
        return values.new_zeros(m, values.shape[1]), values.new_full((m,), -torch.inf)
    mask = None if run is None else Spans(*run)
    matrix = attend(task.x, task.keys, score=task.score(), mask=mask)
    product = matrix @ values if values.shape[1] else values.new_zeros(m, 0)
    return product, matrix.lse.to(values.dtype)


def _nearest(task: Task, run: Run | None, sums: Sums) -> Sums:
    """Give rows whose every weight is below the smallest number the keys that are nearest, which alone count there."""
    n = task.keys.shape[0]
    for i in (sums.denominator == 0).nonzero().squeeze(-1).tolist():
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


def _with_moments(task: Task, run: Run | None) -> Sums:
    """Return the sums with moments: offsets are counted from an origin near each group of queries."""
    m, d = task.x.shape
    out: list[Sums] = []
    order = torch.arange(m, device=task.x.device) if d > 1 else task.x[:, 0].argsort()
    groups = list(order.split(_LEAF))
    done: list[Tensor] = []
    for group in groups:
        x = task.x[group]
        middle = (x.amin(0) + x.amax(0)) / 2 if len(group) else x.new_zeros(d)
        wide = ((x - middle).abs().amax(-1) > _REACH) if len(group) else torch.zeros(0, dtype=torch.bool)
        for part in (group[~wide],) if not bool(wide.any()) else (group[~wide], *group[wide].split(1)):
            if not len(part) and m:
                continue
            rows = part.cpu()
            some = None if run is None else Run(run.first[rows], run.stop[rows])
            origin = middle if len(part) != 1 else task.x[part[0]]
            out.append(_around(replace(task, x=task.x[part]), some, origin))
            done.append(part)
    place = torch.empty_like(order)
    place[torch.cat(done)] = torch.arange(m, device=order.device)
    return joined(out).rows(place)


def _around(task: Task, run: Run | None, origin: Tensor) -> Sums:
    """Return the sums with moments of queries near an origin."""
    if run is not None and len(run.first):  # of all keys only those that some query sees
        low, high = int(run.first.min()), max(int(run.stop.max()), int(run.first.min()))
        weights = None if task.weights is None else task.weights[low:high]
        task = replace(task, keys=task.keys[low:high], values=task.values[low:high], weights=weights)
        run = Run(run.first - low, run.stop - low)
    n, d = task.keys.shape
    e = task.values.shape[1]
    z, v = task.keys - origin, task.values.double()
    outer = (z.unsqueeze(-1) * z.unsqueeze(-2)).reshape(n, d * d)
    cross = (z.unsqueeze(-1) * v.unsqueeze(-2)).reshape(n, d * e)
    sums = pooled(replace(task, values=torch.cat([v, z, outer, cross], -1)), run)
    value, offset, outer, cross = sums.numerator.split([e, d, d * d, d * e], -1)
    outer, cross = outer.unflatten(-1, (d, d)), cross.unflatten(-1, (d, e))
    away, total = task.x - origin, sums.denominator.unsqueeze(-1)
    mixed = offset.unsqueeze(-1) * away.unsqueeze(-2)
    outer = outer - mixed - mixed.mT + (total * away).unsqueeze(-1) * away.unsqueeze(-2)
    cross = cross - away.unsqueeze(-1) * value.unsqueeze(-2)
    first = Moments(offset - total * away, outer, cross)
    return Sums(value, sums.denominator, sums.log_scale, first)
