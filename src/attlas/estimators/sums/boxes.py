"""Sums in several coordinates that leave out boxes of keys too far away to matter to a group of queries.

Queries and keys stand in leaves of two k-d trees. The keys of a leaf weigh at most ``W exp(s)``, with s the log-weight
at the least distance between the two boxes and W their weights together. A few leaves near a group of queries are
summed first: that is a lower bound of each query's denominator. Leaves are left out, the lightest first, while their
bounds together stay below the tolerance times the smallest lower bound of the group; those of a bounded kernel where
they are out of reach. What is left is summed by the kernels of attlas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.estimators.sums.direct import Run, sum_runs
from attlas.estimators.sums.result import Sums, concatenate, unsort
from attlas.estimators.sums.task import Task
from attlas.masks.runs import RunPerRow
from attlas.matrix.attend import attend

KEYS, QUERIES = 256, 256  # points of a leaf, about
_LEAVES_OF_BOUND = 2  # leaves that are summed for the lower bound
_SAMPLED_QUERIES = 4096
_GAPS_AT_ONCE = 1 << 22  # numbers that the distances between boxes may take at once


@dataclass(frozen=True, eq=False)
class Forest:
    """A task in leaf order.

    Parameters
    ----------
    task : Task
        With queries and keys leaf by leaf; all weights are above 0.
    queries, keys : Leaves
        Their trees.
    place : Tensor of int64, optional, shape (m,)
        Where the own key of each query stands among the keys, -1 for none, where it is to be left out.
    """

    task: Task
    queries: Leaves
    keys: Leaves
    place: Tensor | None


class _LeafGroup(NamedTuple):
    """Queries [start, stop) and the leaves of keys that they need."""

    start: int
    stop: int
    needed: Tensor


def forest_of(task: Task, keys: int = KEYS, queries: int = QUERIES) -> Forest:
    """Return a task in leaf order; keys of weight 0 are left out."""
    kept = torch.arange(len(task.keys), device="cpu")
    if task.weights is not None:
        kept = kept[task.weights > 0]
    of_keys = leaves_of(task.keys[kept].double(), keys, task.bandwidth)
    of_queries = leaves_of(task.x.double(), queries, task.bandwidth)
    key_order = kept[of_keys.order]
    own_key = None
    if task.leave_one_out:
        # Of each query in leaf order: where its own key stands in leaf order, -1 where that has weight 0.
        own_key = torch.full((len(task.keys),), -1, dtype=torch.int64, device="cpu")
        own_key[key_order] = torch.arange(len(key_order), device="cpu")
        own_key = own_key[of_queries.order]
    return Forest(replace(task.of_keys(key_order), x=task.x[of_queries.order]), of_queries, of_keys, own_key)


def box_sums(task: Task) -> Sums:
    """Return the sums of a task whose keys and queries are not few, within its tolerance.

    Each group of queries is summed over the keys of the boxes near it alone. With `forest.place`, the place of each
    query's own key, that key is left out (leave-one-out).
    """
    forest = forest_of(task)
    task, keys, parts = forest.task, forest.keys, []
    for group in _groups_of_leaves(forest):
        some = slice(group.start, group.stop)
        first = keys.start[:-1][group.needed]
        count = keys.count[group.needed]
        before = count.cumsum(0) - count
        total = int(count.sum())
        # The keys of the needed leaves, leaf by leaf.
        key_numbers = torch.arange(total, device="cpu") + torch.repeat_interleave(first - before, count)
        near = replace(task.of_keys(key_numbers), x=task.x[some])
        runs: tuple[Run | None, ...] = (None,)
        if forest.place is not None:
            runs = _runs_without_own_key(forest.place[some], key_numbers, total)
        parts.append(sum_runs(near, runs))
        task.report(group.stop)
    return unsort(concatenate(parts), forest.queries.order)


def share_to_compute(task: Task) -> float:
    """Estimate which part of all pairs `box_sums` would compute, from a sample of both sides.

    Notes
    -----
    The sample has leaves as many, and so about as wide, as the whole. Cost: about 10 ms.
    """
    m, n = len(task.x), len(task.keys)
    keys, queries = (torch.arange(0, size, max(1, size // _SAMPLED_QUERIES), device="cpu") for size in (n, m))
    weights = torch.ones(n, dtype=task.x.dtype) if task.weights is None else task.weights
    sample = replace(
        task,
        x=task.x[queries],
        keys=task.keys[keys],
        values=task.values[keys, :0],
        weights=weights[keys] * (n / len(keys)),
        leave_one_out=False,
    )
    if not bool((weights[keys] > 0).any()):
        return 1.0
    leaf = max(2, KEYS * len(keys) // n), max(2, QUERIES * len(queries) // m)
    forest = forest_of(sample, *leaf)
    count = forest.keys.count.double()
    needed = sum(float(count[group.needed].sum()) * (group.stop - group.start) for group in _groups_of_leaves(forest))
    return needed / (len(queries) * float(count.sum()))


def _groups_of_leaves(forest: Forest) -> Iterator[_LeafGroup]:
    """Yield the leaves of queries, each with the leaves of keys that it needs."""
    task, queries, keys = forest.task, forest.queries, forest.keys
    leaves, d = keys.low.shape
    weight = keys.count.double() if task.weights is None else _leaf_sums(task.weights.double(), keys)
    step = max(1, _GAPS_AT_ONCE // (leaves * d))
    ends = queries.start.tolist()
    for start in range(0, len(ends) - 1, step):
        stop = min(start + step, len(ends) - 1)
        gap = gaps(queries, keys, start, stop) / task.bandwidth
        if task.bounded:
            # Rounding of a distance must not leave out what is a little within reach.
            needed = gap.square().sum(-1) <= 1.0 + 1e-5
        else:
            log = -gap.sum(-1) if task.kernel == "laplace" else -0.5 * gap.square().sum(-1)
            least = _lower_bounds(forest, start, stop)
            # The most that a leaf of keys can add to a query, in parts of its denominator: (query leaves, key leaves).
            bound = log + weight.log() - least.unsqueeze(-1)
            sizes, way = bound.sort(-1)
            # Leaves that add least are left out, as many as stay below the tolerance together.
            light = sizes.exp().cumsum(-1) <= task.tolerance * (1 - 1e-4)
            needed = ~torch.zeros_like(light).scatter_(1, way, light)
        for leaf in range(start, stop):
            yield _LeafGroup(ends[leaf], ends[leaf + 1], needed[leaf - start].nonzero().squeeze(-1))


def _lower_bounds(forest: Forest, start: int, stop: int) -> Tensor:
    """Return, for leaves [start, stop) of queries, a lower bound of the logarithm of every query's denominator."""
    task, queries, keys = forest.task, forest.queries, forest.keys
    nearest = _near_leaves(queries, keys, start, stop)
    most = int(queries.count[start:stop].max())
    row = _padded_places(queries.start[start:stop], queries.start[start + 1 : stop + 1], most)
    least: Tensor | None = None
    wide = int(keys.count.max())
    # The keys of the nearest leaves alone: a part of the sum, and so below it.
    for leaf in nearest.unbind(-1):
        # The last key of a short leaf stands in for those that it lacks, and is not seen.
        column = _padded_places(keys.start[leaf], keys.start[leaf + 1], wide)
        count = keys.count[leaf].unsqueeze(-1).expand(row.shape)
        runs = [Run(torch.zeros_like(count), count)]
        if forest.place is not None:
            own = forest.place[row] - keys.start[leaf].unsqueeze(-1)
            inside = (own >= 0) & (own < count)
            runs = [
                Run(torch.zeros_like(count), torch.where(inside, own, count)),
                Run(torch.where(inside, own + 1, count), count),
            ]
        for run in runs:
            found = _log_sums(task, row, column, run)
            least = found if least is None else torch.logaddexp(least, found)
    if least is None:
        return queries.low.new_full((stop - start,), -torch.inf)
    least = least.amin(-1)  # less what rounding may have added
    return least - 32 * torch.finfo(task.x.dtype).eps * (1 + least.abs().nan_to_num(posinf=0.0))


