"""Kernel regression of one Dask frame on another: boxes of queries, each with its own keys and a halo of near ones."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attlas.errors import ShapeError, public
from attlas.estimators.partitions import Partition, dask_module, no_rows, predictions_of
from attlas.estimators.sums.task import BOUNDED

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

_SAMPLED_POINTS = 1000  # points of each partition that the boxes are cut by
_MOST_COPIES = 8.0  # boxes that a key may be sent to, on the mean
_BOUND_DISTANCE = 8.0  # bandwidths from the nearest key up to which a truncated kernel keeps its bound for certain
_PARTITION_FACTOR = 1 << 40  # what the number of a partition is multiplied with, in the place of a row


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of a k-d tree, which fill space.

    Parameters
    ----------
    axis : ndarray of int64, shape (boxes - 1,)
        The coordinate that each node cuts; the children of node i are 2 i + 1 and 2 i + 2.
    cut : ndarray of float64, shape (boxes - 1,)
        Where it cuts.
    """

    axis: Places
    cut: Floats

    def holding(self, points: Floats, reach: float = 0.0) -> tuple[Places, Places]:
        """Return which points lie in which boxes, or within `reach` of them along each coordinate: rows, and boxes.

        Notes
        -----
        Without a reach each point has one box. Cost: one comparison for each level of the tree and each copy.
        """
        rows: list[Places] = [
            np.arange(len(points))
        ]  # the points of each node, and behind the nodes those of each leaf
        for node, (axis, cut) in enumerate(zip(self.axis, self.cut, strict=True)):
            own, rows[node] = rows[node], rows[node][:0]
            gap = points[own, axis] - cut
            rows += [own[gap < reach], own[gap >= -reach]]
        leaves = rows[len(self.axis) :]
        return np.concatenate(leaves), np.repeat(np.arange(len(leaves)), list(map(len, leaves)))


def boxes_of(points: Floats, count: int) -> Boxes:
    """Cut space in `count` boxes (or the next power of two) with about equal numbers of some points (p, d), p > 0."""
    nodes = (1 << max(0, math.ceil(math.log2(count)))) - 1
    axis, cut, parts = np.zeros(nodes, dtype=np.int64), np.zeros(nodes), [points]
    for node in range(nodes):
        part = parts[node]
        if len(part):
            axis[node] = np.ptp(part, axis=0).argmax()
            cut[node] = np.median(part[:, axis[node]])
        below = part[:, axis[node]] < cut[node]
        parts += [part[below], part[~below]]
    return Boxes(axis, cut)


@dataclass(frozen=True, eq=False)
class Halo:
    """What a worker must know to predict boxes.

    Parameters
    ----------
    part : Partition
        How points are scaled and summed; its queries are none, its names are those of the frames that are sent.
    names : tuple of two lists of str
        Columns of the features, and of the outputs, in the frames of the user.
    boxes : Boxes
        In bandwidths.
    reach : float
        Bandwidths within which a key counts.
    least : float
        Logarithm of the sum of the kernel below which the keys beyond the reach might matter.
    """

    part: Partition
    names: tuple[list[str], list[str]]
    boxes: Boxes
    reach: float
    least: float

    def keys(self, frame: Any) -> Any:
        """Return the rows of a partition of memory for each box that they count in."""
        rows, boxes = self.boxes.holding(self.part.points(frame, self.names[0]), self.reach)
        columns = [*self.names[0], *self.names[1]]
        numbers = frame[columns].to_numpy(dtype=np.float64)[rows]
        return _frame_of_numbers(numbers, [*self.part.names[0], *self.part.names[1]], box=boxes)

    def queries(self, frame: Any, partition_info: dict[str, Any] | None = None) -> Any:
        """Return the rows of a partition of queries with their boxes and places."""
        rows, boxes = self.boxes.holding(self.part.points(frame, self.names[0]))
        numbers = frame[self.names[0]].to_numpy(dtype=np.float64)[rows]
        first = (partition_info or {}).get("number", 0) * _PARTITION_FACTOR
        return _frame_of_numbers(numbers, self.part.names[0], box=boxes, place=first + rows)

    def predicted(self, queries: Any, keys: Any) -> Any:
        """Return the predictions of a box, with the ``place`` of each query, by which rows are put in order again.

        NaN where no key is in reach, or where those beyond the reach might matter (`least`).
        """
        part, outputs = self.part, self.part.names[1]
        mean = np.full((len(queries), len(outputs)), np.nan)
        if len(queries):
            points = torch.from_numpy(part.points(queries, part.names[0])).to(part.x)
            sums = replace(part, x=points).sums(keys)
            if sums is not None:
                found = sums.mean()
                found[sums.log_denominator() < self.least] = torch.nan
                mean = found.cpu().numpy().astype(np.float64) * part.unit + part.shift
        return _frame_of_numbers(mean, outputs, place=queries["place"].to_numpy())


def _frame_of_numbers(numbers: Floats, names: list[str], **places: Places) -> Any:
    """Return a pandas frame of numbers with one column for each name, and further columns by keyword."""
    pandas = importlib.import_module("pandas")
    return pandas.DataFrame(numbers, columns=names).assign(**places)


