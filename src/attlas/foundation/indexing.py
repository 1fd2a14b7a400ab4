"""Parses the index of ``A[...]``, which gives cells as a Tensor or a smaller lazy matrix."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attlas.errors import DtypeError, OutOfRangeError, ShapeError, kind
from attlas.foundation.compat import tracing


@dataclass(frozen=True)
class Axes:
    """The leading axes that the user sees, over the (batch, heads) of the engine.

    Parameters
    ----------
    layout : tuple of int
        Sizes of the leading axes: none, ``(batch,)`` or ``(..., heads)``; an axis taken away by an integer
        index stays here with size 1.
    kept : tuple of bool
        Which of them the user still sees.
    """

    layout: tuple[int, ...]
    kept: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading axes that the user sees."""
        if all(self.kept):
            return tuple(self.layout)
        return tuple(size for size, kept in zip(self.layout, self.kept, strict=True) if kept)

    def restore(self, t: Tensor) -> Tensor:
        """Give a result of shape (batch, heads, ...) the leading axes that the user sees."""
        if t.shape[:2] == self.layout and all(self.kept):
            return t
        return t.reshape((*self.shape, *t.shape[2:]))

    def restore_all(self, result: Any) -> Any:
        """Give a result, a tensor or a (named) tuple of tensors, the leading axes that the user sees."""
        if isinstance(result, Tensor):
            return self.restore(result)
        parts = map(self.restore_all, result)
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)

    def spread(self, t: Tensor) -> Tensor:
        """Return a factor of a product with axes of size 1 inserted where an index has dropped leading axes."""
        if all(self.kept):
            return t
        # Leading axes that the factor lacks have size 1.
        lead = (1,) * (sum(self.kept) - (t.ndim - 2)) + tuple(t.shape[:-2])
        sizes = iter(lead)
        return t.reshape(*(next(sizes) if kept else 1 for kept in self.kept), *t.shape[-2:])


class Where(NamedTuple):
    """A parsed index: which batches and heads, and which rows and columns if they are asked for.

    Parameters
    ----------
    leading : tuple or None
        Batches, heads, and the leading axes of the result; None where all are meant.
    rows, columns : int, range or Tensor of int64
        None, both, where only leading axes were indexed.
    pairs : bool
        Whether rows and columns name cells in pairs, as two lists do in torch, and not every row with every column.
    """

    leading: tuple[Any, Any, Axes] | None
    rows: Any
    columns: Any
    pairs: bool

    def squeezed(self, cells: Tensor) -> Tensor:
        """Drop the axes of rows or columns that one integer named."""
        cells = cells.squeeze(-2) if isinstance(self.rows, int) else cells
        return cells.squeeze(-1) if isinstance(self.columns, int) else cells


def parse(key: Any, axes: Axes, m: int, n: int) -> Where | None:
    """Parse an index of a lazy matrix.

    Parameters
    ----------
    key : Any
        What stands in the square brackets.
    axes : Axes
        Leading axes of the matrix.
    m, n : int
        Sizes of its last two axes.

    Returns
    -------
    Where, or None where the index is one that only the dense tensor knows
        `leading` is None where all batches and heads are meant; `rows` is None where only leading axes were
        indexed. Rows and columns are an int, a range or an index tensor.

    Raises
    ------
    OutOfRangeError
        If an index lies outside its axis.
    ShapeError
        If there are more indices than axes, or index lists that do not fit.
    DtypeError
        If an index is of a kind that no tensor knows.
    """
    shape = (*axes.shape, m, n)
    entries = list(key) if isinstance(key, tuple) else [key]
    entries = [torch.from_numpy(entry) if isinstance(entry, np.ndarray) else entry for entry in entries]
    if any(entry is None or isinstance(entry, bool) or getattr(entry, "ndim", 0) > 1 for entry in entries):
        return None  # new axes, and tensors of indices or truths
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        fix = "A[..., 17, :] for one row of all heads."
        raise _index_error("there is at most one Ellipsis.", shape, f"{len(dots)} of them", fix)
    if len(entries) - len(dots) > len(shape):
        found, fix = f"{len(entries) - len(dots)} indices, {len(shape)} axes", "A[0, 3, 17, :] for one row of one head."
        raise _index_error("there are more indices than axes.", shape, found, fix)
    missing = [None] * (len(shape) - (len(entries) - len(dots)))
    split = dots[0] if dots else len(entries)
    # None marks an axis that was not named: a matrix stays lazy while its last two axes are not named.
    named = [*map(_checked_entry, entries[:split]), *missing, *map(_checked_entry, entries[split + 1 :])]
    lists = [axis for axis, entry in enumerate(named) if isinstance(entry, Tensor | range | list)]
    pairs = lists == [len(shape) - 2, len(shape) - 1]
    if len(lists) > 1 and not pairs:
        return None
    resolved = [
        None if entry is None else _resolved_entry(entry, size, axis, shape)
        for axis, (entry, size) in enumerate(zip(named, shape, strict=True))
    ]
    leading = _leading_slices(resolved[:-2], axes)
    rows, columns = resolved[-2:]
    if rows is None and columns is None:
        return Where(leading, None, None, False)
    rows = span_of(0, m) if rows is None else rows
    columns = span_of(0, n) if columns is None else columns
    if pairs and 1 in (len(rows), len(columns)):
        rows, columns = torch.broadcast_tensors(rows, columns)
    if pairs and len(rows) != len(columns):
        rule = "two lists of indices name cells in pairs and must have the same length."
        fix = "A[..., rows, :][..., columns] for every row with every column."
        raise _index_error(rule, shape, f"{len(rows)} rows, {len(columns)} columns", fix)
    return Where(leading, rows, columns, pairs)