def _log_sums(task: Task, row: Tensor, column: Tensor, run: Run) -> Tensor:
    """Return the logarithm of the denominators of groups of queries over groups of keys, shape (groups, queries).

    `row` (groups, queries) and `column` (groups, keys) are places in the task, `run` the keys that each query sees.
    """
    mask = RunPerRow(*(ends.unsqueeze(1) for ends in run))
    matrix = attend(task.x[row].unsqueeze(1), task.keys[column].unsqueeze(1), score=task.score(), mask=mask)
    if task.weights is None:
        return matrix.lse.squeeze(1).double()
    mean = matrix @ task.weights[column].to(task.x.dtype).unsqueeze(1).unsqueeze(-1)
    return mean[:, 0, :, 0].double().log() + matrix.lse.squeeze(1).double()


def _near_leaves(queries: Leaves, keys: Leaves, start: int, stop: int) -> Tensor:
    """Return leaves of keys whose middles are near the middles of leaves of queries, shape (leaves, a few)."""
    mine, theirs = (queries.low[start:stop] + queries.high[start:stop]) / 2, (keys.low + keys.high) / 2
    far = torch.cdist(mine, theirs)
    return far.topk(min(_LEAVES_OF_BOUND, len(theirs)), dim=-1, largest=False).indices


def _padded_places(start: Tensor, stop: Tensor, size: int) -> Tensor:
    """Return the places [start, stop) of each group, shape (groups, size), the last one over and over at the end."""
    return torch.minimum(start.unsqueeze(-1) + torch.arange(size, device="cpu"), stop.unsqueeze(-1) - 1)


