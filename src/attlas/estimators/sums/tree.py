"""Points in the order of a k-d tree: leaves of nearly equal numbers, each with its bounding box."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