@public("predict()")
def predicted_in_boxes(frame: Any, memory: Any, part: Partition, shape: tuple[int, ...]) -> Any:
    """Return predictions for a Dask frame from the keys of another, with the index and the partitions of the first.

    Parameters
    ----------
    frame, memory : dask.dataframe.DataFrame
        Queries; and keys with their outputs.
    part : Partition
        How they are scaled and summed, and their names; its queries are none.
    shape : tuple of int
        Shape of the outputs of one query.

    Raises
    ------
    MissingExtraError
        If Dask is not installed.
    ShapeError
        If the kernel has no bounds and the tolerance is 0, the bandwidths are not local, or there is no row.

    Notes
    -----
    With n keys, those beyond R bandwidths of a query weigh less than ``n exp(-R²/2)`` under a Gaussian, and
    ``n exp(-R)`` under the Laplace kernel. R is such that this is half of the tolerance for every query within 8
    bandwidths of a key; a query for which it is not, judged by the keys within reach, is predicted to be NaN. The other
    half is for the sums of each box.
    """
    bounded = part.kernel in BOUNDED
    if not bounded and part.tolerance == 0:
        rule = "a kernel without bounds must be truncated, where both are Dask frames."
        raise ShapeError(rule, f"{part.kernel} with tolerance = 0", "tolerance=1e-7, or kernel='epanechnikov'")
    sample, count, keys = _sample_of_points(frame, memory, part)
    reach, least = 1.0 + 1e-5, -math.inf
    if not bounded:
        # Half of the tolerance is for the keys beyond the reach: all `count` of them weigh less than that part of a row
        # whose sum is exp(`least`) or more. One key within `_BOUND_DISTANCE` bandwidths makes up such a sum.
        part = replace(part, tolerance=part.tolerance / 2)
        least = math.log(count / part.tolerance)
        reach = math.sqrt(_BOUND_DISTANCE**2 + 2 * least) if part.kernel == "gaussian" else _BOUND_DISTANCE + least
        least -= reach * reach / 2 if part.kernel == "gaussian" else reach
    boxes = boxes_of(sample, max(frame.npartitions, memory.npartitions))
    copies = len(boxes.holding(keys, reach)[0]) / len(keys)
    number = len(boxes.cut) + 1
    if copies > _MOST_COPIES:
        rule = "bandwidths must be local where both are Dask frames: keys are sent to every box within reach."
        found = f"{copies:.0f} of {number} boxes within {reach:.3g} bandwidths of a key, on the mean"
        fix = "a smaller bandwidth, a kernel with bounds, or predict(queries.compute(), memory=memory)."
        raise ShapeError(rule, found, fix)
    names = [f"x{i}" for i in range(len(part.names[0]))], [f"y{i}" for i in range(len(part.names[1]))]
    halo = Halo(replace(part, names=names), part.names, boxes, reach, least)
    ends = list(range(number + 1))
    # Both frames are sorted by box, so that partition b of one holds the queries of box b, of the other its keys.
    known = memory.map_partitions(halo.keys, meta=halo.keys(memory._meta)).set_index("box", divisions=ends)
    asked = frame.map_partitions(halo.queries, meta=halo.queries(frame._meta)).set_index("box", divisions=ends)
    empty = halo.predicted(asked._meta, known._meta)
    found = asked.map_partitions(halo.predicted, known, meta=empty, align_dataframes=False)
    # Back to the order of the queries: those of partition i have the places from i * _PARTITION_FACTOR on.
    found = found.set_index("place", divisions=[i * _PARTITION_FACTOR for i in range(frame.npartitions + 1)])
    meta = predictions_of(frame._meta, np.zeros((0, len(names[1]))), shape)
    return frame.map_partitions(_predictions_in_order, found, shape, meta=meta, align_dataframes=False)


def _predictions_in_order(queries: Any, found: Any, shape: tuple[int, ...]) -> Any:
    """Return the predictions of a partition of queries, which are found by their places, in the order of its rows."""
    return predictions_of(queries, found.sort_index().to_numpy(), shape)


def _sample_of_points(frame: Any, memory: Any, part: Partition) -> tuple[Floats, int, Floats]:
    """Return a sample of all points, the number of keys, and a sample of the keys, in bandwidths."""
    dask = dask_module()
    known = dask.delayed(part, pure=False)
    asked = [
        [dask.delayed(_size_and_sample)(known, one) for one in data[part.names[0]].to_delayed()]
        for data in (memory, frame)
    ]
    # Of the keys, then of the queries: the numbers of rows of all partitions, and their samples.
    samples = [list(zip(*found, strict=True)) for found in dask.compute(*asked)]
    keys, every = np.concatenate(samples[0][1]), np.concatenate([*samples[0][1], *samples[1][1]])
    if not len(keys):
        raise no_rows()
    return every, sum(samples[0][0]), keys


def _size_and_sample(part: Partition, frame: Any) -> tuple[int, Floats]:
    """Return how many rows a partition has, and some of them in bandwidths."""
    points = part.points(frame, part.names[0])
    return len(points), points[:: max(1, len(points) // _SAMPLED_POINTS)]