def _index_error(
    rule: str, shape: tuple[int, ...], found: str, fix: str, error: type[ShapeError] = ShapeError
) -> ShapeError:
    """Return an error, of class `error`, about an index of a matrix of this shape."""
    return error(rule, found, fix, A=f"shape {shape}", where="A[...]")


def _checked_entry(entry: Any) -> Any:
    """Return one entry of an index as an int, slice, range, list or index tensor.

    Raise a DtypeError for other types.
    """
    if isinstance(entry, slice | range):
        return entry
    if isinstance(entry, Tensor) and entry.ndim == 0 and not entry.is_floating_point() and entry.dtype != torch.bool:
        return int(entry)
    if isinstance(entry, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in entry):
        return list(entry)
    if isinstance(entry, list | tuple) and entry and all(isinstance(i, bool) for i in entry):
        return torch.tensor(entry, device="cpu")
    if isinstance(entry, Tensor) and entry.ndim == 1 and not (entry.is_floating_point() or entry.is_complex()):
        return entry.cpu() if entry.dtype in (torch.bool, torch.uint8) else entry.to("cpu", torch.int64)
    if not isinstance(entry, bool | Tensor) and hasattr(entry, "__index__"):
        return operator.index(entry)
    rule = "an index is an integer, a slice, a list of integers, or True and False for each cell of an axis."
    given = {"index": entry if isinstance(entry, Tensor) else repr(entry)[:60]}
    raise DtypeError(rule, kind(entry), "A[0, 3, 5:9, :] or A[..., [2, 5], :].", arguments=given, where="A[...]")


def _resolved_entry(entry: Any, size: int, axis: int, shape: tuple[int, ...]) -> Any:
    """Return an index counted from 0: an int, a range of step 1, or an index tensor on the CPU.

    Parameters
    ----------
    entry : int, slice, range, list or Tensor
        The index, negative ones counted from the end.
    size : int
        Size of the axis that it selects from.
    axis : int
        Number of this axis, for errors.
    shape : tuple of int
        Shape of the matrix.
    """
    if isinstance(entry, slice):
        # torch.compile would fix the ends of a range, and compile again for each other length.
        if torch.compiler.is_compiling() and axis >= len(shape) - 2 and (entry.step or 1) > 0:
            return torch.arange(size, device="cpu")[entry]
        span = range(size)[entry]
        if span.step == 1:
            return range(span.start, max(span.stop, span.start))
        return _as_int64_places(span)
    if isinstance(entry, int | range | list):  # no number of a tensor is read, so that programs can be traced
        ends = (entry,) if isinstance(entry, int) else entry if isinstance(entry, list) else (*entry[:1], *entry[-1:])
        outside = [i for i in ends if not -size <= i < size]
        if outside:
            raise _out_of_range_error(outside[0], axis, shape)
        if isinstance(entry, int):
            return entry % size
        return _as_int64_places(entry) % max(size, 1)
    index: Tensor = entry
    if index.dtype in (torch.bool, torch.uint8):
        if len(index) != size:
            found = f"{len(index)} of them on axis {axis} of size {size}"
            raise _index_error(
                "an index of True and False has one for each cell of its axis.", shape, found, "A[..., mask]"
            )
        return index.nonzero().flatten()
    if not tracing():
        beyond = index[(index < -size) | (index >= size)]
        if beyond.numel():
            raise _out_of_range_error(int(beyond[0]), axis, shape)
    return index % size if size else index