def _leaf_sums(weights: Tensor, leaves: Leaves) -> Tensor:
    """Return the sum of the weights of each leaf."""
    leaf = torch.repeat_interleave(torch.arange(len(leaves.count), device="cpu"), leaves.count)
    return torch.zeros(len(leaves.count), dtype=torch.float64, device="cpu").index_add_(0, leaf, weights)


def _runs_without_own_key(place: Tensor, gathered: Tensor, total: int) -> tuple[Run, Run]:
    """Split the gathered keys of each query into the runs before and after its own key, for leave-one-out.

    Without its own key among them, all of them are in the first run.
    """
    index = torch.searchsorted(gathered, place)
    is_gathered = (index < total) & (gathered[index.clamp(max=max(total - 1, 0))] == place) if total else index < 0
    end = torch.full_like(index, total)
    before = torch.where(is_gathered, index, end)
    return Run(torch.zeros_like(index), before), Run(torch.where(is_gathered, index + 1, end), end)


@dataclass(frozen=True, eq=False)
class Leaves:
    """Points ordered so that each leaf is a run of them.

    Parameters
    ----------
    order : Tensor of int64, shape (points,)
        The points, leaf by leaf.
    start : Tensor of int64, shape (leaves + 1,)
        Where each leaf begins in `order`, and the end of the last; no leaf is empty.
    low, high : Tensor, shape (leaves, d)
        Bounding boxes.
    """

    order: Tensor
    start: Tensor
    low: Tensor
    high: Tensor

    @property
    def count(self) -> Tensor:
        """Number of points of each leaf."""
        return self.start.diff()


def leaves_of(points: Tensor, size: int, unit: Tensor) -> Leaves:
    """Cut points, shape (p, d) with p > 0, in leaves of about `size`, always across the side with the most units, (d,).

    Notes
    -----
    Cost: a sort of the points and a copy for each of ``log2(p / size)`` levels.
    """
    p, d = points.shape
    levels = max(0, math.ceil(math.log2(p / size)))
    total = -(-p >> levels) << levels if levels else p
    # Copies of the first point fill the last leaf up, so that every level is one rectangle; they are dropped again.
    order = torch.cat([torch.arange(p, device="cpu"), torch.arange(total - p, device="cpu") + p])
    tree = torch.cat([points, points[:1].expand(total - p, d)])
    for level in range(levels):
        boxes = tree.view(1 << level, -1, d)
        widest = ((boxes.amax(1) - boxes.amin(1)) / unit).argmax(1)
        side = boxes.gather(2, widest.view(-1, 1, 1).expand(-1, boxes.shape[1], 1)).squeeze(-1)
        way = side.argsort(1)
        tree = boxes.gather(1, way.unsqueeze(-1).expand(-1, -1, d)).view(-1, d)
        order = order.view(1 << level, -1).gather(1, way).view(-1)
    kept = (order < p).view(1 << levels, -1)
    boxes = tree.view(1 << levels, -1, d)
    count = kept.sum(1)
    real = count > 0
    start = torch.cat([count.new_zeros(1), count[real].cumsum(0)])
    # A copy of a point lies in the box of some leaf: a box that is a little too large is still right.
    return Leaves(order[kept.view(-1)], start, boxes.amin(1)[real], boxes.amax(1)[real])


def gaps(one: Leaves, other: Leaves, first: int, stop: int) -> Tensor:
    """Return how far leaves [first, stop) of one are from those of another along each coordinate, (., leaves, d)."""
    low, high = one.low[first:stop].unsqueeze(1), one.high[first:stop].unsqueeze(1)
    return torch.maximum(other.low - high, low - other.high).clamp_(min=0.0)