def span_of(start: int, stop: int) -> range | Tensor:
    """Return consecutive rows or columns as a range.

    As a tensor under torch.compile, which would fix the ends of a range.
    """
    return torch.arange(start, stop, device="cpu") if torch.compiler.is_compiling() else range(start, stop)


def _out_of_range_error(index: int, axis: int, shape: tuple[int, ...]) -> ShapeError:
    """Return the error about an index that lies outside its axis."""
    size = shape[axis]
    fix = f"use an index from {-size} to {size - 1}." if size else "this axis is empty."
    found = f"index {index} on axis {axis} of size {size}"
    return _index_error("an index lies outside its axis.", shape, found, fix, OutOfRangeError)


def _as_int64_places(some: range | list[int]) -> Tensor:
    """Return a range, or a list of indices, as an int64 tensor on the CPU."""
    if isinstance(some, range) and len(some):
        return torch.arange(some.start, some.stop, some.step, device="cpu")
    return torch.tensor(list(some), dtype=torch.int64, device="cpu")


def _leading_slices(entries: list[Any], axes: Axes) -> tuple[Any, Any, Axes] | None:
    """Return batches and heads that an index selects, as slices where possible, and the leading axes that remain.

    `entries` are resolved indices of the leading axes that the user sees, None for a whole axis. All axes before the
    heads are one axis, the batch, in the engine. The result is None where no index selects anything.
    """
    if all(entry is None for entry in entries):
        return None
    rest = iter(entries)
    chosen: list[Any] = [next(rest) if kept else None for kept in axes.kept]
    kept = tuple(k and not isinstance(entry, int) for k, entry in zip(axes.kept, chosen, strict=True))
    picks = [_picked_positions(entry, size) for entry, size in zip(chosen, axes.layout, strict=True)]
    batch_axes = len(picks) - 1 if len(picks) >= 2 else len(picks)
    batches = _flattened_picks(picks[:batch_axes], axes.layout[:batch_axes])
    heads = picks[-1] if len(picks) >= 2 else range(1)  # with one leading axis, there is one head
    return _as_slice(batches), _as_slice(heads), Axes(tuple(map(len, picks)), kept)


def _picked_positions(entry: Any, size: int) -> Tensor | range:
    """Return the positions that a resolved index selects of an axis of a size; None selects all."""
    return range(size) if entry is None else range(entry, entry + 1) if isinstance(entry, int) else entry


def _flattened_picks(picks: Sequence[Tensor | range], sizes: tuple[int, ...]) -> Tensor | range:
    """Return which positions are picked once all axes are flattened to one: a range where they follow each other.

    `picks` holds the positions that are picked of each axis, `sizes` the sizes of the axes.
    """
    if len(picks) == 1:
        return picks[0]
    lengths = [len(pick) for pick in picks]
    # They follow each other where no axis has a list, and each axis before the last one that is cut gives one position.
    cut = [axis for axis, (length, size) in enumerate(zip(lengths, sizes, strict=True)) if length != size]
    spans = [pick for pick in picks if isinstance(pick, range)]
    if len(spans) == len(picks) and math.prod(lengths[: cut[-1] if cut else 0]) == 1:
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        start = sum(span.start * stride for span, stride in zip(spans, strides, strict=True))
        return range(start, start + math.prod(lengths))
    positions = torch.arange(math.prod(sizes), device="cpu").reshape(sizes)
    for axis, pick in enumerate(picks):
        positions = positions.index_select(axis, _as_int64_places(pick) if isinstance(pick, range) else pick)
    return positions.flatten()


def _as_slice(index: Tensor | range) -> Tensor | slice:
    """Return consecutive positions as a slice, so that indexing with it gives a view."""
    if isinstance(index, Tensor) and not (tracing() and len(index)):
        index = as_range(index)
    return index if isinstance(index, Tensor) else slice(index.start, index.stop) if len(index) else slice(0, 0)


def as_range(index: Tensor) -> range | Tensor:
    """Return consecutive positions as a range, others as they are."""
    span = range(int(index[0]), int(index[-1]) + 1) if len(index) else range(0)
    return span if len(span) == len(index) and bool((index.diff() == 1).all()) else index
